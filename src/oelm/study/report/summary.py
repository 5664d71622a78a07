"""The shorter forms of a report: text of 80 columns for a terminal, and JSON values for programs."""

import io
import json
from dataclasses import asdict
from typing import Any

from rich.console import Group as RichGroup
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oelm.claims.verdicts import judge
from oelm.study.history import arm_histories
from oelm.study.records import Record, mean_of
from oelm.study.report import tables
from oelm.study.report.answer import answer
from oelm.study.report.document import TableCell
from oelm.study.report.notices import notices
from oelm.study.report.view import View, Words
from oelm.study.result_types import Analysis, ArmResult, Comparison, Group
from oelm.system.terminal import console

WIDTH = 80
LONGEST_WORD = 30  # characters of a word in a method's name that are kept on one line


def summary(analysis: Analysis, lang: str = "en", width: int = WIDTH) -> str:
    """The table of results of every setting, and the answer in two sentences. Plain text without colour, so
    that it is the same in a terminal, a pipe and a log."""
    view = View(analysis, Words(lang))
    file = io.StringIO()
    screen = console(file=file, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    for group in analysis.groups:
        results = tables.results(view, group, most_keys=1)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=None)
        longest_words = [max(map(len, row[0].text.split()), default=0) for row in results.rows]
        widths = [min(LONGEST_WORD, max(longest_words, default=0)), *[None] * (len(results.head) - 1)]
        for name, letter, least in zip(results.head, results.align, widths, strict=True):
            table.add_column(
                Text(name), justify="left" if letter == "l" else "right", overflow="fold", min_width=least
            )
        for row in results.rows:
            table.add_row(*map(_cell, row))
        screen.print(Text(view.words.items([view.label(group), group.model])), table, "", sep="\n")
    listed = notices(view)
    sentences = [*answer(view), *(entry.text for entry in listed if entry.kind == "unevaluated")]
    if listed:
        sentences.append(view.words("page.alert", count=len(listed)))
    for sentence in sentences:
        screen.print(Text(sentence))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _cell(cell: TableCell) -> RichGroup | Text:
    """The text, and its detail below, indented."""
    return RichGroup(cell.text, Padding(cell.detail, (0, 0, 0, 2))) if cell.detail else Text(cell.text)


def as_plain(analysis: Analysis, lang: str = "en") -> dict[str, Any]:
    """Arms, comparisons, claims and warnings as JSON values; a number that is not finite is null."""
    view = View(analysis, Words(lang))
    values: dict[str, Any] = {
        "title": analysis.title,
        "answer": answer(view),
        "settings": [_group(view, group) for group in analysis.groups],
        "comparisons": [_comparison(view, comparison) for comparison in analysis.comparisons],
        "across": analysis.across,
        "claims": [verdict for verdict in judge([analysis]) if verdict.details],
        "warnings": notices(view),
        "mixtures": analysis.mixtures,
        "left_out": analysis.left_out,
    }
    # Whatever is no JSON value is one of our dataclasses.
    plain: dict[str, Any] = json.loads(json.dumps(values, default=asdict), parse_constant=lambda name: None)
    return plain


def _picked(source: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _group(view: View, group: Group) -> dict[str, Any]:
    return {
        "label": view.label(group),
        **_picked(group, "task", "model", "metric", "precision"),
        "reference": group.reference_arm,
        "references": group.trivial_baselines,
        "published": {
            experiment.id: {"value": value, "split": experiment.published.get("split")}
            | {"differs_in": view.differs(experiment, group)}
            for experiment, value in view.published(group)
        },
        "arms": [_arm(group, arm) for arm in group.arms.values()],
        "training": [arm.to_plain() for arm in arm_histories(group)],
    }


def _arm(group: Group, arm: ArmResult) -> dict[str, Any]:
    runs = arm.finished or arm.trials
    return {
        **_picked(arm, "method", "lr", "chosen", "seeds", "interval", "at_chance"),
        "test": arm.values,
        "bits_per_byte": mean_of(arm.records, "test", "metrics", "bits_per_byte"),
        "rates": [{"lr": lr, "validation": score} for lr, score in arm.lr_scores.items()],
        "robustness": group.robustness(arm),
        "expected_best": arm.expected_best(group.larger_is_better),
        "area": arm.area(),
        "behind": group.behind(arm),
        "collapsed": group.collapses(arm),
        "near_ties": [
            {"lr": lr, "seeds": [r.seed for r in runs], "test": [r.test for r in runs]}
            for lr, runs in arm.near_ties.items()
        ],
        "unevaluated": [{"lr": cell.lr, "seed": cell.seed} for cell in arm.unevaluated],
        "failures": [_failure(record) for record in arm.failures],
        "parameters": runs[0].results.get("parameters") if runs else None,
        "step_time_s": arm.step_time(),
        "train_time_s": mean_of(arm.finished, "train_time_s"),
        "peak_memory_bytes": mean_of(arm.finished, "peak_memory_bytes"),
    }


def _failure(record: Record) -> dict[str, Any]:
    kind = record.failure_kind
    status = {"status": "failed" if kind else "interrupted", "kind": kind, "reason": record.reason}
    return _picked(record, "method", "lr", "seed") | status


def _comparison(view: View, comparison: Comparison) -> dict[str, Any]:
    tests = ("combined", "by_seeds", "by_items", "margin", "p_holm", "margin_p_holm")
    verdict = ("verdict", "small_difference", "collapsed", "problems")
    overall, combined, group = comparison.overall, comparison.combined, comparison.group
    return {
        "setting": view.label(group),
        "overall": asdict(overall) | {"share_items": overall.share_items} if overall else None,
        "unit": "points" if group.kind == "share" else "100 * log ratio",
        # By how much lower a perplexity is than the reference arm's.
        "percent": _picked(group.shown_interval(combined), "mean", "low", "high")
        if combined and group.kind != "share"
        else None,
        "metric": group.metric,
        **_picked(comparison, "method", "reference", "seeds", "differences", *tests, *verdict),
    }
