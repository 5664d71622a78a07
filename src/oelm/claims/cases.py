"""Which settings of the records a claim is judged on, and what was measured in each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from oelm.claims.data import (
    Claim,
    ClaimPart,
    Interval,
    Sentence,
    claim_data,
    fill,
    format_number,
    format_p,
    format_problems,
    join,
    sentence,
    with_unit,
)
from oelm.config import SUFFIXES
from oelm.models.gpt_sizes import PRESETS
from oelm.study import statistics
from oelm.study.analysis import find_problems, pair_runs, table_of
from oelm.study.decide import LEVEL, Combined, combine
from oelm.study.design import StudyConfig
from oelm.study.records import Record
from oelm.study.result_types import Analysis, ArmResult, Group, explain_problems
from oelm.study.two_way import Array, overall


def architecture(group: Group) -> str:
    """ "gpt" for the reference GPT; else the model's family, such as "bert"."""
    if group.model in PRESETS:
        return "gpt"
    for record in group.records:
        if family := record.results.get("architecture"):
            return "gpt" if family == "oelm-gpt" else str(family)
        if roots := record.parameter_roots:
            return roots.most_common(1)[0][0]
    return model_name(group).partition("-")[0]


def task_kind(group: Group) -> str:
    if group.metric == "perplexity":
        return "lm"
    return "classification" if group.metric in ("accuracy", "f1_macro") else group.metric


def model_name(group: Group) -> str:
    return Path(group.model).name  # a folder without its path


def part_of(claim: Claim, group: Group) -> ClaimPart | None:
    """What the claim measures in this setting, if anything."""
    sources = [record.config.task.data or "" for record in group.records]
    own_file = all(Path(data).suffix.lower() in SUFFIXES for data in sources)  # imdb.csv is not imdb
    any_task = claim.parts.get("any")
    return any_task if own_file else claim.parts.get(group.task, any_task)


def arms_of(claim: Claim, group: Group) -> tuple[ArmResult, ArmResult]:
    """The arm of the claim's method and its reference arm."""
    return group.arms[claim.method], group.arms[claim.reference_arm]


def fitting_groups(claim: Claim, analysis: Analysis) -> tuple[list[Group], list[Group], bool]:
    """The settings a claim is judged on, in a fixed order; those left out because of their model's size; and
    whether both methods were run, but in no setting together."""
    alike = [
        group
        for group in analysis.groups
        if group.records  # or every run failed
        and claim.kind in (None, task_kind(group))
        and (not claim.architectures or architecture(group) in claim.architectures)
        and (not claim.parts or part_of(claim, group))
    ]
    both = {claim.method, claim.reference_arm}
    groups = [group for group in alike if both <= group.arms.keys()]
    apart = not groups and both <= {method for group in alike for method in group.arms}
    places = {task: place for place, task in enumerate(claim.parts)}
    groups.sort(key=lambda g: (places.get(g.task, len(places)), g.task, model_name(g), g.setting))
    published = [g for g in groups if model_name(g) == published_size(g) and not claim.any_size]
    return published or groups, [g for g in groups if published and g not in published], apart


def published_size(group: Group) -> str | None:
    """The model of this architecture that the reports used."""
    sizes: dict[str, str] = claim_data()["sizes"]
    return sizes.get(architecture(group))


def describe_setting(claim: Claim, group: Group) -> Sentence:
    """The setting as a sentence: task, model, recipe and learning rates."""
    arm, reference = arms_of(claim, group)
    if arm.chosen and reference.chosen:
        key = "rates_chosen"
    else:
        key = "rates_same" if arm.lr and arm.lr == reference.lr else "rates_unclear"
    rates = sentence(key, **claim.names, lr=arm.lr, reference_lr=reference.lr)
    model, size = model_name(group), published_size(group)
    known = sentence("published_size" if model == size else "other_size", model=model, published=size)
    recipe = _recipe(group)
    return sentence("where", task=group.task, model=known if size else model, recipe=recipe, rates=rates)


def _recipe(group: Group) -> Sentence:
    record = group.records[0]
    training, model = record.config.training, asdict(record.config.model)
    values = {"epochs": training.epochs, "steps": training.steps}
    values["samples"] = record.results.get("samples")  # the data may be a part of the original
    values |= {"batch": training.batch_size, "batch_tokens": training.batch_tokens}
    values["length"] = record.config.task.max_length
    texts = [sentence(key, value=value) for key, value in values.items() if value]
    plain = [training.schedule, group.precision]
    plain += [f"{key} {value}" for key, value in model.items() if key != "name" and value is not None]
    return join([*texts, *((text, text) for text in plain)], (", ", "，"))


def notes(claim: Claim, group: Group) -> list[Sentence]:
    """What a reader should know besides the verdict: a best learning rate at the edge of the grid, a trivial
    baseline that is better."""
    sentences = []
    for arm in reversed(arms_of(claim, group)):
        if arm.chosen and group.matrix and arm.lr in (group.matrix.grid[0], group.matrix.grid[-1]):
            sentences.append(sentence("edge", method=arm.method))
        for name in group.behind(arm):
            score, baseline = fmean(arm.values), group.trivial_baselines[name][group.metric]
            values = {"method": arm.method, "score": f"{score:.4g}", "baseline": f"{baseline:.4g}"}
            sentences.append(sentence("behind", name=name, **values))
    return sentences


def _scale(measure: str, case: "ClaimCase") -> tuple[Callable[[float], float], Callable[[float], float]]:
    """From a difference in points (of a perplexity: 100 times its logarithm) to the measure, and back."""
    sign, shift = -1.0 if measure == "increase" else 1.0, 0.0
    if measure in ("points", "difference"):
        return (lambda points: points), (lambda value: value)
    if measure == "kept":  # the reference arm's accuracy counts as known: its error moves this by little
        accuracy = fmean(reference for _, reference in case.scores)
        return (lambda points: 100 + points / accuracy), (lambda value: (value - 100) * accuracy)
    if measure == "saving_per_parameter":
        arms = (case.group.arms[name] for name in (case.method, case.reference_arm))
        ours, theirs = (arm.records[0].results["parameters"]["trainable"] for arm in arms)
        shift = 100 * math.log(ours / theirs)
    return (
        lambda points: 100 * (math.exp((sign * points + shift) / 100) - 1),
        lambda value: sign * (100 * math.log(1 + value / 100) - shift),
    )


def _score(measure: str, record: Record) -> float:
    assert record.test is not None  # measured runs have been tested
    if measure == "saving_per_parameter":
        return record.test / float(record.results["parameters"]["trainable"])
    return record.test


@dataclass(frozen=True)
class ClaimCase:
    """One setting with its measurements, before anything is decided."""

    group: Group
    part: ClaimPart
    method: str
    reference_arm: str
    scores: tuple[tuple[float, float], ...]  # of the method and of the reference arm, by seed
    tables: tuple[tuple[Array, Array], ...]  # of each combination of near-tied learning rates: `table_of`
    problems: tuple[str, ...]
    comparisons: int  # of the study
    above: float
    below: float

    @property
    def unit(self) -> str:
        points = ("points", "difference") if self.group.kind == "share" else ("points",)
        return "points" if self.part.measure in points else "%"

    @cached_property
    def _combined(self) -> Combined | None:
        return combine([overall(*table) for table in self.tables], 1.0) if self.tables else None

    @property
    def mean(self) -> float | None:
        return _scale(self.part.measure, self)[0](self._combined.mean) if self._combined else None

    @property
    def interval(self) -> Interval | None:
        """Over seeds and test items, for all near-tied learning rates."""
        found = self._combined
        if found is None or found.low is None or found.high is None:
            return None
        low, high = sorted(map(_scale(self.part.measure, self)[0], (found.low, found.high)))
        return low, high

    def explain_problems(self) -> Sentence:
        arms = {name: self.group.arms[name] for name in (self.reference_arm, self.method)}
        return format_problems(explain_problems(self.problems, arms, len(self.scores), self.comparisons))

    def p(self, threshold: float) -> float | None:
        """Of "the mean is the threshold", two-sided; None if no conclusion may be drawn."""
        if self.problems or not self.tables:
            return None
        points = _scale(self.part.measure, self)[1](threshold)
        return combine([overall(table - points, sizes) for table, sizes in self.tables], 1.0).p

    def show(self, value: float) -> Sentence:
        return with_unit(value, self.unit, self.part.measure != "kept")

    def describe(self) -> Sentence:
        """The measured number with its interval, as a sentence."""
        if self.mean is None:
            return sentence("nothing")
        interval = sentence("no_interval", n=len(self.scores))
        if self.interval is not None:
            low = format_number(self.interval[0], self.unit, self.part.measure != "kept")
            interval = sentence("interval", low=low, high=self.show(self.interval[1]), n=len(self.scores))
        score, reference = (f"{fmean(column):.4g}" for column in zip(*self.scores, strict=True))
        values = {"score": score, "reference_score": reference, "number": self.show(self.mean)}
        names = {"method": self.method, "reference_arm": self.reference_arm}
        return sentence(self.part.measure, **names, **values, interval=interval)


def margin_of(analysis: Analysis) -> float:
    """The largest difference that does not matter, as the study stated it beforehand."""
    return analysis.study.table.margin if analysis.study else StudyConfig.margin


def make_case(claim: Claim, group: Group, analysis: Analysis, reference_arm: str | None = None) -> ClaimCase:
    """A setting that fits the claim; `reference_arm` replaces the claim's own."""
    part, name = part_of(claim, group), reference_arm or claim.reference_arm
    assert part is not None  # or the group would not fit
    arm, reference = group.arms[claim.method], group.arms[name]
    scores = tuple(
        (_score(part.measure, a), _score(part.measure, b))
        for a, b in pair_runs(arm.records, reference.records)
    )
    ties = [(a, b) for a in arm.by_lr for b in reference.by_lr]
    tables = [table for a, b in ties if (table := table_of(group, pair_runs(a, b))) is not None]
    comparisons = len(analysis.comparisons)
    problems = find_problems(arm, reference, analysis.study, comparisons)
    if scores and len(tables) < len(ties):
        problems, tables = (*problems, "no_items"), []
    thresholds = part.thresholds(margin_of(analysis))
    return ClaimCase(
        group, part, claim.method, name, scores, tuple(tables), problems, comparisons, *thresholds
    )


def control_sentence(claim: Claim, case: ClaimCase, supported: bool, analysis: Analysis) -> Sentence:
    """How the method compares with the control that the claim leaves out."""
    control = case.part.control
    assert control is not None
    templates = claim_data()["controls"][control]
    if control not in case.group.arms:
        return fill(templates["absent"])
    beside = make_case(claim, case.group, analysis, control)
    if beside.problems or beside.mean is None:
        return fill(templates["void"], problems=beside.explain_problems())
    p = beside.p(0.0)
    better = p is not None and p < LEVEL and beside.mean > 0
    key = "plain" if not supported else "better" if better else "other"
    return fill(templates.get(key, templates["plain"]), what=beside.describe())


def growth_sentence(tasks: Sequence[str], cases: Sequence[ClaimCase]) -> Sentence:
    """Whether the measure rises from task to task; the verdict does not depend on it."""
    from scipy import stats

    usable = [case for case in cases if not case.problems and case.group.task in tasks]
    names = ", ".join(tasks)
    if sorted(case.group.task for case in usable) != sorted(tasks):
        return sentence("growth_few", tasks=names)
    usable.sort(key=lambda case: tasks.index(case.group.task))
    # Welch's test: the seeds of different corpora are not pairs.
    losses = [[100 * (score / reference - 1) for score, reference in case.scores] for case in usable]
    tests = [stats.ttest_ind(b, a, equal_var=False) for a, b in pairwise(losses)]
    adjusted = statistics.holm([float(test.pvalue) for test in tests])
    clear = [p is not None and p < LEVEL for p in adjusted]
    for (a, b), test, sure, p in zip(pairwise(usable), tests, clear, adjusted, strict=True):
        if sure and test.statistic < 0:
            falls = {"first": a.group.task, "second": b.group.task, "p": format_p(p)}
            return sentence("growth_no", tasks=names, **falls)
    return sentence("growth_yes" if all(clear) else "growth_open", tasks=names)
