"""Which settings of the records a claim is judged on, and what was measured in each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from oelm.data.catalogue import TASKS
from oelm.models.gpt_sizes import PRESETS
from oelm.study import statistics
from oelm.study.analysis import find_problems, pair_runs, table_of
from oelm.study.decide import LEVEL, combine
from oelm.study.records import Record
from oelm.study.result_types import Analysis, ArmResult, Group, explain_problems
from oelm.study.two_way import overall

FEWEST_RATES = 3  # learning rates that an arm chose from


@dataclass(frozen=True)
class Setting:
    """A setting and the study it belongs to: problems and corrections are the study's own."""

    analysis: Analysis
    group: Group

    @property
    def architecture(self) -> str:
        """ "gpt" for the reference GPT; else the model's family, such as "bert"."""
        for record in self.group.records:
            if self.group.model in PRESETS:
                break
            if family := record.results.get("architecture"):
                return "gpt" if family == "oelm-gpt" else str(family)
            if roots := record.parameter_roots:
                return roots.most_common(1)[0][0]
        return _family(self.group.model)

    @property
    def kind(self) -> str:
        """Of its task: "lm", "classification", or another by its metric."""
        if self.group.metric == "perplexity":
            return "lm"
        return "classification" if self.group.metric in ("accuracy", "f1_macro") else self.group.metric

    @property
    def model(self) -> str:
        return Path(self.group.model).name  # a folder without its path

    @property
    def published_size(self) -> str | None:
        """The model of this architecture that the reports used."""
        sizes: dict[str, str] = claim_data()["sizes"]
        return sizes.get(self.architecture)

    def part_of(self, claim: Claim) -> str | None:
        """The name of the claim's part that this setting belongs to, if any."""
        sources = [record.config.task.data or "" for record in self.group.records]
        own_file = all(Path(data).suffix.lower() in SUFFIXES for data in sources)  # imdb.csv is not imdb
        names = ("any",) if own_file else (self.group.task, "any")
        return next((name for name in names if name in claim.parts), None)

    def arms_of(self, claim: Claim) -> tuple[ArmResult, ArmResult]:
        """The arm of the claim's method and its reference arm."""
        return self.group.arms[claim.method], self.group.arms[claim.reference_arm]


def _family(model: str) -> str:
    return "gpt" if model in PRESETS else Path(model).name.partition("-")[0]


@dataclass(frozen=True)
class Fitting:
    """The settings a claim is judged on, in a fixed order, and what there is besides."""

    settings: Sequence[Setting] = ()
    left_out: Sequence[Setting] = ()  # models of other sizes than the published one
    apart: bool = False  # both methods were run, but in no setting together
    planned: Sequence[str] = ()  # tasks that a study planned for both methods and has no runs of


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
    settings = [s for s in alike if both <= s.group.arms.keys()]
    apart = not settings and both <= {method for s in alike for method in s.group.arms}
    places = {task: place for place, task in enumerate(claim.parts)}
    settings.sort(
        key=lambda s: (places.get(s.group.task, len(places)), s.group.task, s.model, s.group.setting,
                       s.analysis.title)
    )  # fmt: skip
    published = [s for s in settings if s.model == s.published_size and not claim.any_size]
    judged = published or settings
    planned = {task for analysis in analyses for task in _planned(claim, analysis, judged)}
    return Fitting(judged, [s for s in settings if s not in judged], apart, sorted(planned))


def _planned(claim: Claim, analysis: Analysis, judged: Sequence[Setting]) -> list[str]:
    """Tasks of a study that the claim is about, with no runs of both methods."""
    study, both = analysis.study, {claim.method, claim.reference_arm}
    if study is None or not claim.parts or not both <= study.arms.keys():
        return []
    model = str(study.base.get("model", {}).get("name"))
    if judged and Path(model).name not in {s.model for s in judged}:
        return []
    if claim.architectures and _family(model) not in claim.architectures:
        return []
    there = {group.task for group in analysis.groups if both <= group.arms.keys()}
    return [
        task
        for task in study.table.tasks
        if task not in there
        and (task in claim.parts or "any" in claim.parts)
        and claim.kind in (None, TASKS[task].kind if task in TASKS else None)
    ]


def describe_setting(claim: Claim, setting: Setting) -> Sentence:
    """The setting as a sentence: task, model, recipe and learning rates."""
    arm, reference = setting.arms_of(claim)
    if arm.chosen and reference.chosen:
        key = "rates_chosen"
    else:
        key = "rates_same" if arm.lr and arm.lr == reference.lr else "rates_unclear"
    rates = sentence(key, **claim.names, lr=arm.lr, reference_lr=reference.lr)
    model, size = setting.model, setting.published_size
    known = sentence("published_size" if model == size else "other_size", model=model, published=size)
    values = {"task": setting.group.task, "recipe": _recipe(setting.group), "rates": rates}
    return sentence("where", model=known if size else model, **values)


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


def behind_sentences(claim: Claim, setting: Setting) -> list[Sentence]:
    """The trivial baselines that are better than an arm."""
    group, sentences = setting.group, []
    for arm in reversed(setting.arms_of(claim)):
        for name in group.behind(arm):
            score, baseline = fmean(arm.values), group.trivial_baselines[name][group.metric]
            values = {"method": arm.method, "score": f"{score:.4g}", "baseline": f"{baseline:.4g}"}
            sentences.append(sentence("behind", name=name, **values))
    return sentences


def rates_problem(setting: Setting, arms: Sequence[ArmResult]) -> Sentence | None:
    """Why the learning rates of these arms decide nothing: not chosen from enough, or best at an edge."""
    matrix = setting.group.matrix
    if matrix is None or not all(arm.chosen and len(arm.lr_scores) >= FEWEST_RATES for arm in arms):
        return sentence("untuned", fewest=FEWEST_RATES)
    edge = [arm.method for arm in reversed(arms) if arm.method in matrix.at_edge]
    return sentence("edge", methods=" and ".join(edge)) if edge else None


@dataclass(frozen=True)
class Case:
    """What was measured in one setting or benchmark, before anything is decided."""

    task: str
    model: str
    source: str  # the title of the study, or the name of the benchmark record
    part_name: str
    part: ClaimPart
    threshold: float
    n: int
    unit: str
    mean: float | None
    interval: Interval | None  # 95 %; over seeds and test items, for all near-tied learning rates
    test: Callable[[float], float | None]  # p of "the mean is this", two-sided
    what: Sentence  # the measured number with its interval
    problem: Sentence | None  # why no conclusion may be drawn
    collapsed: bool = False
    scores: tuple[tuple[float, float], ...] = ()  # of the method and of the reference arm, by seed
    setting: Setting | None = None

    def p(self, threshold: float) -> float | None:
        return None if self.problem or self.mean is None else self.test(threshold)

    def decisive_p(self) -> float | None:
        """Of the threshold; of an equivalence, the larger one of its two bounds while the mean is inside."""
        if self.part.within is None:
            return self.p(self.threshold)
        return self.p_within(self.part.within)

    def p_within(self, margin: float) -> float | None:
        inside = self.mean is not None and abs(self.mean) < margin
        ends = (-margin, margin) if inside else (math.copysign(margin, self.mean or 0.0),)
        found = [p for end in ends if (p := self.p(end)) is not None]
        return max(found) if len(found) == len(ends) else None

    @property
    def ahead(self) -> bool:
        """Whether the mean is on the claim's side."""
        assert self.mean is not None
        within = self.part.within
        return self.mean > self.threshold if within is None else abs(self.mean) < within

    def show(self, value: float) -> Sentence:
        return with_unit(value, self.unit, self.part.measure != "kept")


def describe_number(
    part: ClaimPart, unit: str, mean: float, interval: Interval | None, n: int, counted: str = "seeds"
) -> dict[str, Sentence]:
    """The number and its interval, for the sentence of a measure."""
    signed = part.measure != "kept"
    count = sentence(f"n_{counted}", n=n)
    text = sentence("no_interval", count=count)
    if interval is not None:
        low, high = format_number(interval[0], unit, signed), with_unit(interval[1], unit, signed)
        text = sentence("interval", low=low, high=high, count=count)
    return {"number": with_unit(mean, unit, signed), "interval": text}


Scale = tuple[Callable[[float], float], Callable[[float], float]]


def _scale(measure: str, group: Group, arms: Sequence[ArmResult], accuracy: float) -> Scale:
    """From a difference in points (of a perplexity: 100 times its logarithm) to the measure, and back."""
    if measure == "points" or (measure == "difference" and group.kind == "share"):
        return (lambda points: points), (lambda value: value)
    if measure == "kept":  # the reference arm's accuracy counts as known: its error moves this by little
        return (lambda points: 100 + points / accuracy), (lambda value: (value - 100) * accuracy)
    # Per cent of a perplexity: of the reference arm's, positive is worse ("increase") or better
    # ("difference"); of the method's, positive is better ("saving").
    inner, outer = {"increase": (-1, 1), "difference": (-1, -1)}.get(measure, (1, 1))
    shift = 0.0
    if measure == "saving_per_parameter":
        ours, theirs = (arm.records[0].results["parameters"]["trainable"] for arm in arms)
        shift = 100 * math.log(ours / theirs)
    return (
        lambda points: outer * 100 * math.expm1((inner * points + shift) / 100),
        lambda value: inner * (100 * math.log1p(outer * value / 100) - shift),
    )


def _score(measure: str, record: Record) -> float:
    assert record.test is not None  # measured runs have been tested
    if measure == "saving_per_parameter":
        return record.test / float(record.results["parameters"]["trainable"])
    return record.test


def make_case(claim: Claim, setting: Setting, reference_arm: str | None = None) -> Case:
    """A setting that fits the claim; `reference_arm` replaces the claim's own."""
    group, analysis, name = setting.group, setting.analysis, reference_arm or claim.reference_arm
    part_name = setting.part_of(claim)
    assert part_name is not None  # or the setting would not fit
    part, arms = claim.parts[part_name], (group.arms[claim.method], group.arms[name])
    pairs = pair_runs(*(arm.records for arm in arms))
    scores = tuple((_score(part.measure, a), _score(part.measure, b)) for a, b in pairs)
    ties = [(a, b) for a in arms[0].by_lr for b in arms[1].by_lr]
    tables = [table for a, b in ties if (table := table_of(group, pair_runs(a, b))) is not None]
    codes = find_problems(*arms, analysis.study, len(analysis.comparisons))
    if scores and len(tables) < len(ties):
        codes, tables = (*codes, "no_items"), []
    names = {arm.method: arm for arm in reversed(arms)}
    problems = [format_problems(explain_problems(codes, names, len(scores), len(analysis.comparisons)))]
    if not {"unevaluated", "other_rates"} & set(codes):  # these say it already
        problems += [text for text in (rates_problem(setting, arms),) if text]
    problem = join([text for text in problems if text[0]], ("; ", "；"))
    looks = len(analysis.study.looks) if analysis.study else 1
    there = back = None
    mean, interval = None, None
    unit = (
        "points" if part.measure == "points" or (part.measure, group.kind) == ("difference", "share") else "%"
    )
    what = sentence("nothing")
    if tables:
        there, back = _scale(part.measure, group, arms, fmean(score for _, score in scores))
        found = combine([overall(*table, level=1 - LEVEL / looks) for table in tables], 1.0, looks)
        mean = there(found.mean)
        if found.low is not None and found.high is not None:
            interval = min(there(found.low), there(found.high)), max(there(found.low), there(found.high))
        columns = (f"{fmean(column):.4g}" for column in zip(*scores, strict=True))
        values = dict(zip(("score", "reference_score"), columns, strict=True))
        texts = describe_number(part, unit, mean, interval, len(scores))
        what = sentence(part.measure, method=claim.method, reference_arm=name, **values, **texts)

    def test(threshold: float) -> float | None:
        assert back is not None  # or there is no mean
        points = back(threshold)
        return combine([overall(table - points, sizes) for table, sizes in tables], 1.0, looks).p

    return Case(
        group.task, setting.model, analysis.title, part_name, part, part.threshold(group.kind), len(scores),
        unit, mean, interval, test, what, problem if problem[0] else None,
        any(arm.collapsed(group.points) for arm in arms), scores, setting,
    )  # fmt: skip


def control_sentence(claim: Claim, case: Case, gains: bool) -> Sentence:
    """How the method compares with the control that the claim leaves out. That the control explains the gain
    is said only where it is better, or equivalent within the claim's margin."""
    control, setting = case.part.control, case.setting
    assert control is not None and setting is not None
    templates = claim_data()["controls"][control]
    if control not in setting.group.arms:
        return fill(templates["absent"])
    beside = make_case(claim, setting, control)
    if beside.problem or beside.mean is None:
        return fill(templates["void"], problems=beside.problem or sentence("nothing"))
    p, p_within = beside.p(0.0), beside.p_within(case.part.control_margin)
    differs = p is not None and p < LEVEL
    equivalent = (
        not beside.collapsed
        and p_within is not None
        and p_within < LEVEL
        and abs(beside.mean) < case.part.control_margin
    )
    key = "open"
    if equivalent or (differs and beside.mean < 0):
        key = "other"
    elif differs:
        key = "better"
    margin = beside.show(case.part.control_margin)
    return fill(templates.get(key if gains else "plain", templates["plain"]), what=beside.what, margin=margin)


def growth_sentence(tasks: Sequence[str], cases: Sequence[Case]) -> Sentence:
    """Whether the measure rises from task to task; the verdict does not depend on it."""
    from scipy import stats

    usable = [case for case in cases if not case.problem and case.task in tasks]
    names = ", ".join(tasks)
    if sorted(case.task for case in usable) != sorted(tasks):
        return sentence("growth_few", tasks=names)
    usable.sort(key=lambda case: tasks.index(case.task))
    # Welch's test: the seeds of different corpora are not pairs.
    losses = [[100 * (score / reference - 1) for score, reference in case.scores] for case in usable]
    tests = [stats.ttest_ind(b, a, equal_var=False) for a, b in pairwise(losses)]
    adjusted = statistics.holm([float(test.pvalue) for test in tests])
    clear = [p is not None and p < LEVEL for p in adjusted]
    for (a, b), test, sure, p in zip(pairwise(usable), tests, clear, adjusted, strict=True):
        if sure and test.statistic < 0:
            falls = {"first": a.task, "second": b.task, "p": format_p(p)}
            return sentence("growth_no", tasks=names, **falls)
    return sentence("growth_yes" if all(clear) else "growth_open", tasks=names)
