"""The published claims, judged from records: supported, refuted or not decided, with number and reason.

What is claimed, what decides it and every sentence is data (claims.toml); here are the rules. Most claims are
a threshold: the mean of a measure over pairs of runs with the same seed is above a figure or not. A claim is
judged on every setting of the records that fits it, and Holm corrects for their number. A problem that
forbids a conclusion (`oelm.study.result_types.PROBLEMS`) leaves the claim not decided.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from oelm.claims.cases import (
    ClaimCase,
    architecture,
    arms_of,
    control_sentence,
    describe_setting,
    fitting_groups,
    growth_sentence,
    make_case,
    margin_of,
    model_name,
    notes,
    task_kind,
)
from oelm.claims.data import (
    NOT_DECIDED,
    REFUTED,
    SUPPORTED,
    VERDICTS,
    Claim,
    Interval,
    Sentence,
    claim_data,
    format_p,
    format_problems,
    join,
    read_claims,
    sentence,
    with_unit,
)
from oelm.study import statistics
from oelm.study.decide import LEVEL
from oelm.study.result_types import Analysis, Group
from oelm.system.messages import notice

SIGN_TEST_FROM = 6  # ratios of learning rates: with fewer a two-sided sign test cannot reach 5 %


@dataclass(frozen=True)
class Finding:
    """What one setting says about a claim; `p` is corrected within the claim."""

    task: str
    model: str
    verdict: str
    number: float | None
    interval: Interval | None
    n: int
    unit: str  # of number and interval: "points", "%" or "ratio"
    p: float | None
    reason: str
    reason_zh: str

    @property
    def label(self) -> str:
        return f"{self.task} ({self.model})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim and what the records say about it. Number, interval and n are over all settings, or else those
    of the setting that decides; `details` holds every setting."""

    id: str
    claim: str
    claim_zh: str
    verdict: str
    number: float | None = None
    interval: Interval | None = None
    n: int = 0
    reason: str
    reason_zh: str
    details: tuple[Finding, ...] = ()
    unit: str = ""  # as of a Finding, or "settings"


def judge(analysis: Analysis) -> list[Verdict]:
    """A verdict on each claim, in order, from the records alone."""
    return [_judge(claim, analysis) for claim in read_claims()]


def _judge(claim: Claim, analysis: Analysis) -> Verdict:
    groups, left_out, apart = fitting_groups(claim, analysis)
    if not groups:
        return _verdict(claim, NOT_DECIDED, [_missing(claim), *([sentence("apart")] if apart else [])])
    verdict = RULES[claim.rule](claim, groups, analysis)
    if not left_out:
        return verdict
    models = ", ".join(sorted({model_name(group) for group in left_out}))
    reasons = join([(verdict.reason, verdict.reason_zh), sentence("left_aside", models=models)])
    return replace(verdict, reason=reasons[0], reason_zh=reasons[1])


def _verdict(
    claim: Claim, verdict: str, sentences: Iterable[Sentence], details: Sequence[Finding] = (), **numbers: Any
) -> Verdict:
    reason, reason_zh = join(sentences)
    return Verdict(
        id=claim.id, claim=claim.claim, claim_zh=claim.claim_zh, verdict=verdict, reason=reason,
        reason_zh=reason_zh, details=tuple(details), **numbers,
    )  # fmt: skip


def _missing(claim: Claim) -> Sentence:
    names = ", ".join(claim.parts)
    kind = "tasks_lm" if claim.kind == "lm" else "tasks_all" if "any" in names or not names else "tasks_named"
    models = "_".join(("with", *claim.architectures)) if claim.architectures else "with_any"
    tasks = sentence(kind, names=names)
    return sentence("missing", **claim.names, tasks=tasks, architectures=sentence(models))


def _threshold(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    cases = [make_case(claim, group, analysis) for group in groups]
    findings = _decide(claim, cases, analysis)
    verdicts = [finding.verdict for finding in findings]
    verdict = _combine(verdicts, claim.one_refutes)
    decisive = _decisive(findings, verdict)
    sentences: list[Sentence] = []
    if len(findings) > 1:
        for outcome in VERDICTS:
            if names := [finding.label for finding in findings if finding.verdict == outcome]:
                name = tuple(claim_data()["verdicts"][outcome])
                sentences.append(sentence("summary", verdict=name, settings=_names(names)))
        if verdict == NOT_DECIDED and {SUPPORTED, REFUTED} <= set(verdicts):
            sentences.append(sentence("mixed"))
    sentences.append((decisive.reason, decisive.reason_zh))
    tasks = {"any", *(finding.task for finding in findings)}
    if absent := [task for task in claim.parts if task not in tasks]:
        sentences.append(sentence("absent", tasks=", ".join(absent)))
    if claim.growth:
        sentences.append(growth_sentence(claim.growth, cases))
    if claim.beyond_records:
        sentences.append(sentence("beyond_records"))
    numbers = {key: getattr(decisive, key) for key in ("number", "interval", "n", "unit")}
    return _verdict(claim, verdict, sentences, findings, **numbers)


def _decide(claim: Claim, cases: Sequence[ClaimCase], analysis: Analysis) -> list[Finding]:
    """The finding of each setting; p is corrected for all of them."""
    supporting = statistics.holm([case.p(case.above) for case in cases])
    refuting = statistics.holm([case.p(case.below) for case in cases])
    findings = []
    for case, p_above, p_below in zip(cases, supporting, refuting, strict=True):
        verdict, reasons = _compare(case, p_above, p_below)
        sentences = [case.describe(), *reasons]
        if claim.frozen:
            verdict, more = _frozen(claim, case, verdict)
            sentences += more
        if claim.beyond_records and verdict == SUPPORTED:  # only half of the claim is measured
            verdict = NOT_DECIDED
        if case.part.control:
            sentences.append(control_sentence(claim, case, verdict == SUPPORTED, analysis))
        sentences += [describe_setting(claim, case.group), *notes(claim, case.group)]
        numbers = (case.mean, case.interval, len(case.scores), case.unit)
        p = p_below if verdict == REFUTED else p_above
        group = case.group
        findings.append(Finding(group.task, model_name(group), verdict, *numbers, p, *join(sentences)))
    return findings


def _compare(case: ClaimCase, p_above: float | None, p_below: float | None) -> tuple[str, list[Sentence]]:
    if case.problems:
        return NOT_DECIDED, [sentence("problems", problems=case.explain_problems())]
    if case.mean is None or p_above is None or p_below is None or case.interval is None:
        return NOT_DECIDED, [sentence("constant")]
    above, below = case.show(case.above), case.show(case.below)
    higher = p_above < LEVEL and case.mean > case.above
    if p_below < LEVEL and case.mean < case.below:
        verdict, key = REFUTED, "refuted_below" if case.part.share is None else "refuted_share"
        sentences = [sentence(key, below=below, share=100 * (case.part.share or 0), p=format_p(p_below))]
        sentences += [sentence("small_gain")] if higher else []
    elif higher:
        verdict, sentences = SUPPORTED, [sentence("supported_above", above=above, p=format_p(p_above))]
    else:
        values = {"p_above": format_p(p_above), "p_below": format_p(p_below)}
        verdict, sentences = NOT_DECIDED, [sentence("open", above=above, below=below, **values)]
    if (published := case.part.published) is not None:
        low, high = case.interval
        place = "above" if published > high else "below" if published < low else "inside"
        sentences.append(sentence(f"published_{place}", published=case.show(published)))
    return verdict, sentences


def _combine(verdicts: Sequence[str], one_refutes: bool) -> str:
    if set(verdicts) == {SUPPORTED}:
        return SUPPORTED
    if REFUTED in verdicts and (one_refutes or SUPPORTED not in verdicts):
        return REFUTED
    return NOT_DECIDED


def _decisive(findings: Sequence[Finding], verdict: str) -> Finding:
    """The setting that decides: the weakest support, the clearest refutation, the first undecided one."""
    alike = [f for f in findings if f.verdict == verdict] or list(findings)
    if verdict == NOT_DECIDED:
        return alike[0]
    return (max if verdict == SUPPORTED else min)(alike, key=lambda f: 1.0 if f.p is None else f.p)


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"{n} x {label}" if n > 1 else label for label, n in Counter(labels).items())


def _frozen(claim: Claim, case: ClaimCase, verdict: str) -> tuple[str, list[Sentence]]:
    """The share of frozen parameters of C9; if it is not the published one, nothing is supported."""
    arm, published = case.group.arms[case.method], claim.frozen[architecture(case.group)]
    if not arm.records:
        return verdict, []
    counts = arm.records[0].results["parameters"]
    share = 100 * counts["frozen"] / counts["total"]
    sentences = [sentence("frozen", share=share, published=published)]
    if verdict == SUPPORTED and round(share, 1) != published:
        return NOT_DECIDED, [*sentences, sentence("other_share")]
    return verdict, sentences


def _speed(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    """Times of separate runs are shown and decide nothing."""
    findings = []
    for group in groups:
        arms = arms_of(claim, group)
        environments = [record.environment for arm in arms for record in arm.records]
        machines = {environment.get("gpu") or environment.get("cpu") for environment in environments}
        (time, reference_time), (n, m) = (arm.step_time() for arm in arms), (len(arm.records) for arm in arms)
        ratio, text = None, sentence("no_step_times")
        if time and reference_time and len(machines) == 1:
            ratio = time / reference_time
            times = {"time": 1000 * time, "reference_time": 1000 * reference_time}
            text = sentence("step_times", **claim.names, **times, ratio=ratio, n=n, m=m)
        reason = join([text, describe_setting(claim, group)])
        numbers = (ratio, None, min(n, m), "ratio", None)
        findings.append(Finding(group.task, model_name(group), NOT_DECIDED, *numbers, *reason))
    first = next((f for f in findings if f.number is not None), findings[0])
    sentences = [sentence("not_interleaved"), (first.reason, first.reason_zh)]
    return _verdict(claim, NOT_DECIDED, sentences, findings, number=first.number, n=first.n, unit="ratio")


def _kinds(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    """Whether settings of one kind of task agree over architectures, and the kinds differ within one."""
    known = [group for group in groups if task_kind(group) in ("classification", "lm")]
    places = sorted({(architecture(group), task_kind(group)) for group in known})
    architectures, kinds = [a for a, _ in places], [k for _, k in places]
    if len(set(architectures)) == len(places) or len(set(kinds)) == len(places):
        seen = ", ".join(f"{a} {k}" for a, k in places) or "-"
        return _verdict(claim, NOT_DECIDED, [sentence("kinds_missing", seen=seen)])
    findings = _decide(claim, [make_case(claim, group, analysis) for group in known], analysis)
    outcomes: dict[str, set[str]] = defaultdict(set)
    for finding, group in zip(findings, known, strict=True):
        outcomes[task_kind(group)].add(finding.verdict)
    decided = {kind: verdicts - {NOT_DECIDED} for kind, verdicts in outcomes.items()}
    if any(len(verdicts) > 1 for verdicts in decided.values()):
        verdict, key = REFUTED, "kinds_within"
    elif decided != outcomes:
        verdict, key = NOT_DECIDED, "kinds_undecided"
    elif decided["classification"] == decided["lm"]:
        verdict, key = REFUTED, "kinds_alike"
    else:
        verdict, key = SUPPORTED, "kinds_follow"
    texts = {SUPPORTED: "kinds_works", REFUTED: "kinds_fails", NOT_DECIDED: "kinds_open"}
    settings = join([sentence(texts[f.verdict], where=f.label) for f in findings], ("; ", "；"))
    sentences = [sentence(key), sentence("kinds_list", margin=margin_of(analysis), list=settings)]
    sure = [f.n for f in findings if f.verdict != NOT_DECIDED]
    numbers = {"number": float(len(sure)), "n": min(sure, default=0), "unit": "settings"}
    return _verdict(claim, verdict, sentences, findings, **numbers)


def _learning_rates(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    """How many times higher a method's best learning rate is than the reference arm's: ratios, counted.

    A grid determines the best learning rate to one of its steps only, so ratios are coarse and often equal.
    They are not averaged for a verdict but counted: do most reach the claimed one?
    """
    findings, all_ratios, left_out = [], [], defaultdict(list)
    for group in groups:
        ratios, sentences = _lr_ratios(claim, group)
        all_ratios += ratios
        verdict, number, interval, why = _judge_ratios(claim, ratios)
        reason = join([*(why if ratios else []), *sentences, describe_setting(claim, group)])
        numbers = (number, interval, len(ratios), "ratio", None)
        findings.append(Finding(group.task, model_name(group), verdict, *numbers, *reason))
        if not ratios:
            left_out[join(sentences)].append(findings[-1].label)
    verdict, number, interval, reasons = _judge_ratios(claim, all_ratios)
    if len(findings) == 1:
        reasons = [(findings[0].reason, findings[0].reason_zh)]
    else:
        for cause, names in left_out.items():
            reasons.append(sentence("rates_left_out", settings=_names(names), why=cause))
    total = {"number": number, "interval": interval, "n": len(all_ratios), "unit": "ratio"}
    return _verdict(claim, verdict, reasons, findings, **total)


def _lr_ratios(claim: Claim, group: Group) -> tuple[list[float], list[Sentence]]:
    """One ratio for each seed of the trials; and why there are none, or what they mean."""
    arm, reference = arms_of(claim, group)
    if not (group.matrix and arm.chosen and reference.chosen and arm.lr and reference.lr):
        return [], [sentence("rates_none")]
    grid = group.matrix.grid
    step = max(high / low for low, high in pairwise(grid))
    if {arm.lr, reference.lr} & {grid[0], grid[-1]}:
        return [], [sentence("rates_edge")]
    if step > claim.ratio[1]:
        return [], [sentence("rates_coarse", step=step, low=claim.ratio[0], high=claim.ratio[1])]
    at_chance = {
        a.method: [r.seed for r in a.trials if r.lr == a.lr and r.results.get("at_chance")]
        for a in (arm, reference)
    }
    if any(at_chance.values()):
        runs = [notice("study.seeds", method=name, seeds=seeds) for name, seeds in at_chance.items() if seeds]
        problem = notice("problem.at_chance", runs=runs)
        return [], [sentence("problems", problems=format_problems([problem]))]
    sentences = [sentence("rates_step", step=step)]
    best, at_reference = arm.lr_scores.get(arm.lr), arm.lr_scores.get(reference.lr)
    if best is not None and at_reference is not None and arm.lr != reference.lr:
        loss = group.points(best) - group.points(at_reference)
        lost = with_unit(loss, "points" if group.kind == "share" else "%", False)
        sentences.append(sentence("rates_cost", lost=lost, **claim.names))
    return _ratios_by_seed(claim, group, grid), sentences


def _ratios_by_seed(claim: Claim, group: Group, grid: Sequence[float]) -> list[float]:
    """The ratio of each seed whose trials are complete and leave one best learning rate to each method."""
    arms, ratios = arms_of(claim, group), []
    for seed in sorted({trial.seed for arm in arms for trial in arm.trials}):
        best = []
        for arm in arms:
            scores = {trial.lr: trial.validation for trial in arm.trials if trial.seed == seed}
            usable = [score for lr in grid if (score := scores.get(lr)) is not None]  # None: it failed
            if usable and set(grid) <= scores.keys():
                top = max(usable) if group.larger_is_better else min(usable)
                tied = [lr for lr in grid if scores[lr] == top]
                best += tied if len(tied) == 1 else []
        if len(best) == 2:
            ratios.append(best[0] / best[1])
    return ratios


def _judge_ratios(
    claim: Claim, ratios: Sequence[float]
) -> tuple[str, float | None, Interval | None, list[Sentence]]:
    """Whether most of the ratios are at least the claimed one: the verdict, their geometric mean with its
    interval, and the reason."""
    from scipy import stats

    if not ratios:
        return NOT_DECIDED, None, None, [sentence("rates_nothing")]
    logs = statistics.interval([math.log(ratio) for ratio in ratios])
    number = math.exp(logs.mean)
    interval = None if logs.low is None or logs.high is None else (math.exp(logs.low), math.exp(logs.high))
    least, n = claim.ratio[0], len(ratios)
    k = sum(ratio > 0.99 * least for ratio in ratios)  # 3e-4 / 1e-4 is not quite 3
    p = float(stats.binomtest(k, n).pvalue)
    verdict = NOT_DECIDED if p >= LEVEL else SUPPORTED if 2 * k > n else REFUTED
    span = sentence("rates_interval", low=interval[0], high=interval[1]) if interval else ("", "")
    counts = {"number": number, "k": k, "n": n, "low": least, "p": format_p(p), "interval": span}
    sentences = [sentence("rates_found", **claim.names, **counts)]
    if n < SIGN_TEST_FROM:
        sentences.append(sentence("rates_few", n=SIGN_TEST_FROM))
    return verdict, number, interval, sentences


RULES: dict[str, Callable[[Claim, Sequence[Group], Analysis], Verdict]] = {
    "threshold": _threshold,
    "speed": _speed,
    "kinds": _kinds,
    "rates": _learning_rates,
}
