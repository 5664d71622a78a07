"""Builds a report's document from an analysis: the sections and their content."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable

from oelm.claims.data import claim_data
from oelm.claims.verdicts import Verdict, judge
from oelm.config import to_toml
from oelm.study.design import title_in
from oelm.study.report import figures, numbers, tables
from oelm.study.report.answer import answer
from oelm.study.report.document import Block, Bullets, Code, Document, Paragraph, Table, make_table, with_note
from oelm.study.report.notices import Listed, notices
from oelm.study.report.training import training
from oelm.study.report.view import View, task_name
from oelm.study.result_types import Group
from oelm.system.messages import named


def build(view: View, folder: str) -> Document:
    """The whole report; sections without content are left out."""
    words, analysis = view.words, view.analysis
    listed = notices(view)
    sections: dict[str, list[Block]] = {
        "results": _results(view),
        "learning_rates": _learning_rates(view),
        "certainty": with_note([tables.certainty(view)], words("section.certainty_note")),
        "across": with_note([tables.across(view)] if analysis.across else [], words("section.across_note")),
        "claims": _claims(view),
        "cost": with_note(_per_group(view, tables.cost), words("section.cost_note")),
        "training": _training(view),
        "raw": _raw(view),
        "warnings": _warnings(view, listed),
        "repeat": _repeat(view, folder),
    }
    names = {
        "methods": words.items(map(named, view.colours)),
        "tasks": words.items(dict.fromkeys(map(task_name, analysis.groups))),
        "models": words.items(dict.fromkeys(group.model for group in analysis.groups)),
    }
    return Document(
        title=words("page.title", title=title_in(words.lang, analysis.title)),
        subtitle=words("page.subtitle", runs=len(analysis.records), **names),
        badges=tables.badges(view),
        answer=answer(view),
        alert=words("page.alert", count=len(listed)) if listed else "",
        sections={key: blocks for key, blocks in sections.items() if blocks},
    )


def _results(view: View) -> list[Block]:
    groups = view.analysis.groups
    kinds = dict.fromkeys(group.kind for group in groups)
    forests = [figures.forest(view, kind) for kind in kinds]
    note = view.words("section.results_note")
    if "perplexity" in kinds:
        note += " " + view.words("section.results_perplexity")
    return with_note([*forests, *(tables.results(view, group) for group in groups)], note)


def _learning_rates(view: View) -> list[Block]:
    drawn = with_note([figures.learning_rates(view), figures.curves(view)])
    tried = any(group.tried_lrs for group in view.analysis.groups)
    note = view.words("section.learning_rates_note" if tried else "section.area_note")
    return [*drawn, *with_note(_per_group(view, tables.learning_rates), note)]


def _per_group(view: View, make: Callable[[View, Group], Table | None]) -> list[Table | None]:
    return [make(view, group) for group in view.analysis.groups]


def _training(view: View) -> list[Block]:
    blocks = training(view)
    return with_note([figures.histories(view), *blocks]) if blocks else []


def _raw(view: View) -> list[Block]:
    blocks = with_note(_per_group(view, tables.raw))
    if blocks:
        metrics = view.words.items(dict.fromkeys(view.metric(group) for group in view.analysis.groups))
        blocks.insert(0, Paragraph(view.words("section.raw_note", metrics=metrics), tone="note"))
    return blocks


def _warnings(view: View, listed: list[Listed]) -> list[Block]:
    if not listed:
        return [Paragraph(view.words("section.none"))]
    blocks: list[Block] = []
    for kind in dict.fromkeys(entry.kind for entry in listed):
        items = [entry.text for entry in listed if entry.kind == kind]
        blocks += [Paragraph(view.words(f"notice.{kind}"), tone="heading"), Bullets(items)]
    return blocks


def _claims(view: View) -> list[Block]:
    """The published claims that these records are about; the others in one line."""
    words, judged = view.words, judge([view.analysis])
    blocks = [block for verdict in judged if verdict.details for block in _claim(view, verdict)]
    rest = [verdict.id for verdict in judged if not verdict.details]
    if blocks and rest:
        blocks.append(Paragraph(words("claim.rest", ids=words.items(rest)), tone="note"))
    return blocks


def _claim(view: View, verdict: Verdict) -> list[Block]:
    words, zh = view.words, view.words.lang == "zh"
    name = claim_data()["verdicts"][verdict.verdict][zh]
    blocks: list[Block] = [Paragraph(words("claim.heading", id=verdict.id, verdict=name), tone="heading")]
    blocks.append(Paragraph(verdict.claim_zh if zh else verdict.claim))
    if verdict.number is not None:
        measured = numbers.significant(verdict.number, 3)
        if verdict.interval is not None:
            digits = numbers.digits_for(*verdict.interval)
            measured = numbers.fixed(verdict.number, digits)
            ends = words.range(*(numbers.fixed(end, digits) for end in verdict.interval))
            is_ratio = verdict.unit == "ratio"  # those that near-ties allow
            measured = view.with_detail(
                measured, ends if is_ratio else words("claim.interval", interval=ends)
            )
        if verdict.unit:
            measured = words("unit.amount", amount=measured, unit=claim_data()["units"][verdict.unit][zh])
        blocks.append(Paragraph(words("claim.also", number=measured, n=verdict.n), tone="note"))
    reason = numbers.with_minus(verdict.reason_zh if zh else verdict.reason)
    return [*blocks, Paragraph(reason, tone="note")]


def _repeat(view: View, folder: str) -> list[Block]:
    """Commands, configuration, versions, hardware, data; `folder` is the folder of the report."""
    words, study = view.words, view.analysis.study
    blocks: list[Block] = []
    if study is not None:
        commands = "oelm study study.toml --out again\noelm report again"
        blocks += [
            Paragraph(words("repeat.study")),
            Code(commands),
            Code(to_toml(study.as_written()), "study.toml"),
        ]
    else:
        blocks.append(Paragraph(words("repeat.runs")))
        for group in view.analysis.groups:
            if not (records := group.records):
                continue
            config = shlex.quote(str(records[0].folder / "config.toml"))
            blocks.append(Code(f"oelm train --config {config} --out runs/again", view.label(group)))
            blocks.append(Code(to_toml(records[0].config.to_dict()), "config.toml"))
        blocks.append(Code(f"oelm report {shlex.quote(folder)}"))
    blocks.append(_environment(view))
    return blocks


def _environment(view: View) -> Table:
    """Versions, hardware and data; several values each with its number of runs."""
    words = view.words
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for record in view.analysis.records:
        for key, value in record.made_with.items():
            seen[words.name("recorded", key)][value] += 1
        if data := record.environment.get("data"):
            seen[words("repeat.data", task=record.task)][str(data)] += 1
    rows = []
    for name, counts in seen.items():
        texts = [words("repeat.of_runs", value=text, count=count) for text, count in counts.most_common()]
        rows.append([name, words.items(texts if len(counts) > 1 else counts)])
    return make_table([words("repeat.what"), words("repeat.value")], rows, left=(0, 1))
