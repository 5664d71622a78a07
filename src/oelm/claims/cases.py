"""The settings of the records on which a claim is judged, and the measurement in each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from oelm.claims import data
from oelm.claims.data import Claim, ClaimPart, Interval, Sentence, join, sentence
from oelm.config import SUFFIXES
from oelm.data.catalogue import TASKS
from oelm.models.gpt_sizes import PRESETS
from oelm.study.analysis import find_problems, near_tied_pairs, one_group, table_of
from oelm.study.decide import combine
from oelm.study.records import Record
from oelm.study.result_types import Analysis, ArmResult, Group, explain_problems
from oelm.study.two_way import overall

FEWEST_RATES = 3  # learning rates from which an arm must have chosen
APART = 1.9  # the least ratio of two of them, as closer ones are hardly a choice


@dataclass(frozen=True)
class Setting:
    """A setting with the analysis of its study, which decides its problems and corrections."""

    analysis: Analysis
    group: Group

    @property
    def architecture(self) -> str:
        """ "gpt" for the reference GPT; else the model's family, such as "bert"."""
        if self.group.model in PRESETS:
            return "gpt"
        for record in self.group.records:
            if family := record.results.get("architecture"):
                return "gpt" if family == "oelm-gpt" else str(family)
            if roots := record.parameter_roots:
                return roots.most_common(1)[0][0]
        return self.model.partition("-")[0]

    @property
    def kind(self) -> str:
        """The kind of its task by the metric: "lm", "classification", or the metric's name for others."""
        if self.group.metric == "perplexity":
            return "lm"
        return "classification" if self.group.metric in ("accuracy", "f1_macro") else self.group.metric

    @property
    def model(self) -> str:
        return Path(self.group.model).name  # a folder without its path

    @property
    def published_size(self) -> str | None:
        """The reports' model of this architecture; None if they have none."""
        sizes: dict[str, str] = data.claim_data()["sizes"]
        return sizes.get(self.architecture)

    def part_of(self, claim: Claim) -> str | None:
        """The name of the claim's part that this setting belongs to, if any."""
        sources = [record.config.task.data or "" for record in self.group.records]
        own_file = all(Path(source).suffix.lower() in SUFFIXES for source in sources)  # imdb.csv is not imdb
        names = ("any",) if own_file else (self.group.task, "any")
        return next((name for name in names if name in claim.parts), None)

    @property
    def methods(self) -> set[str]:
        """The arms that really are the method in their name, as a study may give any arm any name."""
        study = self.analysis.study
        planned = study.arms if study else {}
        plain = {n for n, arm in planned.items() if arm.label == n and not arm.settings and not arm.lr}
        return self.group.arms.keys() & plain if study else set(self.group.arms)

    def arms_of(self, claim: Claim) -> tuple[ArmResult, ArmResult]:
        """The arm of the claim's method and its reference arm."""
        return self.group.arms[claim.method], self.group.arms[claim.reference_arm]


@dataclass(frozen=True)
class Fitting:
    """The settings on which a claim is judged, in a fixed order, and those that were left out."""

    settings: Sequence[Setting] = ()
    left_out: Sequence[Setting] = ()  # models of other sizes than the published one
    apart: bool = False  # both methods were run, but in no setting together
    planned: Sequence[str] = ()  # tasks that a study planned for both methods and has no runs of
    copies: Sequence[Setting] = ()  # settings whose runs another setting has, too


def fitting_settings(claim: Claim, analyses: Sequence[Analysis]) -> Fitting:
    every = [Setting(analysis, group) for analysis in analyses for group in analysis.groups if group.records]
    alike = [
        setting
        for setting in every
        if claim.kind in (None, setting.kind)
        and (not claim.architectures or setting.architecture in claim.architectures)
        and (not claim.parts or setting.part_of(claim))
    ]
    both = {claim.method, claim.reference_arm}
    settings = [s for s in alike if both <= s.methods]
    apart = not settings and both <= {method for s in alike for method in s.methods}
    settings, copies = _without_copies(claim, settings)
    order = {task: place for place, task in enumerate(claim.parts)}
    settings.sort(
        key=lambda s: (order.get(s.group.task, len(order)), s.group.task, s.model, s.group.setting,
                       s.analysis.title)
    )  # fmt: skip
    published = [s for s in settings if s.model == s.published_size and not claim.any_size]
    judged = published or settings
    planned = {task for setting in judged for task in _planned(claim, setting)}
    return Fitting(judged, [s for s in settings if s not in judged], apart, sorted(planned), copies)


def _without_copies(claim: Claim, settings: list[Setting]) -> tuple[list[Setting], list[Setting]]:
    """The settings, and those that are left out because another setting has some of their runs, as a run in
    two folders is evidence once. The setting with more runs, or whose study planned more, is kept. A run that
    was made again and scored differently is another run."""
    kept: list[Setting] = []
    copies: list[Setting] = []
    seen: set[tuple[str, float | None]] = set()
    runs = [
        {(r.identity.key, r.score) for r in (*chain(*arm.by_lr),) or arm.trials}
        for arm in (setting.group.arms[claim.method] for setting in settings)
    ]
    order = sorted(range(len(runs)), key=lambda i: (-len(runs[i]), -settings[i].analysis.planned))
    for i in order:
        (kept if seen.isdisjoint(runs[i]) else copies).append(settings[i])
        seen |= runs[i]
    return kept, copies


def _planned(claim: Claim, setting: Setting) -> list[str]:
    """The claim's tasks that the setting's study planned for both methods, but for which it has no runs."""
    study, both = setting.analysis.study, {claim.method, claim.reference_arm}
    present = {group.task for group in setting.analysis.groups if both <= group.arms.keys()}
    return [
        task
        for task in (study.table.tasks if study else ())
        if task not in present
        and {task, "any"} & claim.parts.keys()
        and claim.kind in (None, TASKS[task].kind if task in TASKS else None)
    ]


def rates_problem(setting: Setting, arms: Sequence[ArmResult]) -> Sentence | None:
    """Why the learning rates of these arms allow no conclusion: chosen from too few, by one run each or by
    another metric, without a plan, or best at an edge of the grid; None if they do."""
    matrix, study = setting.group.matrix, setting.analysis.study
    if matrix is None or study is None or not all(arm.chosen and _is_choice(arm) for arm in arms):
        return sentence("untuned", fewest=FEWEST_RATES)
    if study.table.metric not in (None, "accuracy", "perplexity"):
        return sentence("other_metric", metric=study.table.metric)
    if setting.analysis.unplanned:
        return sentence("unplanned")
    if study.table.choose_seeds < 2:
        return sentence("rates_one_run")
    if study.table.measure == "best":
        return sentence("best_only")
    edge = [arm.method for arm in reversed(arms) if arm.method in matrix.at_edge]
    return sentence("edge", methods=" and ".join(edge)) if edge else None


def _is_choice(arm: ArmResult) -> bool:
    """Whether the arm tried enough learning rates that are at least APART from one another."""
    rates: list[float] = []
    for lr in sorted(arm.lr_scores):
        if not rates or lr >= APART * rates[-1]:
            rates.append(lr)
    return len(rates) >= FEWEST_RATES


@dataclass(frozen=True)
class Case:
    """The measurement in one setting or benchmark, before anything is decided."""

    task: str
    model: str
    source: str  # the title of the study, or the name of the benchmark record
    part_name: str
    part: ClaimPart
    threshold: float
    n: int
    unit: str
    mean: float | None
    interval: Interval | None  # over seeds and test items, for all near-tied learning rates
    test: Callable[[float], float | None]  # p of "the mean is this", two-sided
    what: Sentence  # the measured number with its interval
    problem: Sentence | None  # why no conclusion may be drawn
    collapsed: bool = False
    scores: tuple[tuple[float, float], ...] = ()  # of the method and of the reference arm, by seed
    setting: Setting | None = None

    def p(self, threshold: float) -> float | None:
        return None if self.problem or self.mean is None else self.test(threshold)

    def decisive_p(self) -> float | None:
        """p of the threshold; for an equivalence, the larger p of its two bounds if the mean is inside."""
        margin, mean = self.part.within, self.mean or 0.0
        if margin is None:
            return self.p(self.threshold)
        ends = (-margin, margin) if abs(mean) < margin else (math.copysign(margin, mean),)
        p_values = [p for end in ends if (p := self.p(end)) is not None]
        return max(p_values) if len(p_values) == len(ends) else None

    @property
    def ahead(self) -> bool:
        """Whether the mean is on the claim's side."""
        assert self.mean is not None
        within = self.part.within
        return self.mean > self.threshold if within is None else abs(self.mean) < within

    def show(self, value: float) -> Sentence:
        return data.with_unit(value, self.unit, self.part.measure != "kept")


def describe_number(
    part: ClaimPart, unit: str, mean: float, interval: Interval | None, count: Sentence, level: float
) -> dict[str, Sentence]:
    """The number and its interval, for the sentence of a measure; `count` is the sentence on n."""
    signed = part.measure != "kept"
    text = sentence("no_interval", count=count)
    if interval is not None:
        low, high = data.format_number(interval[0], unit, signed), data.with_unit(interval[1], unit, signed)
        text = sentence("interval", level=100 * level, low=low, high=high, count=count)
    return {"number": data.with_unit(mean, unit, signed), "interval": text}


Scale = tuple[Callable[[float], float], Callable[[float], float]]


def _scale(measure: str, group: Group, arms: Sequence[ArmResult], accuracy: float) -> Scale:
    """Two functions: from a difference in points (of a perplexity: 100 times its logarithm) to the measure,
    and back."""
    if measure == "points" or (measure == "difference" and group.kind == "share"):
        return (lambda points: points), (lambda value: value)
    if measure == "kept":  # the reference arm's accuracy is taken as exact, as its error matters little
        return (lambda points: 100 + points / accuracy), (lambda value: (value - 100) * accuracy)
    # Per cent of a perplexity: of the reference arm's, positive is worse ("increase") or better
    # ("difference"); of the method's, positive is better ("saving").
    inner, outer = {"increase": (-1, 1), "difference": (-1, -1)}.get(measure, (1, 1))
    shift = 0.0
    if measure == "saving_per_parameter":
        of_method, of_reference = (arm.records[0].results["parameters"]["trainable"] for arm in arms)
        shift = 100 * math.log(of_method / of_reference)
    return (
        lambda points: outer * 100 * math.expm1((inner * points + shift) / 100),
        lambda value: inner * (100 * math.log1p(outer * value / 100) - shift),
    )


def _score(measure: str, record: Record) -> float:
    assert record.test is not None  # measured runs have been tested
    if measure == "saving_per_parameter":
        return record.test / float(record.results["parameters"]["trainable"])
    return record.test


def make_case(claim: Claim, setting: Setting, control: str | None = None) -> Case:
    """The case of a setting that fits the claim. A control arm replaces the reference arm and is compared
    with the method for equivalence."""
    group, analysis, name = setting.group, setting.analysis, control or claim.reference_arm
    part_name = setting.part_of(claim)
    assert part_name is not None  # or the setting would not fit
    part, arms = claim.parts[part_name], (group.arms[claim.method], group.arms[name])
    if control:
        part = replace(part, within=part.control_margin)
    ties = near_tied_pairs(*arms)
    scores = tuple((_score(part.measure, a), _score(part.measure, b)) for a, b in ties[0])
    tables = [table for tie in ties if (table := table_of(group, tie)) is not None]
    codes = find_problems(*arms, analysis.study, analysis.planned)
    if len(tables) < sum(map(bool, ties)):
        codes = (*codes, "no_items")
    if one_group(tables):
        codes = (*codes, "one_group")
    if len(tables) < len(ties):
        tables = []
    names = {arm.method: arm for arm in reversed(arms)}
    pairs = min(map(len, ties))
    problems = [data.format_problems(explain_problems(codes, names, pairs, analysis.planned))]
    if not {"unevaluated", "other_rates"} & set(codes):  # these imply it
        problems += [text for text in (rates_problem(setting, arms),) if text]
    problem = join([text for text in problems if text[0]], ("; ", "；"))
    looks = len(analysis.study.looks) if analysis.study else 1
    to_measure = to_points = None
    mean, interval = None, None
    unit = (
        "points" if part.measure == "points" or (part.measure, group.kind) == ("difference", "share") else "%"
    )
    what = sentence("nothing")
    if tables:
        to_measure, to_points = _scale(part.measure, group, arms, fmean(score for _, score in scores))
        combined = combine([overall(*table, level=analysis.level) for table in tables], 1.0, looks)
        mean = to_measure(combined.mean)
        if combined.low is not None and combined.high is not None:
            ends = to_measure(combined.low), to_measure(combined.high)
            interval = min(ends), max(ends)
        columns = (f"{fmean(column):.4g}" for column in zip(*scores, strict=True))
        values = dict(zip(("score", "reference_score"), columns, strict=True))
        count = sentence("n_seeds", n=len(scores))
        texts = describe_number(part, unit, mean, interval, count, analysis.level)
        what = sentence(part.measure, method=claim.method, reference_arm=name, **values, **texts)

    def test(threshold: float) -> float | None:
        assert to_points is not None  # or there is no mean
        points = to_points(threshold)
        return combine([overall(table - points, sizes) for table, sizes in tables], 1.0, looks).p

    return Case(
        group.task, setting.model, analysis.title, part_name, part, part.threshold(group.kind), len(scores),
        unit, mean, interval, test, what, problem if problem[0] else None,
        any(group.collapsed(runs) for arm in arms for runs in arm.by_lr), scores, setting,
    )  # fmt: skip
