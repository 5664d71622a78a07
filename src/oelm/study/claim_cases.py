"""Which settings of the records a claim is judged on, and what was measured in each."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from oelm.atomic import read_json
from oelm.data.files import SUFFIXES
from oelm.gpt_config import PRESETS
from oelm.study import statistics
from oelm.study.analysis import LEVEL, Analysis, Group, find_problems, pair_runs
from oelm.study.claim_data import Claim, Part, Said, claim_data, fill, join, say, show, show_p, show_problems
from oelm.study.design import StudyConfig
from oelm.study.records import Record

Interval = tuple[float, float]


def architecture(group: Group) -> str:
    """ "gpt" for the reference GPT; else what the model's own parameters are called after, such as "bert"."""
    if group.model in PRESETS:
        return "gpt"
    for record in group.records:
        if (path := record.folder / "freeze_audit.json").exists():
            seen = read_json(path)["fingerprint"]
            names = Counter(name.partition(".")[0] for name in (*seen["frozen"], *seen["trainable"]))
            return names.most_common(1)[0][0]
    return model_name(group).partition("-")[0]


def task_kind(group: Group) -> str:
    if group.kind == "perplexity":
        return "lm"
    return "classification" if group.metric in ("accuracy", "f1_macro") else group.metric


def model_name(group: Group) -> str:
    return Path(group.model).name  # of a folder: where it lay is nobody's business


def part_of(claim: Claim, group: Group) -> Part | None:
    data = group.records[0].config.task.data
    own_file = data is not None and Path(data).suffix in SUFFIXES  # imdb.csv is not imdb
    return claim.parts.get("any") if own_file else claim.parts.get(group.task, claim.parts.get("any"))


def fitting(claim: Claim, analysis: Analysis) -> tuple[list[Group], list[Group]]:
    """The settings that count, in a fixed order, and those left aside for their size."""
    fit = [
        group
        for group in analysis.groups
        if {claim.method, claim.reference} <= group.arms.keys()
        and claim.kind in (None, task_kind(group))
        and (not claim.architectures or architecture(group) in claim.architectures)
        and (not claim.parts or part_of(claim, group))
    ]
    places = {task: place for place, task in enumerate(claim.parts)}
    fit.sort(key=lambda g: (places.get(g.task, len(places)), g.task, model_name(g), g.setting))
    sizes = [] if claim.any_size else [g for g in fit if model_name(g) == published_size(g)]
    return (sizes, [g for g in fit if g not in sizes]) if sizes else (fit, [])


def published_size(group: Group) -> str | None:
    found = claim_data()["sizes"].get(architecture(group))
    return None if found is None else str(found)


def where(claim: Claim, group: Group) -> Said:
    config, size = group.records[0].config, published_size(group)
    training = config.training
    words = [
        say("epochs", length=training.epochs) if training.epochs else say("steps", length=training.steps),
        say("batch", size=training.batch_size)
        if training.batch_size
        else say("batch_tokens", size=training.batch_tokens),
        (training.schedule, training.schedule),
        (group.precision, group.precision),
    ]
    if config.task.train_size:
        words.append(say("part_of_train", size=config.task.train_size))
    ours, theirs = group.arms[claim.method], group.arms[claim.reference]
    names = {"method": claim.method, "reference": claim.reference, "ours": ours.lr, "theirs": theirs.lr}
    if ours.chosen and theirs.chosen:
        rates = say("rates_chosen", **names)
    else:
        rates = say("rates_same" if ours.lr and ours.lr == theirs.lr else "rates_unclear", **names)
    model = model_name(group)
    known = say("published_size" if model == size else "other_size", model=model, published=size)
    return say(
        "where",
        task=group.task,
        model=known if size else model,
        recipe=join(words, (", ", "，")),
        rates=rates,
    )


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


def _per_parameter(record: Record) -> float:
    return _tested(record) / record.results["parameters"]["trainable"]


def _tested(record: Record) -> float:
    assert record.test is not None  # measured runs have been tested
    return record.test


MEASURES: dict[str, Callable[[Group, Record, Record], float]] = {
    "points": lambda group, a, b: 100 * (_tested(a) - _tested(b)),
    "kept": lambda group, a, b: 100 * _tested(a) / _tested(b),
    "increase": lambda group, a, b: 100 * (_tested(a) / _tested(b) - 1),
    "saving": lambda group, a, b: 100 * (_tested(b) / _tested(a) - 1),
    "difference": lambda group, a, b: group.points(_tested(a)) - group.points(_tested(b)),
    "saving_per_parameter": lambda group, a, b: 100 * (_per_parameter(b) / _per_parameter(a) - 1),
}


@dataclass(frozen=True)
class Case:
    """One setting with its measurements, before anything is decided."""

    group: Group
    part: Part
    method: str
    reference: str
    values: tuple[float, ...]
    problems: tuple[str, ...]
    above: float
    below: float

    @property
    def unit(self) -> str:
        in_points = self.part.measure == "points" or (
            self.part.measure == "difference" and self.group.kind == "share"
        )
        return "points" if in_points else "%"

    @property
    def estimate(self) -> statistics.Paired | None:
        return statistics.paired(self.values) if self.values else None

    @property
    def interval(self) -> Interval | None:
        found = self.estimate
        return None if found is None or found.low is None or found.high is None else (found.low, found.high)

    def p(self, threshold: float) -> float | None:
        """Of "the mean is the threshold", two-sided; None where nothing may be concluded."""
        if self.problems or not self.values:
            return None
        return statistics.paired([value - threshold for value in self.values]).p

    def show(self, value: float) -> Said:
        return show(value, self.unit, self.part.measure != "kept")

    def what(self) -> Said:
        """The number, in words."""
        if (found := self.estimate) is None:
            return say("nothing")
        if self.interval is None:
            interval = say("no_interval", n=found.n)
        else:
            low, high = map(self.show, self.interval)
            interval = say("interval", low=low, high=high, n=found.n)
        return say(
            self.part.measure,
            method=self.method,
            reference=self.reference,
            number=self.show(found.mean),
            interval=interval,
        )


def margin_of(analysis: Analysis) -> float:
    """The largest difference that does not matter, as the study stated it beforehand."""
    return analysis.study.table.margin if analysis.study else StudyConfig.margin


def make_case(claim: Claim, group: Group, analysis: Analysis, reference: str | None = None) -> Case:
    part, name = part_of(claim, group), reference or claim.reference
    assert part is not None  # or the group would not fit
    ours, theirs = group.arms[claim.method], group.arms[name]
    values = tuple(MEASURES[part.measure](group, a, b) for a, b in pair_runs(ours, theirs))
    problems = find_problems(ours, theirs, analysis.study)
    return Case(group, part, claim.method, name, values, problems, *part.thresholds(margin_of(analysis)))


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
        return tell("void", problems=show_problems(beside.problems))
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
