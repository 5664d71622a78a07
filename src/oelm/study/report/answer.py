"""The report's answer in two sentences: the result, and the conditions under which it holds."""

from collections.abc import Sequence
from typing import Any

from oelm.study.report import numbers
from oelm.study.report.view import View
from oelm.study.result_types import Comparison, Group, explain_problems
from oelm.study.two_way import envelope_half_width, seeds_needed
from oelm.system.messages import Notice, named, text_of

MOST_CLAUSES = 3  # comparisons that are described one by one; more are counted
MOST_NAMES = 6
VERDICTS = ("better", "worse", "equivalent", "open", "void")


def answer(view: View) -> list[str]:
    """Two sentences: the comparisons, then the learning rates and the trivial baselines."""
    words, comparisons = view.words, view.analysis.comparisons
    settings = {c.group.setting for c in comparisons}
    if not comparisons:
        first = words("answer.nothing", methods=words.items(map(named, view.colours)))
    elif len(comparisons) > 1 and all(c.verdict == "void" for c in comparisons):
        first = words("answer.void_all", count=len(comparisons), reasons=reasons(view, *comparisons))
    elif len(settings) == 1 and len(comparisons) <= MOST_CLAUSES:
        clauses = words("list.semicolon").join(clause(view, c) for c in comparisons)
        first = words("answer.on", task=view.label(comparisons[0].group), clauses=clauses)
    elif len(settings) == 1:
        first = _by_verdict(view, comparisons)
    else:
        first = _by_method(view, comparisons)
    return [first, _conditions(view)]


def clause(view: View, comparison: Comparison) -> str:
    """The result of one comparison, as a part of the first sentence."""
    group, verdict = comparison.group, comparison.verdict
    interval = comparison.combined and group.shown_interval(comparison.combined)
    values: dict[str, Any] = {"method": comparison.method, "reference_arm": comparison.reference}
    values["n"] = len(comparison.seeds)
    if verdict == "void" or interval is None:
        seen = view.words("answer.seen_nothing")
        if comparison.seeds:
            seen = view.words("answer.seen", diff=_difference(view, comparison), n=values["n"])
        return view.words("answer.void", **values, reasons=reasons(view, comparison), seen=seen)
    digits = view.digits(comparison)
    values |= {"p": numbers.equals(comparison.p_holm), "metric": view.metric(group)}
    values |= {"diff": _difference(view, comparison), "count": view.analysis.planned}
    values["interval"] = view.span(interval.low, interval.high, digits)
    values["margin"] = view.amount(group, f"{comparison.margin:g}")
    if verdict == "open":
        if interval.low is None or interval.low == interval.high:
            return view.words("answer.open_flat", **values)
        key = "answer.open_family" if comparison.only_family else "answer.open"
        narrow = view.words("list.semicolon").join(_narrowing(view, comparison))
        return view.words(key, **values, narrow=narrow)
    if verdict == "equivalent":
        values["diff"] = view.amount(group, numbers.signed(interval.mean, digits))
        values["p"] = numbers.equals(comparison.margin_p_holm)
        tail = view.words("answer.small") if comparison.small_difference else ""
        return view.words("answer.equivalent", **values, tail=tail)
    # The verb says the direction, so the numbers need no sign.
    sign = 1 if verdict == "better" else -1
    ends = sorted(sign * end for end in (interval.low, interval.high) if end is not None)
    values["diff"] = view.amount(group, numbers.fixed(sign * interval.mean, digits))
    unit = "" if group.larger_is_better else " %"
    texts = [f"{numbers.fixed(end, digits)}{unit}" for end in ends]
    values["interval"] = view.words.range(*texts) if texts else numbers.NOTHING
    return view.words(f"answer.{verdict}_{group.kind}", **values)


def _narrowing(view: View, comparison: Comparison) -> list[str]:
    """Why an undecided interval is wide, and what would narrow it: seeds, test items or trials."""
    overall, group = comparison.overall, comparison.group
    assert overall is not None
    bound, tables = group.bound(comparison.margin), comparison.combined.tables if comparison.combined else ()
    # More seeds remove neither the items' noise nor the differences between near-tied learning rates.
    if overall.half_width() <= bound < envelope_half_width(tables or [overall]):
        return [view.words("answer.narrow_rates")]
    share = overall.share_items
    source = [view.words("answer.source", share=f"{100 * share:.0f} %")] if share is not None else []
    needed = seeds_needed(tables or [overall], bound)
    if needed is not None:
        return [*source, view.words("answer.narrow_seeds", count=max(needed, overall.seeds + 1))]
    if overall.half_width() <= bound:
        return [*source, view.words("answer.narrow_many")]
    width = group.shown(overall.half_width())
    text = view.amount(group, numbers.fixed(width, numbers.digits_for(-width, width)))
    return [*source, view.words("answer.narrow_items", items=numbers.count(overall.items), width=text)]


def reasons(view: View, *comparisons: Comparison) -> str:
    return view.words("list.and").join(text_of(p, view.words.lang) for p in problems(view, *comparisons))


def problems(view: View, *comparisons: Comparison) -> list[Notice]:
    """Why no conclusion may be drawn from these comparisons."""
    several = len({c.group.setting for c in comparisons}) > 1
    arms = {
        f"{view.label(c.group)}, {arm.method}" if several else arm.method: arm
        for c in comparisons
        for arm in (c.reference_arm, c.arm)
    }
    codes = dict.fromkeys(code for c in comparisons for code in c.problems)
    pairs = min(c.pairs for c in comparisons)
    return explain_problems(codes, arms, pairs, view.analysis.planned)


def _difference(view: View, comparison: Comparison) -> str:
    """The mean difference; for a perplexity, where lower is better, with the direction that is better."""
    group, difference = comparison.group, comparison.combined or comparison.by_seeds
    assert difference is not None
    text = view.amount(group, numbers.signed(group.shown(difference.mean), view.digits(comparison)))
    return view.with_detail(text, "" if group.larger_is_better else view.words("answer.sense"))


def _verdicts(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    by_verdict = {verdict: [c for c in comparisons if c.verdict == verdict] for verdict in VERDICTS}
    return {verdict: several for verdict, several in by_verdict.items() if several}


def _by_verdict(view: View, comparisons: Sequence[Comparison]) -> str:
    """The answer for many methods on one task, by verdict."""
    words, group, parts = view.words, comparisons[0].group, []
    for verdict, several in _verdicts(comparisons).items():
        names = words.items(f"{_name(c)} {_amount(view, [c])}".strip() for c in several)
        parts.append(words("answer.part_names", verdict=words(f"verdict.{verdict}"), names=names))
    clauses = words("list.semicolon").join(parts)
    clauses = words("answer.against", reference_arm=group.reference_arm, clauses=clauses)
    return words("answer.on", task=view.label(group), clauses=clauses)


def _name(comparison: Comparison) -> str:
    """The arm, with the other one where that is not the reference arm of the setting."""
    contrast = comparison.reference != comparison.group.reference_arm
    method, reference = named(comparison.method), named(comparison.reference)
    return f"{method} − {reference}" if contrast else method


def _by_method(view: View, comparisons: Sequence[Comparison]) -> str:
    """Several tasks: how often each method came out better, worse, equivalent or neither."""
    words, clauses = view.words, []
    for method in dict.fromkeys(map(_name, comparisons)):
        verdicts = _verdicts([c for c in comparisons if _name(c) == method])
        parts = [_part(view, verdict, several, len(verdicts) == 1) for verdict, several in verdicts.items()]
        clauses.append(words("answer.method", method=method, parts=words.items(parts)))
    names = {c.group.reference_arm for c in comparisons}
    return words(
        "answer.counts",
        reference_arm=names.pop() if len(names) == 1 else words("answer.the_reference_arm"),
        count=len({c.group.setting for c in comparisons}),
        clauses=words("list.semicolon").join(clauses),
    )


def _part(view: View, verdict: str, several: Sequence[Comparison], all_of_them: bool) -> str:
    words = view.words
    key = "part_all" if all_of_them else "part_some"
    names = words.items(view.label(c.group) for c in several[:MOST_NAMES])
    if len(several) > MOST_NAMES:
        names = words("list.more", names=names, count=len(several) - MOST_NAMES)
    text = words(f"answer.{key}", verdict=words(f"verdict.{verdict}"), count=len(several), names=names)
    details = [_amount(view, several)] if verdict in ("better", "worse") else []
    if any(c.small_difference for c in several):
        details.append(words("verdict.small"))
    return view.with_detail(text, words.items(filter(None, details)))


def _amount(view: View, several: Sequence[Comparison]) -> str:
    """The difference, or the range of several; empty if they have different units."""
    means = sorted(c.group.shown(c.combined.mean) for c in several if c.combined and c.verdict != "void")
    if not means or len({c.group.kind for c in several}) > 1:
        return ""
    digits = max(view.digits(c) for c in several)
    ends = list(dict.fromkeys(numbers.signed(mean, digits) for mean in (means[0], means[-1])))
    return view.amount(several[0].group, ends[0] if len(ends) == 1 else view.words.range(*ends))


def _conditions(view: View) -> str:
    """The learning rates of the methods, and how the trivial baselines compare."""
    arms = [arm for group in view.analysis.groups for arm in group.arms.values() if arm.records]
    lrs = {arm.lr for arm in arms}
    if not arms:
        key = "unmeasured"
    elif all(arm.chosen for arm in arms):
        key = "near_ties" if any(arm.near_ties for arm in arms) else "chosen"
    else:
        key = "same" if len(lrs) == 1 and None not in lrs else "other"
    if len(view.analysis.groups) > 1:
        return view.words(f"answer.{key}", detail="", tail=_trivial_on_any_task(view))
    texts = []
    for arm in arms:
        lrs_of = sorted({record.lr for runs in arm.by_lr for record in runs})
        lr = "/".join(map(numbers.learning_rate, lrs_of))
        texts.append(lr if key == "same" else f"{named(arm.method)} {lr}")
    detail = view.words("answer.detail", lrs=view.words.items(dict.fromkeys(texts))) if texts else ""
    return view.words(f"answer.{key}", detail=detail, tail=_trivial(view, view.analysis.groups[0]))


def _trivial(view: View, group: Group) -> str:
    """How the best trivial baseline compares with the methods."""
    scores = {name: metrics[group.metric] for name, metrics in group.trivial_baselines.items()}
    arms = [arm for arm in group.arms.values() if arm.values]
    if not scores or not arms:
        return ""
    best = (max if group.larger_is_better else min)(scores, key=lambda name: scores[name])
    behind = [arm.method for arm in arms if best in group.behind(arm)]
    key = "behind_all" if not behind else "ahead_all" if len(behind) == len(arms) else "ahead_some"
    value = view.value(group, scores[best]) + (" %" if group.kind == "share" else "")
    if group.metric == "perplexity":
        bits = numbers.fixed(group.trivial_baselines[best].get("bits_per_byte"), 3)
        value = view.words("answer.perplexity", value=value, bits=bits)
    name = view.words.name("trivial", best)
    return view.words(f"answer.{key}", name=name, value=value, methods=view.words.items(map(named, behind)))


def _trivial_on_any_task(view: View) -> str:
    measured = [g for g in view.analysis.groups if any(arm.values for arm in g.arms.values())]
    ahead = [view.label(g) for g in measured if any(g.behind(arm) for arm in g.arms.values())]
    if not any(group.trivial_baselines for group in measured):
        return ""
    return view.words("answer.tasks_ahead" if ahead else "answer.tasks_behind", tasks=view.words.items(ahead))
