"""The published claims, judged from records: supported, refuted or not decided, with number and reason.

What is claimed, what decides it and every sentence is data (claims.toml); here are the rules. Most claims are
a threshold: a measure, taken for each pair of runs that share a seed, whose mean is or is not above a figure.
A claim is judged on every setting of the records that fits it, and these tests are its Holm family. Whatever
forbids a conclusion from two arms (`oelm.study.analysis.PROBLEMS`) leaves the claim not decided.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from oelm.study import statistics
from oelm.study.analysis import LEVEL, Analysis, Group
from oelm.study.claim_cases import (
    Case,
    Interval,
    architecture,
    control_sentence,
    fitting,
    growth_sentence,
    make_case,
    margin_of,
    model_name,
    notes,
    task_kind,
    where,
)
from oelm.study.claim_data import Claim, Said, claim_data, join, read_claims, say, show, show_p, show_problems
from oelm.study.matrix import Cell, best_rate

SUPPORTED, REFUTED, NOT_DECIDED = VERDICTS = ("supported", "refuted", "not decided")
SIGN_TEST_FROM = 6  # ratios of rates: with fewer a two-sided sign test cannot go below 5 %


@dataclass(frozen=True)
class Finding:
    """What one setting says of a claim; `p` is corrected within the claim."""

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


@dataclass(frozen=True)
class Verdict:
    """A claim and what the records say of it. Number, interval and n are those of the setting that decides,
    where there is no number over all of them; `details` holds every setting."""

    id: str
    claim: str
    claim_zh: str
    verdict: str
    number: float | None
    interval: Interval | None
    n: int
    reason: str
    reason_zh: str
    details: tuple[Finding, ...] = ()
    unit: str = ""  # as of a Finding, or "settings"


def judge(analysis: Analysis) -> list[Verdict]:
    """A verdict on each claim, in order, from the records alone."""
    return [_judge(claim, analysis) for claim in read_claims()]


def _judge(claim: Claim, analysis: Analysis) -> Verdict:
    groups, aside = fitting(claim, analysis)
    if not groups:
        return _verdict(claim, NOT_DECIDED, [_missing(claim)])
    found = RULES[claim.rule](claim, groups, analysis)
    if not aside:
        return found
    models = ", ".join(sorted({model_name(group) for group in aside}))
    more = join([(found.reason, found.reason_zh), say("left_aside", models=models)])
    return replace(found, reason=more[0], reason_zh=more[1])


def _verdict(
    claim: Claim,
    verdict: str,
    sentences: Iterable[Said],
    details: Sequence[Finding] = (),
    number: float | None = None,
    interval: Interval | None = None,
    n: int = 0,
    unit: str = "",
) -> Verdict:
    return Verdict(
        claim.id, claim.claim, claim.claim_zh, verdict, number, interval, n, *join(sentences), tuple(details),
        unit,
    )  # fmt: skip


def _finding(
    group: Group,
    verdict: str,
    number: float | None,
    interval: Interval | None,
    n: int,
    unit: str,
    p: float | None,
    sentences: Iterable[Said],
) -> Finding:
    return Finding(
        group.task, model_name(group), verdict, number, interval, n, unit, p, *join(sentences)
    )  # fmt: skip


def _missing(claim: Claim) -> Said:
    names = ", ".join(claim.parts)
    kind = "tasks_lm" if claim.kind == "lm" else "tasks_all" if "any" in names or not names else "tasks_named"
    return say(
        "missing",
        method=claim.method,
        reference=claim.reference,
        tasks=say(kind, names=names),
        architectures=say("_".join(("with", *claim.architectures)) if claim.architectures else "with_any"),
    )


# Thresholds.


def _threshold(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    cases = [make_case(claim, group, analysis) for group in groups]
    findings = _decide(claim, cases, analysis)
    verdict = _combine([f.verdict for f in findings], claim.one_refutes)
    head = _deciding(findings, verdict)
    sentences: list[Said] = []
    if len(findings) > 1:
        sentences += _summary(findings)
        if verdict == NOT_DECIDED and {SUPPORTED, REFUTED} <= {f.verdict for f in findings}:
            sentences.append(say("mixed"))
    sentences.append((head.reason, head.reason_zh))
    absent = sorted(claim.parts.keys() - {"any"} - {f.task for f in findings}, key=list(claim.parts).index)
    if absent:
        sentences.append(say("absent", tasks=", ".join(absent)))
    if claim.growth:
        sentences.append(growth_sentence(claim.growth, cases))
    if claim.beyond_records:
        sentences.append(say("beyond_records"))
    return _verdict(claim, verdict, sentences, findings, head.number, head.interval, head.n, head.unit)


def _decide(claim: Claim, cases: Sequence[Case], analysis: Analysis) -> list[Finding]:
    """Each setting's finding; the settings are one family."""
    supporting = statistics.holm([case.p(case.above) for case in cases])
    refuting = statistics.holm([case.p(case.below) for case in cases])
    findings = []
    for case, p_above, p_below in zip(cases, supporting, refuting, strict=True):
        verdict, why = _compare(case, p_above, p_below)
        sentences = [case.what(), *why]
        if claim.frozen:
            verdict, said = _frozen(claim, case, verdict)
            sentences += said
        if claim.beyond_records and verdict == SUPPORTED:  # half of what is claimed
            verdict = NOT_DECIDED
        if case.part.control:
            sentences.append(control_sentence(claim, case, verdict == SUPPORTED, analysis))
        sentences += [where(claim, case.group), *notes(claim, case.group)]
        found = case.estimate
        number, p = found.mean if found else None, p_below if verdict == REFUTED else p_above
        findings.append(
            _finding(case.group, verdict, number, case.interval, len(case.values), case.unit, p, sentences)
        )
    return findings


def _compare(case: Case, p_above: float | None, p_below: float | None) -> tuple[str, list[Said]]:
    if case.problems:
        return NOT_DECIDED, [say("problems", problems=show_problems(case.problems))]
    found = case.estimate
    if found is None or p_above is None or p_below is None or case.interval is None:
        return NOT_DECIDED, []  # what did not vary has no interval, and so no conclusion
    above, below = case.show(case.above), case.show(case.below)
    higher = p_above < LEVEL and found.mean > case.above
    if p_below < LEVEL and found.mean < case.below:
        verdict, key = REFUTED, "refuted_below" if case.part.share is None else "refuted_share"
        said = [say(key, below=below, share=case.part.share, p=show_p(p_below))]
        said += [say("small_gain")] if higher else []
    elif higher:
        verdict, said = SUPPORTED, [say("supported_above", above=above, p=show_p(p_above))]
    else:
        values = {"p_above": show_p(p_above), "p_below": show_p(p_below)}
        verdict, said = NOT_DECIDED, [say("open", above=above, below=below, **values)]
    if (published := case.part.published) is not None:
        low, high = case.interval
        place = "above" if published > high else "below" if published < low else "inside"
        said.append(say(f"published_{place}", published=case.show(published)))
    return verdict, said


def _combine(verdicts: Sequence[str], one_refutes: bool) -> str:
    if set(verdicts) == {SUPPORTED}:
        return SUPPORTED
    if REFUTED in verdicts and (one_refutes or SUPPORTED not in verdicts):
        return REFUTED
    return NOT_DECIDED


def _deciding(findings: Sequence[Finding], verdict: str) -> Finding:
    """The setting a verdict hangs on: the weakest support, the clearest refutation, the first open one."""
    alike = [f for f in findings if f.verdict == verdict] or list(findings)
    if verdict == NOT_DECIDED:
        return alike[0]
    pick = max if verdict == SUPPORTED else min
    return pick(alike, key=lambda f: 1.0 if f.p is None else f.p)


def _summary(findings: Sequence[Finding]) -> list[Said]:
    said = []
    for verdict in VERDICTS:
        if names := [f"{f.task} ({f.model})" for f in findings if f.verdict == verdict]:
            said.append(say("summary", verdict=verdict_name(verdict), settings=", ".join(names)))
    return said


def verdict_name(verdict: str) -> Said:
    """A verdict as a heading, in both languages."""
    english, chinese = claim_data()["verdicts"][verdict]
    return english, chinese


def _frozen(claim: Claim, case: Case, verdict: str) -> tuple[str, list[Said]]:
    """The other half of C9: a count. Where it is another than published, nothing is supported."""
    arm, published = case.group.arms[case.method], claim.frozen[architecture(case.group)]
    counts = (*arm.records, *arm.trials)[0].results["parameters"]
    share = 100 * counts["frozen"] / counts["total"]
    said = [say("frozen", share=share, published=published)]
    if verdict == SUPPORTED and round(share, 1) != published:
        return NOT_DECIDED, [*said, say("other_share")]
    return verdict, said


# Speed: seconds of separate runs are shown and decide nothing.


def _speed(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    findings = []
    for group in groups:
        ours, theirs = group.arms[claim.method], group.arms[claim.reference]
        machines = {
            str(r.environment.get("gpu") or r.environment.get("cpu"))
            for r in (*ours.records, *theirs.records)
        }
        a, b = ours.step_time(), theirs.step_time()
        ratio = a / b if a and b and len(machines) == 1 else None
        n, m = len(ours.records), len(theirs.records)
        said = say("no_step_times")
        if a and b and ratio:
            said = say("step_times", method=claim.method, reference=claim.reference, ours=1000 * a,
                       theirs=1000 * b, ratio=ratio, n=n, m=m)  # fmt: skip
        sentences = [said, where(claim, group)]
        findings.append(_finding(group, NOT_DECIDED, ratio, None, min(n, m), "ratio", None, sentences))
    head = next((f for f in findings if f.number is not None), findings[0])
    sentences = [say("not_interleaved"), (head.reason, head.reason_zh)]
    return _verdict(claim, NOT_DECIDED, sentences, findings, head.number, None, head.n, "ratio")


# Kinds of task.


def _kinds(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    """Whether settings of one kind agree, over architectures, and the kinds differ, within one."""
    known = [group for group in groups if task_kind(group) in ("classification", "lm")]
    places = sorted({(architecture(group), task_kind(group)) for group in known})
    architectures, kinds = [a for a, _ in places], [k for _, k in places]
    if len(set(architectures)) == len(places) or len(set(kinds)) == len(places):
        seen = ", ".join(f"{a} {k}" for a, k in places) or "-"
        return _verdict(claim, NOT_DECIDED, [say("kinds_missing", seen=seen)])
    findings = _decide(claim, [make_case(claim, group, analysis) for group in known], analysis)
    outcomes = {kind: {f.verdict for f, g in zip(findings, known, strict=True) if task_kind(g) == kind}
                for kind in kinds}  # fmt: skip
    decided = {kind: found - {NOT_DECIDED} for kind, found in outcomes.items()}
    open_ = any(NOT_DECIDED in found for found in outcomes.values())
    if any(len(found) > 1 for found in decided.values()):
        verdict, key = REFUTED, "kinds_within"
    elif open_:
        verdict, key = NOT_DECIDED, "kinds_undecided"
    elif decided["classification"] == decided["lm"]:
        verdict, key = REFUTED, "kinds_alike"
    else:
        verdict, key = SUPPORTED, "kinds_follow"
    words = {SUPPORTED: "kinds_works", REFUTED: "kinds_fails", NOT_DECIDED: "kinds_open"}
    names = [say(words[f.verdict], where=f"{f.task} ({f.model})") for f in findings]
    listed = say("kinds_list", margin=margin_of(analysis), list=join(names, ("; ", "；")))
    sure = [f for f in findings if f.verdict != NOT_DECIDED]
    n = min((f.n for f in sure), default=0)
    return _verdict(claim, verdict, [say(key), listed], findings, float(len(sure)), None, n, "settings")


# Rates.


def _rates(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    """The ratio of the best rates, once for each setting and seed of the choice.

    A grid knows a best rate to one of its steps, so ratios are coarse and often all the same: they are
    counted, not averaged. A sign test says whether most of them are at least the published one.
    """
    findings, every, widest = [], [], 1.0
    for group in groups:
        ratios, step, said = _rate_ratios(claim, group)
        findings.append(_ratio_finding(claim, group, ratios, step, said))
        every += ratios
        widest = max(widest, step) if ratios else widest
    verdict, number, interval, said = _count_ratios(claim, every, widest)
    head = findings[0]
    sentences = said + ([(head.reason, head.reason_zh)] if len(findings) == 1 else [])
    return _verdict(claim, verdict, sentences, findings, number, interval, len(every), "ratio")


def _rate_ratios(claim: Claim, group: Group) -> tuple[list[float], float, list[Said]]:
    """The ratios of one setting, the step of its grid, and why there are none or what they mean."""
    ours, theirs = group.arms[claim.method], group.arms[claim.reference]
    if not (group.matrix and ours.chosen and theirs.chosen and ours.lr and theirs.lr):
        return [], 1.0, [say("rates_none")]
    grid, names = group.matrix.grid, {"method": claim.method, "reference": claim.reference}
    step = max(high / low for low, high in pairwise(grid))
    if {ours.lr, theirs.lr} & {grid[0], grid[-1]}:
        return [], step, [say("rates_edge")]
    if step > claim.ratio[1]:
        return [], step, [say("rates_coarse", step=step, low=claim.ratio[0], high=claim.ratio[1])]
    scores = {Cell(r.method, r.lr, r.seed, True): r.validation for r in (*ours.trials, *theirs.trials)}
    ratios = []
    for seed in sorted({r.seed for r in ours.trials} & {r.seed for r in theirs.trials}):
        if all(Cell(m, lr, seed, True) in scores for m in names.values() for lr in grid):
            best = [best_rate(m, grid, [seed], scores, group.larger_is_better) for m in names.values()]
            if best[0] and best[1]:
                ratios.append(best[0] / best[1])
    own, there = ours.rates.get(ours.lr), ours.rates.get(theirs.lr)
    if own is None or there is None or ours.lr == theirs.lr:
        return ratios, step, []
    lost = show(group.points(own) - group.points(there), "points" if group.kind == "share" else "%", False)
    return ratios, step, [say("rates_cost", lost=lost, **names)]


def _count_ratios(
    claim: Claim, ratios: Sequence[float], step: float
) -> tuple[str, float | None, Interval | None, list[Said]]:
    from scipy import stats

    if not ratios:
        return NOT_DECIDED, None, None, [say("rates_nothing")]
    logs = statistics.interval([math.log(ratio) for ratio in ratios])
    number = math.exp(logs.mean)
    interval = None if logs.low is None or logs.high is None else (math.exp(logs.low), math.exp(logs.high))
    n, k = len(ratios), sum(ratio > 0.99 * claim.ratio[0] for ratio in ratios)  # 3e-4 / 1e-4 is not quite 3
    p = float(stats.binomtest(k, n).pvalue)
    verdict = NOT_DECIDED if p >= LEVEL else SUPPORTED if 2 * k > n else REFUTED
    spread = say("rates_interval", low=interval[0], high=interval[1]) if interval else ("", "")
    said = [say("rates_found", method=claim.method, reference=claim.reference, number=number, k=k, n=n,
                low=claim.ratio[0], p=show_p(p), step=step, interval=spread)]  # fmt: skip
    if n < SIGN_TEST_FROM:
        said.append(say("rates_few", n=SIGN_TEST_FROM))
    return verdict, number, interval, said


def _ratio_finding(claim: Claim, group: Group, ratios: list[float], step: float, said: list[Said]) -> Finding:
    verdict, number, interval, counted = _count_ratios(claim, ratios, step)
    sentences = [where(claim, group), *(counted if ratios else []), *said]
    return _finding(group, verdict, number, interval, len(ratios), "ratio", None, sentences)


RULES: dict[str, Callable[[Claim, Sequence[Group], Analysis], Verdict]] = {
    "threshold": _threshold,
    "speed": _speed,
    "kinds": _kinds,
    "rates": _rates,
}
