"""The result types of an analysis: arms, settings, comparisons, and what forbids a conclusion."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from oelm.study import decide, statistics
from oelm.study.decide import Combined
from oelm.study.design import Study
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import Record, baselines_of
from oelm.study.two_way import Overall
from oelm.system.messages import Notice, notice

MeanInterval = TypeVar("MeanInterval", Combined, statistics.Interval)


@dataclass(frozen=True)
class ArmResult:
    """One arm in one setting: its measured runs, and the trials its learning rate was chosen from."""

    method: str
    lr: float | None  # of the measured runs; None if there are none, or several learning rates
    chosen: bool  # whether `lr` was chosen on validation, from a grid all methods share
    records: tuple[Record, ...]  # of the measured runs, in the order of the seeds
    trials: tuple[Record, ...]
    failures: tuple[Record, ...]  # runs without a score
    lr_scores: dict[float, float | None]  # learning rate -> mean validation score; None: a trial failed
    unevaluated: tuple[Cell, ...] = ()  # trials of the grid without a result: missing, or ended by a fault
    near_ties: dict[float, tuple[Record, ...]] = field(default_factory=dict)  # runs at further learning rates

    @property
    def by_lr(self) -> list[tuple[Record, ...]]:
        """The measured runs at the best learning rate, then those at each near-tie."""
        return [self.records, *self.near_ties.values()]

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    @property
    def values(self) -> list[float]:
        """The test metric of each measured run."""
        return [value for record in self.records if (value := record.test) is not None]

    @property
    def at_chance(self) -> list[int]:
        """Seeds whose run is no better than the most frequent class on validation."""
        runs = [r for r in self.records if r.failure_kind != "diverged"]
        return [record.seed for record in runs if record.results.get("at_chance")]

    @property
    def finished(self) -> tuple[Record, ...]:
        """The measured runs that did not diverge."""
        return tuple(record for record in self.records if not record.stand_in)

    @property
    def interval(self) -> statistics.Interval | None:
        return statistics.interval(self.values) if self.values else None

    def step_time(self) -> float | None:
        """Median seconds of a step, over the measured runs."""
        times = [value for record in self.records if (value := record.step_time) is not None]
        return median(times) if times else None

    def area(self) -> float | None:
        """The mean area under the measured runs' learning curves, on the metric's scale."""
        curves = [{point["step"]: point["metrics"][r.metric] for point in r.curve} for r in self.finished]
        sorted_curves = [sorted(curve.items()) for curve in curves if len(curve) > 1]
        areas = [statistics.area_under_curve(*zip(*curve, strict=True)) for curve in sorted_curves]
        return fmean(areas) if areas else None

    def expected_best(self, larger_is_better: bool) -> list[float]:
        scores = [value for record in self.trials if (value := record.validation) is not None]
        return statistics.expected_best(scores, larger_is_better).tolist() if scores else []


@dataclass(frozen=True)
class Collapses:
    seeds: list[int]
    rate: tuple[float, float]  # the exact 95 % interval
    mean_without: float | None


@dataclass(frozen=True)
class Group:
    """One setting (a task, a model, a recipe) and its arms."""

    setting: str
    task: str
    model: str
    metric: str
    precision: str
    kind: str  # "share" (accuracy, F1: points) or "perplexity" (per cent)
    reference_arm: str  # the name of the arm that the others are compared with
    arms: dict[str, ArmResult]
    matrix: Matrix | None  # of a study; None for runs outside of a study

    @property
    def name(self) -> str:
        """The task, with the number of its training texts where the study asks for a part of them."""
        size = self.records[0].config.task.train_size if self.records else None
        return f"{self.task} with {size:,} texts" if size else self.task

    @property
    def folder(self) -> Path:
        """The study's folder, or that of a run outside of one."""
        folder = self.records[0].folder.resolve()
        return next((up for up in folder.parents if (up / "study.toml").is_file()), folder)

    @property
    def larger_is_better(self) -> bool:
        return self.kind == "share"

    @property
    def tolerance(self) -> float:
        """One point on the metric's own scale (for a perplexity, one per cent of the best)."""
        if self.kind == "share":
            return 0.01
        scores = [s for arm in self.arms.values() for s in arm.lr_scores.values() if s is not None]
        return 0.01 * min(scores, default=1.0)

    @property
    def records(self) -> list[Record]:
        return [record for arm in self.arms.values() for record in (*arm.trials, *chain(*arm.by_lr))]

    @property
    def trivial_baselines(self) -> dict[str, dict[str, Any]]:
        """Trivial baselines on the test split that have the setting's metric: name -> metrics."""
        return baselines_of((r for arm in self.arms.values() for r in arm.records), self.metric)

    def behind(self, arm: ArmResult) -> list[str]:
        """The trivial baselines that are better than the arm's mean."""
        if not arm.values:
            return []
        mean, sign = fmean(arm.values), 1 if self.larger_is_better else -1
        scores = {name: metrics[self.metric] for name, metrics in self.trivial_baselines.items()}
        return [name for name, score in scores.items() if sign * score > sign * mean]

    def robustness(self, arm: ArmResult) -> statistics.Robustness | None:
        """How much the arm's learning rate matters, by the learning rates whose trials are all evaluated;
        None if fewer than two of them have a score."""
        partial = {cell.lr for cell in arm.unevaluated}
        lrs = list(arm.lr_scores)
        scores = [None if lr in partial else score for lr, score in arm.lr_scores.items()]
        if len(scores) - scores.count(None) < 2:
            return None
        return statistics.lr_robustness(lrs, scores, self.larger_is_better, self.tolerance)

    @property
    def tried_lrs(self) -> list[float]:
        return sorted({lr for arm in self.arms.values() for lr in arm.lr_scores})

    def points(self, value: float) -> float:
        """A score on the scale of differences: points, or -100 times the logarithm of a perplexity."""
        return 100 * value if self.kind == "share" else -100 * math.log(value)

    def shown(self, difference: float) -> float:
        """A difference as a report shows it: points, or by how many per cent a perplexity is lower."""
        return difference if self.kind == "share" else -100 * math.expm1(-difference / 100)

    def shown_interval(self, interval: MeanInterval) -> MeanInterval:
        """A mean difference and its interval as a report shows them."""
        ends = [None if end is None else self.shown(end) for end in (interval.low, interval.high)]
        return replace(interval, mean=self.shown(interval.mean), low=ends[0], high=ends[1])

    def bound(self, margin: float) -> float:
        """A margin, in points or per cent of a perplexity, on the scale of differences."""
        return margin if self.kind == "share" else 100 * math.log1p(margin / 100)

    def collapses(self, arm: ArmResult) -> "Collapses | None":
        """An arm's collapsed runs; None if there are none."""
        if not (seeds := self.collapsed(arm.records)):
            return None
        others = [value for seed, value in zip(arm.seeds, arm.values, strict=True) if seed not in seeds]
        rate = decide.collapse_rate(len(seeds), len(arm.records))
        return Collapses(seeds, rate, fmean(others) if others else None)

    def collapsed(self, runs: Sequence[Record]) -> list[int]:
        """Seeds whose run diverged or fell far below the others of its arm; see `oelm.study.decide`."""
        low = decide.collapsed([self.points(r.test) for r in runs if r.test is not None])
        return [run.seed for index, run in enumerate(runs) if run.stand_in or index in low]


@dataclass(frozen=True)
class Comparison:
    """Two arms of a setting. All differences are positive where `method` is better than `reference`.

    `overall` counts seeds and test items, at the two best learning rates; `combined` is what holds for all
    combinations of near-tied learning rates, and decides. `by_seeds` and `by_items` count one of them only.
    """

    group: Group
    method: str
    reference: str
    margin: float
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # by seed, at the two best learning rates
    overall: Overall | None
    combined: Combined | None
    by_seeds: statistics.Interval | None
    by_items: statistics.Interval | None
    problems: tuple[str, ...]  # codes of PROBLEMS: why no conclusion may be drawn
    pairs: int  # of seeds, at the near-tied learning rates that have the fewest
    p_holm: float | None = None  # of a difference, within the family of all planned comparisons
    margin_p_holm: float | None = None  # of a difference within the margin, in a family of its own

    @property
    def arm(self) -> ArmResult:
        return self.group.arms[self.method]

    @property
    def reference_arm(self) -> ArmResult:
        return self.group.arms[self.reference]

    @property
    def collapsed(self) -> bool:
        """Whether a run of either arm collapsed: then nothing is called equivalent."""
        arms = (self.arm, self.reference_arm)
        return any(self.group.collapsed(runs) for arm in arms for runs in arm.by_lr)

    @property
    def verdict(self) -> str:
        """better, worse, equivalent, open ("undecided" in reports) or void ("no verdict": see `problems`)."""
        if self.problems or self.combined is None:
            return "void"
        equivalent = None if self.collapsed else self.margin_p_holm
        return decide.verdict(self.combined.mean, self.p_holm, equivalent)

    @property
    def small_difference(self) -> bool:
        """Whether the arms are equivalent although their difference, smaller than the margin, is
        significant."""
        return self.verdict == "equivalent" and self.p_holm is not None and self.p_holm < decide.LEVEL

    @property
    def only_family(self) -> bool:
        """Whether only the correction for the other comparisons leaves this one undecided: its own interval
        excludes 0."""
        combined = self.combined
        if self.verdict != "open" or combined is None or combined.low is None or combined.high is None:
            return False
        return combined.low > 0 or combined.high < 0


PROBLEMS = (
    "few_seeds", "no_items", "one_group", "other_rates", "unequal_trials", "at_chance", "other_arithmetic",
    "unevaluated", "failed", "unfinished", "chosen_on_test",
)  # fmt: skip


def explain_problems(
    codes: Iterable[str], arms: Mapping[str, ArmResult], pairs: int, comparisons: int
) -> list[Notice]:
    """Notices for codes of PROBLEMS. `arms`: name to show -> arm that was compared; `comparisons`: how many
    the study planned."""
    lost = {name: list(arm.at_chance) for name, arm in arms.items() if arm.at_chance}
    values: dict[str, dict[str, Any]] = {
        "few_seeds": {"n": pairs, "fewest": decide.fewest_seeds(comparisons), "comparisons": comparisons},
        "at_chance": {"runs": [notice("study.seeds", method=name, seeds=s) for name, s in lost.items()]},
        "unevaluated": {"methods": list(dict.fromkeys(a.method for a in arms.values() if a.unevaluated))},
    }
    return [notice(f"problem.{code}", **values.get(code, {})) for code in codes]


@dataclass(frozen=True)
class Across:
    """An arm against the reference arm over several tasks, in points."""

    method: str
    tasks: int
    interquartile_mean: statistics.Estimate  # of the paired differences
    probability_of_improvement: statistics.Estimate


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report."""

    title: str
    study: Study | None
    groups: list[Group]
    comparisons: list[Comparison]
    across: list[Across]
    planned: int = 0  # comparisons, those without runs included
    left_out: int = 0  # records in the folder that do not belong to the study
    copies: int = 0  # of runs that are in the folder twice
    remade: int = 0  # of these, copies that scored differently
    unused: int = 0  # measured runs that the current study does not need
    damaged: list[Notice] = field(default_factory=list)  # records that cannot be read
    changes: list[dict[str, Any]] = field(default_factory=list)  # of the plan, after runs had been tested
    changed: "Analysis | None" = None  # as the changed study would have it; the verdicts are the plan's
    unplanned: bool = False  # a study without a recorded plan
    mixtures: dict[str, list[str]] = field(default_factory=dict)  # package, ... -> the values

    @property
    def level(self) -> float:
        """Of the intervals of differences: 95 %, or more where the study looks several times."""
        return 1 - decide.LEVEL / (len(self.study.looks) if self.study else 1)

    @property
    def records(self) -> list[Record]:
        return [record for group in self.groups for record in group.records]

    def of_group(self, group: Group) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if comparison.group is group]

    def comparison(self, group: Group, method: str, reference: str) -> Comparison | None:
        pair = (method, reference)
        return next((c for c in self.of_group(group) if (c.method, c.reference) == pair), None)

    def complete(self, group: Group) -> bool:
        """Whether all planned runs of a setting have ended: no conclusion is drawn before that."""
        if self.study and self.study.arms.keys() - group.arms.keys():
            return False
        return not any("unfinished" in comparison.problems for comparison in self.of_group(group))
