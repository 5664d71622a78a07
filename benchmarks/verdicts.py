"""How often the procedure behind a verdict errs, by simulation: `python benchmarks/verdicts.py --json FILE`.

Every figure is a share of draws in which the truth is known: how often an interval covers it, how often a
difference is found where there is none (`alarms`), how often "equivalent" is said of arms that differ by the
margin. The rules are those of `oelm.study.two_way` and `oelm.study.decide`, called as a report calls them.
"""

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.study.decide import LOOKS, MOST_NEAR_TIES, choice_noise, collapsed, combine, near_ties, verdict
from oelm.study.statistics import holm
from oelm.study.two_way import overall

Array = np.ndarray
Draw = Callable[[np.random.Generator], bool]
DRAWS = 10_000


@dataclass(frozen=True)
class Row:
    """One line of the table: the share of draws in which `what` happened, and its bound."""

    part: str
    what: str
    setting: str
    share: float
    bound: float
    kind: str  # "least": the share must reach the bound; "most": it must not pass it
    draws: int

    @property
    def holds(self) -> bool:
        slack = 2 * math.sqrt(self.bound * (1 - self.bound) / self.draws)
        return self.share >= self.bound - slack if self.kind == "least" else self.share <= self.bound + slack


def differences(
    rng: np.random.Generator, seeds: int, items: int, by_seed: float, by_item: float, rest: float, kind: str
) -> tuple[Array, Array | None]:
    """A table of differences in points with mean 0 from standard deviations in points, and cluster sizes."""
    sizes = rng.geometric(0.3, items) if kind == "clusters" else None

    def noise(scale: float, shape: tuple[int, ...]) -> Array:
        if kind == "skewed":  # centred exponentials
            return scale * (rng.exponential(size=shape) - 1)
        return scale * rng.standard_normal(shape)

    cells = noise(rest, (seeds, items)) / (1 if sizes is None else np.sqrt(sizes))
    return cells + noise(by_seed, (seeds, 1)) + noise(by_item, (1, items)), sizes


def right_or_wrong(rng: np.random.Generator, seeds: int, items: int) -> list[Array]:
    """Right and wrong answers of two arms (points): items of all difficulties, runs of varying skill."""
    hard = rng.normal(1.5, 2.0, items)

    def arm() -> Array:
        habit = 0.5 * rng.standard_normal(items)  # what a method finds hard
        skill = 0.1 * rng.standard_normal((seeds, 1))
        return rng.random((seeds, items)) < 1 / (1 + np.exp(-(hard + habit + skill)))

    return [100.0 * arm(), 100.0 * arm()]


def coverage(draws: int) -> Iterator[Row]:
    """The deciding interval, twelve settings of noise and three numbers of seeds."""
    noises = {"seeds": (1.0, 0.0, 30.0), "items": (0.0, 15.0, 30.0), "both": (0.5, 15.0, 30.0)}
    for kind in ("normal", "skewed", "clusters"):
        for name, scales in noises.items():
            for seeds, items in ((5, 872), (10, 872), (20, 300)):

                def draw(rng: np.random.Generator) -> bool:
                    table, sizes = differences(rng, seeds, items, *scales, kind)  # noqa: B023
                    found = overall(table, sizes)
                    return found.low is not None and found.high is not None and found.low <= 0 <= found.high

                yield row(
                    "interval", "covers", f"{kind}, {name}, {seeds} x {items}", 0.95, "least", draw, draws
                )
    for seeds, items in ((5, 872), (10, 872), (10, 5000)):

        def answers(rng: np.random.Generator) -> bool:
            found = overall(np.subtract(*right_or_wrong(rng, seeds, items)))  # noqa: B023
            return found.low is not None and found.high is not None and found.low <= 0 <= found.high

        yield row("interval", "covers", f"right or wrong, {seeds} x {items}", 0.95, "least", answers, draws)


@dataclass(frozen=True)
class Tuning:
    """Two identical methods that are tuned separately: points, and a grid of log10 learning rates."""

    run: float = 0.8  # standard deviation of a run
    habit: float = 12.0  # of an item at one learning rate of one method
    cell: float = 30.0
    choice: int = 3
    grid: tuple[float, ...] = (-4.0, -3.5, -3.0)
    curve: float = 3.0  # points lost at one power of ten from the best
    items: int = 872
    held_out: int = 2500

    def arm(
        self, rng: np.random.Generator, best: float
    ) -> tuple[dict[float, list[float]], dict[float, Array]]:
        """By learning rate: the scores of the choice runs, and what each item adds to measured runs."""
        means = {lr: -self.curve * (lr - best) ** 2 for lr in self.grid}
        seed = self.run / 2 * rng.standard_normal(self.choice)
        choice = {}
        for lr, mean in means.items():
            luck = self.habit * rng.standard_normal() / math.sqrt(self.held_out)
            runs = seed + self.run * rng.standard_normal(self.choice)
            cells = self.cell / math.sqrt(self.held_out) * rng.standard_normal(self.choice)
            choice[lr] = list(mean + luck + runs + cells)
        return choice, {lr: mean + self.habit * rng.standard_normal(self.items) for lr, mean in means.items()}

    def measured(self, rng: np.random.Generator, base: Array, seeds: int) -> Array:
        run = self.run * rng.standard_normal((seeds, 1))
        return base + run + self.cell * rng.standard_normal((seeds, len(base)))


def tuned(rng: np.random.Generator, tuning: Tuning, looks: tuple[int, ...], rule: str) -> bool:
    """Whether a difference between two identical methods is found."""
    best = rng.uniform(tuning.grid[0], tuning.grid[-1])
    arms = [tuning.arm(rng, best) for _ in range(2)]
    noise = choice_noise([choice for choice, _ in arms])
    most = MOST_NEAR_TIES if rule == "near-ties" else 1
    near = [near_ties(choice, *noise)[:most] for choice, _ in arms]
    runs = [{lr: tuning.measured(rng, items[lr], looks[-1]) for lr in rates}
            for (_, items), rates in zip(arms, near, strict=True)]  # fmt: skip
    for seeds in looks:
        tables = [overall(a[:seeds] - b[:seeds]) for a in runs[0].values() for b in runs[1].values()]
        found = combine(tables, 1.0, len(looks))
        if verdict(found.mean, found.p, None) in ("better", "worse"):
            return True
    return False


def choosing(draws: int) -> Iterator[Row]:
    """Identical methods, tuned separately: how often a difference is found. The first row is the old way."""
    for rule, choice, part in (("best", 1, "one choice run, the best rate (not used)"),
                               ("best", 3, "three choice runs, the best rate (not used)"),
                               ("near-ties", 3, "three choice runs, near-ties")):  # fmt: skip
        for seeds in (5, 10):
            for curve in (1.0, 3.0, 10.0):
                tuning = Tuning(choice=choice, curve=curve)
                draw: Draw = lambda rng: tuned(rng, tuning, (seeds,), rule)  # noqa: B023, E731
                bound = 1.0 if "not used" in part else 0.05
                setting = f"{part}, {seeds} seeds, curve {curve:g}"
                yield row("A/A, tuned", "alarms", setting, bound, "most", draw, draws)


def looking(draws: int) -> Iterator[Row]:
    """Looks at 5, 10, 15 and 20 seeds until something is found."""
    for name, tuning in (("tuned", Tuning()), ("one rate", Tuning(grid=(-3.5,), curve=0.0, choice=1))):
        draw: Draw = lambda rng: tuned(rng, tuning, LOOKS, "near-ties")  # noqa: B023, E731
        yield row("looks", "alarms", f"{len(LOOKS)} looks, {name}", 0.05, "most", draw, draws)


def several(draws: int) -> Iterator[Row]:
    """Any false verdict among several comparisons with one reference arm; noise of seeds and of items."""
    for count in (1, 3, 8):
        for name, truth in (("alarms", 0.0), ("equivalent at the margin", 1.0)):

            def draw(rng: np.random.Generator) -> bool:
                reference = differences(rng, 10, 400, 0.4, 5.0, 15.0, "normal")[0]
                tables = [differences(rng, 10, 400, 0.4, 5.0, 15.0, "normal")[0] - reference + truth  # noqa: B023
                          for _ in range(count)]  # noqa: B023  # fmt: skip
                found = [combine([overall(table)], 1.0) for table in tables]
                p = holm([one.p if truth == 0 else one.margin_p for one in found])  # noqa: B023
                return any(value is not None and value < 0.05 for value in p)

            yield row("several comparisons", name, f"{count}", 0.05, "most", draw, draws)


def collapsing(draws: int) -> Iterator[Row]:
    """One run in ten loses 10 points, or diverges and answers as the most frequent class; both arms alike."""
    for seeds in (5, 10):

        def fall(rng: np.random.Generator) -> tuple[Array, list[Array]]:
            arms = [0.5 * rng.standard_normal(seeds) - 10.0 * (rng.random(seeds) < 0.1) for _ in range(2)]  # noqa: B023
            table = (arms[0] - arms[1])[:, None] + 30.0 * rng.standard_normal((seeds, 872))  # noqa: B023
            return table, arms

        def alarm(rng: np.random.Generator) -> bool:
            found = combine([overall(fall(rng)[0])], 1.0)
            return verdict(found.mean, found.p, None) != "open"

        def unseen(rng: np.random.Generator) -> bool:
            """ "Equivalent" although a run collapsed: it is barred."""
            table, arms = fall(rng)
            found = combine([overall(table)], 1.0)
            barred = any(collapsed(list(arm)) for arm in arms)
            fell = any((arm < -5).any() for arm in arms)
            return fell and not barred and verdict(found.mean, None, found.margin_p) == "equivalent"

        def diverged(rng: np.random.Generator) -> bool:
            majority = 100.0 * (rng.random(872) < 0.55)
            arms = [np.where(rng.random((seeds, 1)) < 0.1, majority, arm)  # noqa: B023
                    for arm in right_or_wrong(rng, seeds, 872)]  # noqa: B023  # fmt: skip
            found = combine([overall(arms[0] - arms[1])], 1.0)
            return verdict(found.mean, found.p, None) != "open"

        yield row("collapses", "alarms", f"{seeds} seeds", 0.05, "most", alarm, draws)
        yield row("collapses", "alarms", f"{seeds} seeds, diverged", 0.05, "most", diverged, draws)
        yield row("collapses", "equivalent all the same", f"{seeds} seeds", 0.05, "most", unseen, draws)


def row(part: str, what: str, setting: str, bound: float, kind: str, draw: Draw, draws: int) -> Row:
    """The share of draws, each from a generator of its own."""
    generators = np.random.default_rng([len(part), len(setting)]).spawn(draws)
    return Row(part, what, setting, sum(map(draw, generators)) / draws, bound, kind, draws)


PARTS = {"coverage": coverage, "choosing": choosing, "looking": looking, "several": several,
         "collapsing": collapsing}  # fmt: skip


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table: settings that differ in sizes only are one row, with their range."""
    rows: dict[tuple[str, str, str], list[Row]] = {}
    for values in record["rows"]:
        one = Row(**values)
        words = [word for word in one.setting.split(", ") if not any(letter.isdigit() for letter in word)]
        rows.setdefault((one.part, one.what, ", ".join(words)), []).append(one)
    lines = ["| part | what | settings | share of draws | bound |", "|---|---|---|---|---|"]
    for (part, what, name), several in rows.items():
        shares = sorted(one.share for one in several)
        span = f"{shares[0]:.1%}" + (f" to {shares[-1]:.1%}" if len(shares) > 1 else "")
        sign, bound = "at least" if several[0].kind == "least" else "at most", several[0].bound
        limit = "none: not used" if bound == 1 else f"{sign} {bound:.0%}"
        missed = sum(not one.holds for one in several)
        limit += f", missed in {missed} of {len(several)}" if missed else ""
        lines.append(f"| {part} | {what} | {name or 'all'} | {span} | {limit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of a record")
    arguments = parser.parse_args()
    if arguments.read:
        print(render(json.loads(arguments.read.read_text())))
        return
    rows = []
    for part in arguments.part or PARTS:
        for found in PARTS[part](arguments.draws):
            rows.append(found)
            sign = ">=" if found.kind == "least" else "<="
            bound = (
                "" if found.bound == 1 else f" ({sign} {found.bound:.0%}{'' if found.holds else ', MISSED'})"
            )
            print(f"{found.part:20} {found.what:24} {found.setting:56} {found.share:.1%}{bound}", flush=True)
    if arguments.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {"command": "python benchmarks/verdicts.py", "commit": commit, "draws": arguments.draws}
        arguments.json.write_text(
            json.dumps(record | {"rows": [asdict(one) for one in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
