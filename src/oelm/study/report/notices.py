"""Everything a reader should know before believing the numbers: each thing once, the gravest first."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from oelm.study.matrix import Cell
from oelm.study.report import numbers
from oelm.study.report.answer import reasons
from oelm.study.report.view import View
from oelm.study.report.words import Words
from oelm.study.result_types import ArmResult, Group
from oelm.training.predictions import WITH_GROUPS

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
MOST_RUNS = 12  # that are listed by name in one line


@dataclass(frozen=True)
class Notice:
    """`kind` is the heading it stands under; see `[notice]` in the words."""

    kind: str
    text: str


def alert(words: Words, warned: list[Notice]) -> str:
    """One line that says how many warnings there are; empty without any.

    What records of an earlier version lack is told, but not counted: no number here depends on it.
    """
    count = len([notice for notice in warned if notice.kind != "version"])
    if not count:
        return ""
    return words("page.alert_one") if count == 1 else words("page.alert", count=count)


def notices(view: View) -> list[Notice]:
    """All warnings of an analysis, grouped by kind."""
    found = [
        Notice(
            "void",
            view.words("notice.reasons", task=view.label(c.group), method=c.method, reasons=reasons(view, c)),
        )
        for c in view.analysis.comparisons
        if c.problems
    ]
    for group in view.analysis.groups:
        found += [*_unevaluated(view, group), *_failures(view, group)]
    for group in view.analysis.groups:
        found += _of_group(view, group)
    words = view.words
    for name, values in view.analysis.mixtures.items():
        found.append(Notice("mixture", words("notice.mixed", what=name, values=words.items(values))))
    for key in ("left_out", "copies", "unused"):
        if count := getattr(view.analysis, key):
            found.append(Notice("mixture", words(f"notice.{key}", count=count)))
    found += [Notice("mixture", words("notice.damaged", reason=reason)) for reason in view.analysis.damaged]
    versions = Counter(int(record.results.get("schema", 1)) for record in view.analysis.records)
    for version, count in sorted(versions.items()):
        if version < WITH_GROUPS:
            found.append(Notice("version", words("notice.no_groups", version=version, count=count)))
    for change in view.analysis.changes:
        said = words(
            "notice.change",
            name=change["key"],
            old=str(change["from"]),
            new=str(change["to"]),
            count=change["measured_runs"],
        )
        found.append(Notice("changed", said))
    found += [Notice("run", text) for text in _of_runs(view)]
    first = ("void", "unevaluated", "failed", "changed", "chance", "trivial", "rate")
    order = (*first, "unfinished", "mixture", "version", "run")
    return sorted(found, key=lambda notice: order.index(notice.kind))


def _failures(view: View, group: Group) -> Iterable[Notice]:
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    name = view.words.name
    for arm in group.arms.values():
        for failure in arm.failures:
            run = run_name(view, failure.method, failure.lr, failure.seed)
            how = name("failure", failure.kind) if failure.kind else name("status", failure.status)
            by_reason[how, failure.reason].append(run)
    for (status, reason), runs in by_reason.items():
        yield Notice(
            "failed",
            view.words(
                "notice.failure",
                task=view.label(group),
                status=status,
                runs=_some(view, runs),
                reason=reason or view.words("notice.no_reason"),
            ),
        )


def run_name(view: View, method: str, lr: float, seed: int) -> str:
    return view.words("notice.run_name", method=method, rate=numbers.learning_rate(lr), seed=seed)


def _unevaluated(view: View, group: Group) -> Iterable[Notice]:
    """The trials that say nothing yet: what is concluded about their methods must wait for them."""
    cells = [cell for arm in group.arms.values() for cell in arm.unevaluated]
    if cells:
        runs = _some(view, [run_name(view, cell.method, cell.lr, cell.seed) for cell in cells])
        text = view.words("notice.never_evaluated", task=view.label(group), runs=runs)
        yield Notice("unevaluated", text)


def _some(view: View, names: list[str]) -> str:
    shown = view.words("list.semicolon").join(names[:MOST_RUNS])
    rest = len(names) - MOST_RUNS
    return view.words("list.more", names=shown, count=rest) if rest > 0 else shown


def _of_group(view: View, group: Group) -> Iterable[Notice]:
    words, label = view.words, view.label(group)
    # What holds for several methods alike is said once.
    alike: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[str]] = defaultdict(list)
    for arm in group.arms.values():
        for kind, key, details in _of_arm(view, group, arm):
            alike[kind, key, tuple(details.items())].append(arm.method)
    for (kind, key, values), methods in alike.items():
        text = words(f"notice.{key}", task=label, method=words.items(methods), **dict(values))
        yield Notice(kind, text)
    if missing := _missing(group):
        yield Notice("unfinished", words("notice.missing", task=label, count=missing))


def _of_arm(view: View, group: Group, arm: ArmResult) -> Iterable[tuple[str, str, dict[str, str]]]:
    """Kind of notice, its text and the values in it, the method's name aside."""
    words = view.words
    if arm.at_chance:
        yield "chance", "at_chance", {"seeds": words.items(map(str, arm.at_chance))}
    if behind := group.behind(arm):
        yield "trivial", "behind", {"names": words.items(words.name("trivial", name) for name in behind)}
    if arm.records and not arm.chosen:
        rates = map(numbers.learning_rate, sorted({record.lr for record in arm.records}))
        yield "rate", "not_chosen", {"rate": words.items(rates)}
    if group.matrix and arm.method in group.matrix.at_edge:
        yield "rate", "at_edge", {"rate": numbers.learning_rate(arm.lr)}
    if group.matrix and arm.method in group.matrix.failed:
        yield "rate", "no_rate", {}


def _missing(group: Group) -> int:
    """Runs that the study needs, as far as it can be known, and that have not ended."""
    if group.matrix is None:
        return 0
    ended = {Cell(r.method, r.lr, r.seed, r.choosing) for r in group.records if r.completed}
    ended |= {
        Cell(f.method, f.lr, f.seed, choosing)
        for arm in group.arms.values()
        for f in arm.failures
        if f.of_method
        for choosing in (True, False)
    }
    return len([cell for cell in group.matrix.needed if cell not in ended])


def _of_runs(view: View) -> Iterable[str]:
    """The warnings of the runs themselves: equal ones are one line, whatever their numbers, with a count."""
    for group in view.analysis.groups:
        by_shape: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
        for record in group.records:
            for text in dict.fromkeys(map(str, record.results.get("warnings") or [])):
                by_shape[tuple(NUMBER.split(text))].append(NUMBER.findall(text))
        for words_between, occurrences in by_shape.items():
            yield view.words(
                "notice.of_runs",
                task=view.label(group),
                text=view.words.recorded(_joined(words_between, occurrences)),
                count=len(occurrences),
            )


def _joined(between: tuple[str, ...], occurrences: list[list[str]]) -> str:
    """One text for warnings that differ in their numbers only: each number, or the range of it."""
    text = between[0]
    for after, values in zip(between[1:], zip(*occurrences, strict=True), strict=True):
        low, high = min(values, key=float), max(values, key=float)
        text += (low if low == high else f"{low}–{high}") + after
    return text
