"""The warnings of a report, each once, the most serious kinds first."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oelm.study.matrix import Cell
from oelm.study.record_checks import is_number
from oelm.study.report.answer import problems
from oelm.study.report.numbers import NOTHING
from oelm.study.report.view import View
from oelm.study.result_types import ArmResult, Group
from oelm.system.messages import Notice, Span, named, notice, text_of

ORDER = (
    "void", "unevaluated", "failed", "changed", "collapsed", "chance", "trivial", "rate", "unfinished",
    "mixture", "run",
)  # fmt: skip

# Codes of notices of which a run may have one for each split.
OF_SPLITS = ("data.truncated", "data.targets_truncated", "training.behind_baseline")


@dataclass(frozen=True)
class Listed:
    """A notice of a report; `kind` is the heading it stands under, see `[notice]` in the words."""

    kind: str
    notice: Notice
    text: str


def notices(view: View) -> list[Listed]:
    """All warnings of an analysis, grouped by kind."""
    ordered = sorted(_notices(view), key=lambda entry: ORDER.index(entry[0]))
    return [Listed(kind, entry, text_of(entry, view.words.lang)) for kind, entry in ordered]


def _notices(view: View) -> Iterable[tuple[str, Notice]]:
    """The kind of each notice, and the notice."""
    analysis = view.analysis
    for c in analysis.comparisons:
        if c.problems:
            task = view.label(c.group)
            yield "void", notice("study.void", task=task, method=c.method, reasons=problems(view, c))
    for group in analysis.groups:
        missing = [name for name in (analysis.study.arms if analysis.study else ()) if name not in group.arms]
        if missing:
            yield "unfinished", notice("study.no_runs", task=view.label(group), methods=missing)
        # No conclusion about these methods is possible before their trials are evaluated.
        if runs := [_run(cell) for arm in group.arms.values() for cell in arm.unevaluated]:
            yield "unevaluated", notice("study.unevaluated", task=view.label(group), runs=runs)
        yield from _failures(view, group)
        yield from _of_group(view, group)
        yield from _of_runs(view, group)
    for name, values in analysis.mixtures.items():
        yield "mixture", notice("study.mixed", what=name, values=values)
    if analysis.left_out:
        yield "mixture", notice("study.left_out", count=analysis.left_out)
    if analysis.copies:
        yield "mixture", notice("study.copies", count=analysis.copies)
    if analysis.remade:
        yield "mixture", notice("study.remade", count=analysis.remade)
    if analysis.unused:
        yield "mixture", notice("study.unused", count=analysis.unused)
    for problem in analysis.damaged:
        yield "mixture", notice("study.damaged", problem=problem)
    for change in analysis.changes:
        old, new = (_value_text(view, change[side]) for side in ("from", "to"))
        yield "changed", notice("study.changed", key=change["key"], old=old, new=new)
    yield from _other_verdicts(view)
    if analysis.unplanned:
        yield "changed", notice("study.unplanned")


def _value_text(view: View, value: Any) -> str:
    """A value of a study's table as its file has it; an arm with settings by its name."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        arms = (v.get("arm", v.get("name")) if isinstance(v, dict) else v for v in value)
        value = view.words.items(named(str(arm)) for arm in arms)
    return NOTHING if value in (None, "") else str(value)


def _other_verdicts(view: View) -> Iterable[tuple[str, Notice]]:
    """Verdicts that the changed plan would have given."""
    after = view.analysis.changed.comparisons if view.analysis.changed else []
    for c in after:
        pair = (c.group.setting, c.method, c.reference)
        before = [b for b in view.analysis.comparisons if (b.group.setting, b.method, b.reference) == pair]
        old = before[0].verdict if before else "none"
        if old != c.verdict:
            names = {"method": c.method, "reference": c.reference, "task": c.group.task}
            yield "changed", notice("study.other_verdict", **names, old=view.words.name("verdict", old),
                                    new=view.words.name("verdict", c.verdict))  # fmt: skip


def _failures(view: View, group: Group) -> Iterable[tuple[str, Notice]]:
    """Failed and interrupted runs, grouped by their reason."""
    alike: dict[str, list[Any]] = defaultdict(list)
    for arm in group.arms.values():
        for record in arm.failures:
            reason = record.reason or notice("study.no_reason")
            alike[f"{record.failure_kind} {_shape(reason)}"].append((record, reason))
    for several in alike.values():
        runs = [_run(record.cell) for record, _ in several]
        values = {"task": view.label(group), "runs": runs, "reason": _merged([r for _, r in several])}
        if kind := several[0][0].failure_kind:
            yield "failed", notice("study.failed", kind=kind, **values)
        else:
            yield "failed", notice("study.interrupted", **values)


def _run(cell: Cell) -> Notice:
    return notice("study.run", method=cell.method, lr=cell.lr, seed=cell.seed)


def _of_group(view: View, group: Group) -> Iterable[tuple[str, Notice]]:
    alike: dict[str, tuple[str, Notice, list[str]]] = {}  # notice -> kind, notice, methods it holds for
    for arm in group.arms.values():
        for kind, entry in _of_arm(group, arm):
            alike.setdefault(json.dumps(entry.to_dict()), (kind, entry, []))[2].append(arm.method)
    for kind, entry, methods in alike.values():
        yield kind, Notice(entry.code, {"task": view.label(group), "methods": methods, **entry.values})
    ended = {r.cell for r in group.records if r.completed}
    ended |= {r.cell for arm in group.arms.values() for r in arm.failures if r.failed_by_method}
    needed = group.matrix.needed if group.matrix else []  # as far as it can be known
    if count := len([cell for cell in needed if cell not in ended]):
        yield "unfinished", notice("study.unfinished", task=view.label(group), count=count)


def _of_arm(group: Group, arm: ArmResult) -> Iterable[tuple[str, Notice]]:
    """The notices of one arm; `_of_group` adds the names of task and method."""
    if arm.at_chance:
        yield "chance", notice("study.at_chance", seeds=list(arm.at_chance))
    for runs in arm.by_lr:
        lost = {run.seed: run.results["test"]["baseline"] for run in runs if run.stand_in}
        if fallen := [seed for seed in group.collapsed(runs) if seed not in lost]:
            yield "collapsed", notice("study.collapsed", lr=runs[0].lr, seeds=fallen)
        if lost:
            name = next(iter(lost.values()))
            yield "collapsed", notice("study.stand_in", lr=runs[0].lr, seeds=list(lost), name=name)
    if behind := group.behind(arm):
        yield "trivial", notice("study.behind_baseline", names=list(behind))
    if arm.records and not arm.chosen:
        yield "rate", notice("study.lr_not_chosen", lrs=sorted({record.lr for record in arm.records}))
    if group.matrix and arm.method in group.matrix.at_edge:
        yield "rate", notice("study.lr_at_edge", lr=arm.lr)
    if group.matrix and arm.method in group.matrix.failed:
        yield "rate", notice("study.no_lr")


def _of_runs(view: View, group: Group) -> Iterable[tuple[str, Notice]]:
    """The warnings of the runs themselves: those that differ only in numbers are merged, with a count."""
    alike: dict[str, list[Notice]] = defaultdict(list)
    runs: dict[str, set[Cell]] = defaultdict(set)
    reported = {name for arm in group.arms.values() for name in group.behind(arm)}
    for record in group.records:
        for warning in record.warnings:
            # Baselines that beat a method's mean are reported for the method already.
            if warning.code != "training.behind_baseline" or warning.values.get("name") not in reported:
                alike[_shape(warning)].append(warning)
                runs[_shape(warning)].add(record.cell)
    texts = []  # warnings of old records, which are plain texts: one notice for all of them
    for shape, several in alike.items():
        values = {"warning": _merged(several), "count": len(runs[shape])}
        if several[0].code == "text" and len(several) < len(group.records):
            texts.append(notice("study.text_of_runs", **values))
        else:
            yield "run", notice("study.of_runs", task=view.label(group), **values)
    if texts:
        yield "run", notice("study.texts_of_runs", task=view.label(group), texts=texts)


def _shape(entry: Notice) -> str:
    """A key for notices that are equal but for their numbers and, in OF_SPLITS, the split."""
    ignored = ("split",) if entry.code in OF_SPLITS else ()
    values = {k: "<any>" if is_number(v) or k in ignored else v for k, v in entry.values.items()}
    return json.dumps(Notice(entry.code, values).to_dict(), sort_keys=True)


def _merged(several: list[Notice]) -> Notice:
    """One notice for several of one shape: a number that differs becomes its range."""
    values = dict(several[0].values)
    for key, value in values.items():
        seen = [entry.values[key] for entry in several]
        if is_number(value) and min(seen) != max(seen):
            values[key] = Span(min(seen), max(seen))
        elif key == "split" and len(set(map(str, seen))) > 1:
            values[key] = list(dict.fromkeys(seen))
    return Notice(several[0].code, values)
