"""The answer in two sentences: what came out, and under which conditions."""

from collections.abc import Sequence

from oelm.study.records import Record
from oelm.study.report import numbers
from oelm.study.report.view import View
from oelm.study.result_types import Comparison, Group, explain_problems
from oelm.system.messages import Notice, text_of

MOST_CLAUSES = 3  # comparisons that are told one by one; more are counted
MOST_NAMES = 6
VERDICTS = ("better", "worse", "equivalent", "open", "void")


def answer(view: View) -> list[str]:
    """Two sentences, honest and plain."""
    words, comparisons = view.words, view.analysis.comparisons
    settings = {c.group.setting for c in comparisons}
    if not comparisons:
        methods = dict.fromkeys(m for group in view.analysis.groups for m in group.arms)
        first = words("answer.nothing", methods=words.items(methods))
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
    """One comparison in words."""
    group, verdict, paired = comparison.group, comparison.verdict, comparison.paired
    names = {"method": comparison.method, "reference": group.reference}
    if verdict == "void" or paired is None:
        return view.words(
            "answer.void", **names, reasons=reasons(view, comparison), seen=_seen(view, comparison)
        )
    digits = view.digits(comparison)
    difference = _difference(view, comparison)
    if verdict == "open":
        if paired.low is None or paired.low == paired.high:
            return view.words("answer.open_flat", **names, diff=difference, n=paired.n)
        span = view.span(paired.low, paired.high, digits)
        if (why := comparison.disagreement) is not None:
            p, count = numbers.equals(comparison.p_holm), len(view.analysis.comparisons)
            return view.words(f"answer.open_{why}", **names, diff=difference, interval=span, p=p, count=count)
        return view.words("answer.open", **names, diff=difference, interval=span)
    margin = _margin(view, comparison)
    if verdict == "equivalent":
        test = comparison.equivalence
        assert test is not None
        span = view.span(test.low, test.high, numbers.digits_for(test.low, test.high))
        plain = view.amount(group, numbers.signed(paired.mean, digits))
        p = numbers.equals(test.p)
        return view.words(
            "answer.equivalent", **names, margin=margin, diff=plain, interval=span, n=paired.n, p=p
        )
    # The verb says the direction, so the numbers need no sign.
    sign = 1 if verdict == "better" else -1
    tail = view.words("answer.negligible", margin=margin) if comparison.negligible else ""
    if comparison.disagreement is not None:
        tail += view.words("answer.reaches_0")
    ends = sorted(sign * end for end in (paired.low, paired.high) if end is not None)
    return view.words(
        f"answer.{verdict}_{group.kind}",
        **names,
        metric=view.metric(group),
        diff=view.amount(group, numbers.fixed(sign * paired.mean, digits)),
        interval=view.words.range(*(numbers.fixed(end, digits) for end in ends)) if ends else numbers.NOTHING,
        n=paired.n,
        p=numbers.equals(comparison.p_holm),
        tail=tail,
    )


def reasons(view: View, *comparisons: Comparison) -> str:
    """Why nothing may be concluded from these comparisons, in words."""
    return view.words("list.and").join(text_of(p, view.words.lang) for p in problems(view, *comparisons))


def problems(view: View, *comparisons: Comparison) -> list[Notice]:
    """Why nothing may be concluded from these comparisons."""
    several = len({c.group.setting for c in comparisons}) > 1
    arms = {}
    for c in comparisons:
        for arm in (c.reference, c.arm):
            arms[f"{view.label(c.group)}, {arm.method}" if several else arm.method] = arm
    codes = dict.fromkeys(code for c in comparisons for code in c.problems)
    return explain_problems(codes, arms, min(len(c.seeds) for c in comparisons))


def _seen(view: View, comparison: Comparison) -> str:
    paired = comparison.paired
    if paired is None:
        return view.words("answer.seen_nothing")
    return view.words("answer.seen", diff=_difference(view, comparison), n=paired.n)


def _difference(view: View, comparison: Comparison) -> str:
    """The mean difference; of a perplexity, where less is more, its sense is said."""
    assert comparison.paired is not None
    text = view.amount(comparison.group, numbers.signed(comparison.paired.mean, view.digits(comparison)))
    if comparison.group.larger_is_better:
        return text
    return view.words("list.with", name=text, detail=view.words("answer.sense"))


def _margin(view: View, comparison: Comparison) -> str:
    assert comparison.equivalence is not None
    return view.amount(comparison.group, f"{comparison.equivalence.margin:g}")


def _by_verdict(view: View, comparisons: Sequence[Comparison]) -> str:
    """Many methods on one task."""
    words, parts = view.words, []
    for verdict in VERDICTS:
        several = [c for c in comparisons if c.verdict == verdict]
        if several:
            names = words.items(f"{c.method} {_amount(view, [c])}".strip() for c in several)
            parts.append(words("answer.part_names", verdict=words(f"answer.is_{verdict}"), names=names))
    clauses = words(
        "answer.against",
        reference=comparisons[0].group.reference,
        clauses=words("list.semicolon").join(parts),
    )
    return words("answer.on", task=view.label(comparisons[0].group), clauses=clauses)


def _by_method(view: View, comparisons: Sequence[Comparison]) -> str:
    """Several tasks: how often each method came out better, worse, equivalent or neither."""
    words, clauses = view.words, []
    for method in dict.fromkeys(c.method for c in comparisons):
        own = [c for c in comparisons if c.method == method]
        parts = []
        for verdict in VERDICTS:
            several = [c for c in own if c.verdict == verdict]
            if several:
                parts.append(_part(view, verdict, several, len(several) == len(own)))
        clauses.append(words("answer.method", method=method, parts=words.items(parts)))
    references = {c.group.reference for c in comparisons}
    reference = references.pop() if len(references) == 1 else words("answer.the_reference")
    count = len({c.group.setting for c in comparisons})
    return words(
        "answer.counts", reference=reference, count=count, clauses=words("list.semicolon").join(clauses)
    )


def _part(view: View, verdict: str, several: Sequence[Comparison], all_of_them: bool) -> str:
    words = view.words
    key = "part_all" if all_of_them else "part_some"
    names = words.items(view.label(c.group) for c in several[:MOST_NAMES])
    if len(several) > MOST_NAMES:
        names = words("list.more", names=names, count=len(several) - MOST_NAMES)
    text = words(f"answer.{key}", verdict=words(f"answer.is_{verdict}"), count=len(several), names=names)
    details = [_amount(view, several)] if verdict in ("better", "worse") else []
    if any(c.negligible for c in several):
        details.append(words("verdict.negligible"))
    details = [detail for detail in details if detail]
    return words("list.with", name=text, detail=words.items(details)) if details else text


def _amount(view: View, several: Sequence[Comparison]) -> str:
    """The difference, or the range of several; nothing where they are not all of one unit."""
    means = sorted(c.paired.mean for c in several if c.paired is not None and c.verdict != "void")
    if not means or len({c.group.kind for c in several}) > 1:
        return ""
    digits = max(view.digits(c) for c in several)
    ends = list(dict.fromkeys(numbers.signed(mean, digits) for mean in (means[0], means[-1])))
    return view.amount(several[0].group, ends[0] if len(ends) == 1 else view.words.range(*ends))


def _conditions(view: View) -> str:
    """At which rates the methods were measured, and where trivial references stand."""
    arms = [arm for group in view.analysis.groups for arm in group.arms.values() if arm.records]
    rates = {arm.lr for arm in arms}
    if not arms:
        key = "unmeasured"
    elif all(arm.chosen for arm in arms):
        key = "chosen"
    else:
        key = "same" if len(rates) == 1 and None not in rates else "other"
    detail, tail = "", ""
    if len(view.analysis.groups) == 1:
        tail = _trivial(view, view.analysis.groups[0])
        shown = [
            numbers.rate(arm.lr) if key == "same" else f"{arm.method} {_rates(arm.records)}" for arm in arms
        ]
        if shown:
            detail = view.words("answer.detail", rates=view.words.items(dict.fromkeys(shown)))
    else:
        tail = _trivial_anywhere(view)
    return view.words(f"answer.{key}", detail=detail, tail=tail)


def _rates(records: Sequence[Record]) -> str:
    return "/".join(numbers.rate(lr) for lr in sorted({record.lr for record in records}))


def _trivial(view: View, group: Group) -> str:
    """Where the best trivial reference stands among the methods."""
    known = {name: m[group.metric] for name, m in group.references.items() if group.metric in m}
    arms = [arm for arm in group.arms.values() if arm.values]
    if not known or not arms:
        return ""
    best = (max if group.larger_is_better else min)(known, key=lambda name: known[name])
    behind = [arm.method for arm in arms if best in group.behind(arm)]
    key = "behind_all" if not behind else "ahead_all" if len(behind) == len(arms) else "ahead_some"
    value = view.quantity(group, known[best])
    if group.metric == "perplexity":
        bits = numbers.fixed(group.references[best].get("bits_per_byte"), 3)
        value = view.words("answer.perplexity", value=value, bits=bits)
    name = view.words.name("trivial", best)
    return view.words(f"answer.{key}", name=name, value=value, methods=view.words.items(behind))


def _trivial_anywhere(view: View) -> str:
    groups = [g for g in view.analysis.groups if g.references and any(a.values for a in g.arms.values())]
    ahead = [view.label(g) for g in groups if any(g.behind(arm) for arm in g.arms.values())]
    if not groups:
        return ""
    if not ahead:
        return view.words("answer.tasks_behind")
    return view.words("answer.tasks_ahead", tasks=view.words.items(ahead))
