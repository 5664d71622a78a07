"""The published claims, judged from records: supported, refuted, in part or not decided.

The claims, their thresholds and all sentences are data (claims.toml); here are the rules. Most claims are a
threshold: the mean of a measure over pairs of runs with the same seed is above a figure or not. A claim is
judged on every setting of the records that fits it, over all studies. Holm corrects for all of them, and for
the parts of the claim that are missing or void, which leave it open.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from oelm.claims import data
from oelm.claims.cases import FEWEST_RATES, Case, Fitting, Setting, fitting_settings, make_case, rates_problem
from oelm.claims.data import IN_PART, NOT_DECIDED, REFUTED, SUPPORTED, Claim, Sentence, join, sentence
from oelm.claims.remarks import behind_sentences, control_sentence, describe_setting, growth_sentence
from oelm.claims.speed import Benchmark, speed_cases
from oelm.study.decide import LEVEL
from oelm.study.result_types import Analysis, ArmResult
from oelm.study.statistics import holm
from oelm.system.messages import notice


@dataclass(frozen=True)
class Finding:
    """The result of one setting on a claim; `p` is corrected within the claim."""

    task: str
    model: str
    source: str  # the title of the study, or the name of the benchmark record
    verdict: str
    number: float | None
    interval: data.Interval | None
    n: int
    unit: str  # of number and interval: "points", "%" or "ratio"
    p: float | None
    void: bool  # whether no conclusion may be drawn
    why: Sentence  # the deciding numbers, or why there is no decision
    reason: str
    reason_zh: str
    published: float | None = None  # in the same unit
    name: str = ""  # of the task, with the part of its texts that models train on

    @property
    def label(self) -> str:
        return f"{self.name or self.task} ({self.model})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim and its verdict from the records. Number, interval and n are over all settings, or those of the
    setting that decides; `details` holds every setting."""

    id: str
    claim: str
    claim_zh: str
    verdict: str
    number: float | None = None
    interval: data.Interval | None = None
    n: int = 0
    why: str  # in a sentence or two
    why_zh: str
    reason: str
    reason_zh: str
    details: tuple[Finding, ...] = ()
    unit: str = ""  # as of a Finding, or "settings"


def measured(result: Finding | Verdict, between: str = "to", language: int = 0) -> str:
    """The number, its interval and its unit; there must be a number."""
    assert result.number is not None
    plain = result.unit in ("ratio", "settings")
    values = (result.number, *(result.interval or ()))
    shown = [f"{v:.3g}" if plain else data.format_number(v, result.unit, signed=False) for v in values]
    ends = f" ({shown[1]} {between} {shown[2]})" if result.interval else ""
    return f"{shown[0]}{ends} {data.claim_data()['units'][result.unit][language]}"


def judge(analyses: Sequence[Analysis], benchmarks: Sequence[Benchmark] = ()) -> list[Verdict]:
    """A verdict on each claim, in order, from the records of all studies and benchmarks together."""
    return [_judge(claim, analyses, benchmarks) for claim in data.read_claims()]


def _judge(claim: Claim, analyses: Sequence[Analysis], benchmarks: Sequence[Benchmark]) -> Verdict:
    if claim.rule == "speed":
        cases = speed_cases(claim, benchmarks)
        return _threshold(claim, cases) if cases else _verdict(claim, NOT_DECIDED, [sentence("no_bench")])
    fitting = fitting_settings(claim, analyses)
    if not fitting.settings:
        key = "apart" if fitting.apart else "missing"
        return _verdict(claim, NOT_DECIDED, [sentence(key, **claim.names)])
    if claim.rule == "rates":
        return _learning_rates(claim, fitting.settings)
    if claim.rule == "kinds":
        return _kinds(claim, fitting)
    cases = [make_case(claim, setting) for setting in fitting.settings]
    return _threshold(claim, cases, fitting, benchmarks)


def _verdict(
    claim: Claim,
    verdict: str,
    sentences: Sequence[Sentence],
    details: Sequence[Finding] = (),
    why: Sequence[Sentence] | None = None,
    **numbers: Any,
) -> Verdict:
    """`why` is the reason in a sentence or two, by default the whole reason."""
    steps = [sentence("next", command=claim.advice, hours=claim.hours)] if verdict == NOT_DECIDED else []
    reason, brief = join([*sentences, *steps]), join([*(sentences if why is None else why), *steps])
    return Verdict(
        id=claim.id, claim=claim.claim, claim_zh=claim.claim_zh, verdict=verdict, why=brief[0],
        why_zh=brief[1], reason=reason[0], reason_zh=reason[1], details=tuple(details), **numbers,
    )  # fmt: skip


def _threshold(
    claim: Claim, cases: Sequence[Case], fitting: Fitting | None = None, benchmarks: Sequence[Benchmark] = ()
) -> Verdict:
    present, fitting = {"any", *(case.part_name for case in cases)}, fitting or Fitting()
    missing = list(dict.fromkeys([*(name for name in claim.parts if name not in present), *fitting.planned]))
    findings = _decide(claim, cases, len(missing))
    counting = _counting(findings)
    verdict = _combine({f.verdict for f in counting}, bool(missing), claim.one_refutes)
    decisive = _decisive(counting, verdict)
    rest = [sentence("absent", tasks=data.listed(missing))] if missing else []
    rest += [sentence("copied", n=len(fitting.copies))] if fitting.copies else []
    if claim.per_hour:
        verdict, hour = _per_hour(verdict, benchmarks)
        rest.append(hour)
    rest += _still_open(counting, verdict)
    sentences = [*_summary(findings), (decisive.reason, decisive.reason_zh), *rest]
    if claim.growth:
        sentences.append(growth_sentence(claim.growth, cases))
    if models := sorted({setting.model for setting in fitting.left_out}):
        sentences.append(sentence("left_aside", models=data.listed(models)))
    why = [*_summary(counting), sentence("at", where=decisive.label, why=decisive.why), *rest]
    numbers = {key: getattr(decisive, key) for key in ("number", "interval", "n", "unit")}
    return _verdict(claim, verdict, sentences, findings, why, **numbers)


def _summary(findings: Sequence[Finding]) -> list[Sentence]:
    """The settings of each verdict; empty for a single setting."""
    if len(findings) == 1:
        return []
    sentences = []
    for outcome in data.VERDICTS:
        if counts := Counter(finding.label for finding in findings if finding.verdict == outcome):
            names = data.listed(f"{n} x {label}" if n > 1 else label for label, n in counts.items())
            name = tuple(data.claim_data()["verdicts"][outcome])
            sentences.append(sentence("summary", verdict=name, settings=names))
    return sentences


def _decide(claim: Claim, cases: Sequence[Case], missing: int) -> list[Finding]:
    """The finding of each setting; p is corrected for all of them and the missing ones."""
    decisive = holm([case.decisive_p() for case in cases], missing)
    gains = holm([case.p(0.0) if case.part.share is not None else None for case in cases], missing)
    findings = []
    for case, p, p_gain in zip(cases, decisive, gains, strict=True):
        verdict, why = _compare(case, p, p_gain)
        no_worse = case.part.at_margin or case.part.measure == "kept"
        if no_worse and case.collapsed and verdict == SUPPORTED:
            verdict, why = NOT_DECIDED, [*why, sentence("collapsed")]
        sentences = [case.what, *why]
        if case.setting is not None:
            if claim.frozen:
                verdict, more = _frozen(claim, case.setting, verdict)
                sentences += more
            if case.part.control:
                sentences.append(control_sentence(claim, case, verdict in (SUPPORTED, IN_PART)))
            sentences += [describe_setting(claim, case.setting), *behind_sentences(claim, case.setting)]
        findings.append(
            Finding(
                case.task, case.model, case.source, verdict, case.mean, case.interval, case.n, case.unit, p,
                bool(case.problem), join(why), *join(sentences), case.part.published,
                case.setting.group.name if case.setting else "",
            )
        )  # fmt: skip
    return findings


def _compare(case: Case, p: float | None, p_gain: float | None) -> tuple[str, list[Sentence]]:
    if case.problem:
        return NOT_DECIDED, [sentence("problems", problems=case.problem)]
    if case.mean is None or p is None or case.interval is None:
        return NOT_DECIDED, [sentence("constant")]
    part, published = case.part, case.part.published
    values = {"threshold": case.show(case.threshold), "p": data.format_p(p), "share": 100 * (part.share or 0)}
    if part.within is not None:
        values["threshold"] = case.show(part.within)
    kind = "within" if part.within is not None else "share" if part.share is not None else "above"
    gain = p_gain is not None and p_gain < LEVEL and case.mean > 0
    verdict = NOT_DECIDED if p >= LEVEL else SUPPORTED if case.ahead else REFUTED
    sentences = [sentence(f"{'open' if verdict == NOT_DECIDED else verdict}_{kind}", **values)]
    if kind == "share" and verdict == REFUTED and gain:
        sentences.append(sentence("small_gain"))
    if kind == "share" and verdict == NOT_DECIDED:
        sentences.append(sentence("gain_shown" if gain else "gain_open"))
    if published is not None and kind != "within":
        low, high = case.interval
        place = "above" if published > high else "below" if published < low else "inside"
        if kind == "share" and verdict == SUPPORTED and place == "above":
            verdict = IN_PART
        sentences.append(sentence(f"published_{place}", published=case.show(published)))
    return verdict, sentences


def _counting(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that count: a void one counts only if no other setting of its task and model has a
    conclusion."""
    usable = {(finding.task, finding.model) for finding in findings if not finding.void}
    return [f for f in findings if not f.void or (f.task, f.model) not in usable]


def _still_open(findings: Sequence[Finding], verdict: str) -> list[Sentence]:
    """The sentence on undecided settings of an open claim, which no further run of their study's plan and no
    other task will decide."""
    names = [f.label for f in findings if f.verdict == NOT_DECIDED and not f.void]
    known = verdict == NOT_DECIDED and names
    return [sentence("still_open", settings=data.listed(dict.fromkeys(names)))] if known else []


def _combine(verdicts: set[str], missing: bool, one_refutes: bool) -> str:
    """The verdict over all parts of a claim: equal ones decide it; a missing or undecided part leaves it open
    unless others disagree."""
    outcomes = verdicts | ({NOT_DECIDED} if missing else set())
    if REFUTED in outcomes and one_refutes:
        return REFUTED
    if len(outcomes) == 1:
        return outcomes.pop()
    if (REFUTED in outcomes and outcomes & {SUPPORTED, IN_PART}) or NOT_DECIDED not in outcomes:
        return IN_PART
    return NOT_DECIDED


def _decisive(findings: Sequence[Finding], verdict: str) -> Finding:
    """The finding that decides: the weakest support or the clearest refutation; otherwise one that could be
    tested rather than a void one, with the most runs."""
    alike = [f for f in findings if f.verdict == verdict] or list(findings)
    if verdict in (NOT_DECIDED, IN_PART):
        return min(alike, key=lambda f: (f.void, -f.n))
    return (max if verdict == SUPPORTED else min)(alike, key=lambda f: 1.0 if f.p is None else f.p)


def _frozen(claim: Claim, setting: Setting, verdict: str) -> tuple[str, list[Sentence]]:
    """The share of frozen parameters of C9; if it is not the published one, nothing is supported."""
    arm, published = setting.group.arms[claim.method], claim.frozen[setting.architecture]
    if not arm.records:
        return verdict, []
    parameters = arm.records[0].results["parameters"]
    share = 100 * parameters["frozen"] / parameters["total"]
    sentences = [sentence("frozen", share=share, published=published)]
    if verdict == SUPPORTED and round(share, 1) != published:
        return NOT_DECIDED, [*sentences, sentence("other_share")]
    return verdict, sentences


def _per_hour(verdict: str, benchmarks: Sequence[Benchmark]) -> tuple[str, Sentence]:
    """The verdict with C10's second half, from the language model's step in C2's benchmarks: without one, the
    claim can be refuted but not supported."""
    (speed,) = (claim for claim in data.read_claims() if claim.rule == "speed")
    cases = [c for c in speed_cases(speed, benchmarks) if c.part.kind == "lm" and c.part.within is None]
    p_values = holm([case.p(0.0) for case in cases])
    significant = bool(cases) and all(p is not None and p < LEVEL for p in p_values)
    faster = all(case.mean is not None and case.mean > 0 for case in cases)
    key = "hour_open" if not significant else "hour_faster" if faster else "hour_slower"
    if verdict in (SUPPORTED, IN_PART):
        verdict = {"hour_open": NOT_DECIDED, "hour_faster": verdict, "hour_slower": IN_PART}[key]
    return verdict, sentence(key)


def _kinds(claim: Claim, fitting: Fitting) -> Verdict:
    """The rule "kinds": settings of one kind of task agree over architectures, and the kinds of one
    architecture differ."""
    known = [setting for setting in fitting.settings if setting.kind in ("classification", "lm")]
    pairs = sorted({(setting.architecture, setting.kind) for setting in known})
    architectures, kinds = [a for a, _ in pairs], [k for _, k in pairs]
    if len(set(architectures)) == len(pairs) or len(set(kinds)) == len(pairs):
        seen = data.listed(f"{a} {k}" for a, k in pairs) if pairs else "-"
        return _verdict(claim, NOT_DECIDED, [sentence("kinds_missing", seen=seen)])
    findings = _decide(claim, [make_case(claim, setting) for setting in known], len(fitting.planned))
    outcomes: dict[str, set[str]] = defaultdict(set)
    counting = _counting(findings)
    for finding, setting in zip(findings, known, strict=True):
        if finding in counting:
            outcomes[setting.kind].add(finding.verdict)
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
    sentences = [sentence(key), sentence("kinds_list", **data.claim_data()["margins"], list=settings)]
    sure = [f.n for f in findings if f.verdict != NOT_DECIDED]
    numbers: dict[str, Any] = {"number": float(len(sure)), "n": min(sure, default=0), "unit": "settings"}
    return _verdict(claim, verdict, sentences, findings, **numbers)


def _learning_rates(claim: Claim, settings: Sequence[Setting]) -> Verdict:
    """The rule "rates": the ratio of a method's best learning rate to the reference arm's. A setting counts
    once, whatever its number of seeds, and a verdict needs several tasks."""
    findings = [_rates_finding(claim, setting) for setting in settings]
    ratios = [finding.number for finding in findings if finding.number is not None]
    tasks = {finding.task for finding in findings if finding.number is not None}
    counting, verdict = _counting(findings), NOT_DECIDED
    if len(tasks) >= claim.tasks:
        verdict = _combine({finding.verdict for finding in counting}, False, False)
    number = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    few = [sentence("rates_few", n=claim.tasks, tasks=len(tasks))] if len(tasks) < claim.tasks else []
    few += _still_open(counting, verdict)
    first = _decisive(counting, verdict)
    sentences = [*_summary(findings), (first.reason, first.reason_zh), *few]
    why = [*_summary(counting), sentence("at", where=first.label, why=first.why), *few]
    ends = [end for finding in findings for end in finding.interval or ()]
    interval = (min(ends), max(ends)) if ends else None
    numbers = {"number": number, "interval": interval, "n": len(tasks), "unit": "ratio"}
    return _verdict(claim, verdict, sentences, findings, why, **numbers)


def _rates_finding(claim: Claim, setting: Setting) -> Finding:
    """The finding on the ratio of learning rates; its interval covers all near-tied ones of both arms."""
    group, arms = setting.group, setting.arms_of(claim)
    verdict, number, interval = NOT_DECIDED, None, None
    problem, matrix = _trials_problem(claim, setting, arms), group.matrix
    if problem is not None or matrix is None or arms[0].lr is None or arms[1].lr is None:
        why = sentence("problems", problems=problem or sentence("untuned", fewest=FEWEST_RATES))
    else:
        rates = [matrix.near_ties[arm.method] for arm in arms]
        number, least = arms[0].lr / arms[1].lr, 0.99 * claim.ratio[0]  # 3e-4 / 1e-4 is not quite 3
        interval = min(rates[0]) / max(rates[1]), max(rates[0]) / min(rates[1])
        verdict = SUPPORTED if interval[0] >= least else REFUTED if interval[1] < least else NOT_DECIDED
        key = {SUPPORTED: "rates_higher", REFUTED: "rates_lower", NOT_DECIDED: "rates_open"}[verdict]
        ends = {"smallest": interval[0], "largest": interval[1], "least": claim.ratio[0]}
        why = sentence(key, **claim.names, number=number, **ends)
        best, at_reference_lr = (arms[0].lr_scores.get(arm.lr) for arm in arms if arm.lr)
        if best is not None and at_reference_lr is not None and number != 1:
            unit = "points" if group.kind == "share" else "%"
            lost = data.with_unit(group.points(best) - group.points(at_reference_lr), unit, False)
            why = join([why, sentence("rates_cost", lost=lost, **claim.names)])
    trials = len({trial.seed for arm in arms for trial in arm.trials})
    reason = join([why, describe_setting(claim, setting)])
    place = (group.task, setting.model, setting.analysis.title)
    return Finding(
        *place, verdict, number, interval, trials, "ratio", None, number is None, why, *reason,
        name=group.name,
    )  # fmt: skip


def _trials_problem(claim: Claim, setting: Setting, arms: Sequence[ArmResult]) -> Sentence | None:
    """Why the trials of a setting allow no conclusion about the best learning rates; None if they do."""
    if problem := rates_problem(setting, arms):
        return problem
    if any(arm.unevaluated for arm in arms) or arms[0].lr_scores.keys() != arms[1].lr_scores.keys():
        return data.format_problems([notice("problem.unequal_trials")])
    step = max(high / low for low, high in pairwise(sorted(arms[0].lr_scores)))
    if step > claim.ratio[1]:
        return sentence("rates_coarse", step=step, low=claim.ratio[0], high=claim.ratio[1])
    lost = {a.method: [r.seed for r in a.trials if r.lr == a.lr and r.results.get("at_chance")] for a in arms}
    runs = [notice("study.seeds", method=name, seeds=seeds) for name, seeds in lost.items() if seeds]
    return data.format_problems([notice("problem.at_chance", runs=runs)]) if runs else None
