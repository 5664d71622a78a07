"""Which settings of the records a claim is judged on, and what was measured in each."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from oelm.claims.data import (
    Claim,
    Interval,
    Part,
    Said,
    claim_data,
    figure,
    fill,
    join,
    say,
    show,
    show_p,
    show_problems,
)
from oelm.config import SUFFIXES
from oelm.models.gpt_sizes import PRESETS
from oelm.study import statistics
from oelm.study.analysis import find_problems, pair_runs
from oelm.study.design import StudyConfig
from oelm.study.records import Record
from oelm.study.result_types import LEVEL, Analysis, Group, explain_problems


def architecture(group: Group) -> str:
    """ "gpt" for the reference GPT; else the model's family, such as "bert"."""
    if group.model in PRESETS:
        return "gpt"
    for record in group.records:
        if known := record.results.get("architecture"):
            return "gpt" if known == "oelm-gpt" else str(known)
        if roots := record.parameter_roots:
            return roots.most_common(1)[0][0]
    return model_name(group).partition("-")[0]


def task_kind(group: Group) -> str:
    if group.kind == "perplexity":
        return "lm"
    return "classification" if group.metric in ("accuracy", "f1_macro") else group.metric


def model_name(group: Group) -> str:
    return Path(group.model).name  # of a folder: where it lay is nobody's business


def part_of(claim: Claim, group: Group) -> Part | None:
    """What the claim measures in this setting, if anything."""
    sources = [record.config.task.data or "" for record in group.records]
    own_file = all(Path(data).suffix.lower() in SUFFIXES for data in sources)  # imdb.csv is not imdb
    return claim.parts.get("any") if own_file else claim.parts.get(group.task, claim.parts.get("any"))


@dataclass(frozen=True)
class Fitting:
    """The settings a claim is judged on, in a fixed order, and those left aside for their size; `apart`
    where both methods were run, but in no setting together."""

    groups: list[Group]
    aside: list[Group]
    apart: bool


def fitting(claim: Claim, analysis: Analysis) -> Fitting:
    """The settings whose task, model and methods are the claim's."""
    alike = [
        group
        for group in analysis.groups
        if group.records  # or every run failed
        and claim.kind in (None, task_kind(group))
        and (not claim.architectures or architecture(group) in claim.architectures)
        and (not claim.parts or part_of(claim, group))
    ]
    both = {claim.method, claim.reference}
    groups = [group for group in alike if both <= group.arms.keys()]
    apart = not groups and both <= {method for group in alike for method in group.arms}
    places = {task: place for place, task in enumerate(claim.parts)}
    groups.sort(key=lambda g: (places.get(g.task, len(places)), g.task, model_name(g), g.setting))
    sizes = [] if claim.any_size else [g for g in groups if model_name(g) == published_size(g)]
    return Fitting(sizes or groups, [g for g in groups if g not in sizes] if sizes else [], apart)


def published_size(group: Group) -> str | None:
    found = claim_data()["sizes"].get(architecture(group))
    return None if found is None else str(found)


def where(claim: Claim, group: Group) -> Said:
    """The setting in words: task, model, recipe and rates."""
    ours, theirs = group.arms[claim.method], group.arms[claim.reference]
    names = {"method": claim.method, "reference": claim.reference, "ours": ours.lr, "theirs": theirs.lr}
    if ours.chosen and theirs.chosen:
        rates = say("rates_chosen", **names)
    else:
        rates = say("rates_same" if ours.lr and ours.lr == theirs.lr else "rates_unclear", **names)
    model, size = model_name(group), published_size(group)
    known = say("published_size" if model == size else "other_size", model=model, published=size)
    return say("where", task=group.task, model=known if size else model, recipe=_recipe(group), rates=rates)


def _recipe(group: Group) -> Said:
    record = group.records[0]
    training, model = record.config.training, asdict(record.config.model)
    words = [
        say("epochs", length=training.epochs) if training.epochs else say("steps", length=training.steps)
    ]
    if samples := record.results.get("samples"):  # the data may be a part of the original
        words.append(say("samples", samples=samples))
    if training.batch_size:
        words.append(say("batch", size=training.batch_size))
    else:
        words.append(say("batch_tokens", size=training.batch_tokens))
    words.append(say("length", length=record.config.task.max_length))
    plain = [training.schedule, group.precision]
    plain += [f"{key} {value}" for key, value in model.items() if key != "name" and value is not None]
    return join([*words, *((word, word) for word in plain)], (", ", "，"))


def notes(claim: Claim, group: Group) -> list[Said]:
    """What a reader should know beside the verdict."""
    found = []
    for method in (claim.reference, claim.method):
        arm = group.arms[method]
        if arm.chosen and group.matrix and arm.lr in (group.matrix.grid[0], group.matrix.grid[-1]):
            found.append(say("edge", method=method))
        for name in group.behind(arm):
            ours, theirs = fmean(arm.values), group.references[name][group.metric]
            found.append(say("behind", method=method, name=name, ours=f"{ours:.4g}", theirs=f"{theirs:.4g}"))
    return found


def _tested(record: Record) -> float:
    assert record.test is not None  # measured runs have been tested
    return record.test


def _per_parameter(record: Record) -> float:
    return _tested(record) / float(record.results["parameters"]["trainable"])


@dataclass(frozen=True)
class Measure:
    """What is taken of each run, and how two runs are compared."""

    compare: Callable[[Group, float, float], float]
    score: Callable[[Record], float] = _tested


MEASURES = {
    "points": Measure(lambda group, a, b: 100 * (a - b)),
    "kept": Measure(lambda group, a, b: 100 * a / b),
    "increase": Measure(lambda group, a, b: 100 * (a / b - 1)),
    "saving": Measure(lambda group, a, b: 100 * (b / a - 1)),
    "difference": Measure(lambda group, a, b: group.points(a) - group.points(b)),
    "saving_per_parameter": Measure(lambda group, a, b: 100 * (b / a - 1), _per_parameter),
}


@dataclass(frozen=True)
class Case:
    """One setting with its measurements, before anything is decided."""

    group: Group
    part: Part
    method: str
    reference: str
    scores: tuple[tuple[float, float], ...]  # of the method and of the reference, by seed
    problems: tuple[str, ...]
    above: float
    below: float

    @cached_property
    def values(self) -> list[float]:
        compare = MEASURES[self.part.measure].compare
        return [compare(self.group, ours, theirs) for ours, theirs in self.scores]

    @property
    def unit(self) -> str:
        in_points = self.part.measure == "points" or (
            self.part.measure == "difference" and self.group.kind == "share"
        )
        return "points" if in_points else "%"

    @cached_property
    def estimate(self) -> statistics.Paired | None:
        return statistics.paired(self.values) if self.values else None

    @property
    def interval(self) -> Interval | None:
        found = self.estimate
        return None if found is None or found.low is None or found.high is None else (found.low, found.high)

    def explain_problems(self) -> Said:
        arms = {name: self.group.arms[name] for name in (self.reference, self.method)}
        return show_problems(explain_problems(self.problems, arms, len(self.scores)))

    def p(self, threshold: float) -> float | None:
        """Of "the mean is the threshold", two-sided; None where nothing may be concluded."""
        if self.problems or not self.values:
            return None
        return statistics.paired([value - threshold for value in self.values]).p

    @property
    def signed(self) -> bool:
        return self.part.measure != "kept"

    def show(self, value: float) -> Said:
        return show(value, self.unit, self.signed)

    def what(self) -> Said:
        """The number, in words."""
        if (found := self.estimate) is None:
            return say("nothing")
        if self.interval is None:
            interval = say("no_interval", n=found.n)
        else:
            low = figure(self.interval[0], self.unit, self.signed)
            interval = say("interval", low=low, high=self.show(self.interval[1]), n=found.n)
        return say(
            self.part.measure,
            method=self.method,
            reference=self.reference,
            number=self.show(found.mean),
            interval=interval,
            ours=f"{fmean(ours for ours, _ in self.scores):.4g}",
            theirs=f"{fmean(theirs for _, theirs in self.scores):.4g}",
        )


def margin_of(analysis: Analysis) -> float:
    """The largest difference that does not matter, as the study stated it beforehand."""
    return analysis.study.table.margin if analysis.study else StudyConfig.margin


def make_case(claim: Claim, group: Group, analysis: Analysis, reference: str | None = None) -> Case:
    """A setting that fits the claim; `reference` stands in for the claim's own."""
    part, name = part_of(claim, group), reference or claim.reference
    assert part is not None  # or the group would not fit
    ours, theirs = group.arms[claim.method], group.arms[name]
    score = MEASURES[part.measure].score
    scores = tuple((score(a), score(b)) for a, b in pair_runs(ours, theirs))
    problems = find_problems(ours, theirs, analysis.study)
    return Case(group, part, claim.method, name, scores, problems, *part.thresholds(margin_of(analysis)))


def control_sentence(claim: Claim, case: Case, supported: bool, analysis: Analysis) -> Said:
    """How the method does against the control that the claim leaves out."""
    control = case.part.control
    assert control is not None
    words = claim_data()["controls"][control]

    def tell(key: str, **values: Said) -> Said:
        return fill(words.get(key, words["plain"]), values)

    if control not in case.group.arms:
        return tell("absent")
    beside = make_case(claim, case.group, analysis, control)
    if beside.problems or beside.estimate is None:
        return tell("void", problems=beside.explain_problems())
    p = beside.p(0.0)
    better = p is not None and p < LEVEL and beside.estimate.mean > 0
    return tell("plain" if not supported else "better" if better else "other", what=beside.what())


def growth_sentence(tasks: Sequence[str], cases: Sequence[Case]) -> Said:
    """Whether the measure rises from task to task; said beside the verdict, which does not hang on it."""
    from scipy import stats

    usable = [case for case in cases if not case.problems and case.group.task in tasks]
    names = ", ".join(tasks)
    if sorted(case.group.task for case in usable) != sorted(tasks):
        return say("growth_few", tasks=names)
    usable.sort(key=lambda case: tasks.index(case.group.task))
    steps = [
        (a, b, stats.ttest_ind(b.values, a.values, equal_var=False)) for a, b in pairwise(usable)
    ]  # Welch: the seeds of different corpora are not pairs
    adjusted = statistics.holm([float(test.pvalue) for _, _, test in steps])
    clear = [p is not None and p < LEVEL for p in adjusted]
    for (a, b, test), sure, p in zip(steps, clear, adjusted, strict=True):
        if sure and test.statistic < 0:
            return say("growth_no", tasks=names, first=a.group.task, second=b.group.task, p=show_p(p))
    return say("growth_yes" if all(clear) else "growth_open", tasks=names)
