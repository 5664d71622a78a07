"""The published claims, judged from records: supported, refuted or not decided, with number and reason.

What is claimed, what decides it and every sentence is data (claims.toml); here are the rules. Most claims are
a threshold: a measure, taken for each pair of runs that share a seed, whose mean is or is not above a figure.
A claim is judged on every setting of the records that fits it, and these tests are its Holm family. Whatever
forbids a conclusion from two arms (`oelm.study.analysis.PROBLEMS`) leaves the claim not decided.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from oelm.claims.cases import (
    Case,
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
from oelm.claims.data import (
    NOT_DECIDED,
    REFUTED,
    SUPPORTED,
    VERDICTS,
    Claim,
    Interval,
    Said,
    claim_data,
    join,
    read_claims,
    say,
    show_p,
)
from oelm.claims.learning_rates import count_ratios, rate_ratios
from oelm.study import statistics
from oelm.study.result_types import LEVEL, Analysis, Group


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
    fit = fitting(claim, analysis)
    if not fit.groups:
        return _verdict(claim, NOT_DECIDED, [_missing(claim), *([say("apart")] if fit.apart else [])])
    found = RULES[claim.rule](claim, fit.groups, analysis)
    if not fit.aside:
        return found
    models = ", ".join(sorted({model_name(group) for group in fit.aside}))
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
    return Finding(group.task, model_name(group), verdict, number, interval, n, unit, p, *join(sentences))


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
        return NOT_DECIDED, [say("problems", problems=case.explain_problems())]
    found = case.estimate
    if found is None or p_above is None or p_below is None or case.interval is None:
        return NOT_DECIDED, [say("constant")]
    above, below = case.show(case.above), case.show(case.below)
    higher = p_above < LEVEL and found.mean > case.above
    if p_below < LEVEL and found.mean < case.below:
        verdict, key = REFUTED, "refuted_below" if case.part.share is None else "refuted_share"
        said = [say(key, below=below, share=100 * (case.part.share or 0), p=show_p(p_below))]
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
        if names := [_label(f) for f in findings if f.verdict == verdict]:
            said.append(say("summary", verdict=verdict_name(verdict), settings=_names(names)))
    return said


def _label(where: Group | Finding) -> str:
    return f"{where.task} ({model_name(where) if isinstance(where, Group) else where.model})"


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"{n} x {label}" if n > 1 else label for label, n in Counter(labels).items())


def verdict_name(verdict: str) -> Said:
    """A verdict as a heading, in both languages."""
    english, chinese = claim_data()["verdicts"][verdict]
    return english, chinese


def _frozen(claim: Claim, case: Case, verdict: str) -> tuple[str, list[Said]]:
    """The other half of C9: a count. Where it is another than published, nothing is supported."""
    arm, published = case.group.arms[case.method], claim.frozen[architecture(case.group)]
    if not arm.records:
        return verdict, []
    counts = arm.records[0].results["parameters"]
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
        environments = [record.environment for record in (*ours.records, *theirs.records)]
        machines = {found.get("gpu") or found.get("cpu") for found in environments}
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
    names = [say(words[f.verdict], where=_label(f)) for f in findings]
    listed = say("kinds_list", margin=margin_of(analysis), list=join(names, ("; ", "；")))
    sure = [f for f in findings if f.verdict != NOT_DECIDED]
    n = min((f.n for f in sure), default=0)
    return _verdict(claim, verdict, [say(key), listed], findings, float(len(sure)), None, n, "settings")


# Rates: see `oelm.claims.learning_rates`.


def _rates(claim: Claim, groups: Sequence[Group], analysis: Analysis) -> Verdict:
    findings, every, left_out = [], [], defaultdict(list)
    for group in groups:
        ratios, said = rate_ratios(claim, group)
        every += ratios
        one = count_ratios(claim, ratios)
        if not ratios:
            left_out[join(said)].append(_label(group))
        sentences = [*(one.said if ratios else []), *said, where(claim, group)]
        findings.append(
            _finding(group, one.verdict, one.number, one.interval, len(ratios), "ratio", None, sentences)
        )
    found = count_ratios(claim, every)
    if len(findings) == 1:
        said = [(findings[0].reason, findings[0].reason_zh)]
    else:
        reasons = [say("rates_left_out", settings=_names(names), why=why) for why, names in left_out.items()]
        said = [*found.said, *reasons]
    return _verdict(claim, found.verdict, said, findings, found.number, found.interval, len(every), "ratio")


RULES: dict[str, Callable[[Claim, Sequence[Group], Analysis], Verdict]] = {
    "threshold": _threshold,
    "speed": _speed,
    "kinds": _kinds,
    "rates": _rates,
}
