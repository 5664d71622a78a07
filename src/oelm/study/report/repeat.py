"""How to repeat what a report shows: commands, configuration, versions, hardware, data."""

import shlex
from collections import Counter

from oelm.config import to_toml
from oelm.study.report.document import Block, Cell, Code, Paragraph, Table
from oelm.study.report.view import View


def repeat(view: View, folder: str) -> list[Block]:
    """The blocks of the last section; `folder` is the name of what was reported on."""
    words, study = view.words, view.analysis.study
    blocks: list[Block] = []
    if study is not None:
        commands = "oelm study study.toml --out again\noelm report again"
        blocks += [Paragraph(words("repeat.study")), Code(commands), Code(study.to_toml(), "study.toml")]
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
    """Versions, hardware and data, each value with the number of runs that had it."""
    words = view.words
    seen: dict[str, Counter[str]] = {}
    for record in view.analysis.records:
        environment = record.environment
        entries = {
            "oelm": environment.get("oelm"),
            words("repeat.commit"): environment.get("commit"),
            words("repeat.numerics"): environment.get("numerics"),
            "Python": environment.get("python"),
            **environment.get("packages", {}),
            words("repeat.platform"): environment.get("platform"),
            words("repeat.hardware"): environment.get("gpu") or environment.get("cpu"),
            words("repeat.precision"): record.results.get("precision"),
            words("repeat.data", task=record.task): environment.get("data"),
        }
        for name, value in entries.items():
            if value is not None:  # older records lack some
                seen.setdefault(name, Counter())[str(value)] += 1
    rows = []
    for name, values in seen.items():
        alone = len(values) == 1
        texts = [
            text if alone else words("repeat.of_runs", value=text, count=count)
            for text, count in values.most_common()
        ]
        rows.append([Cell(name), Cell(words.items(texts))])
    return Table([words("repeat.what"), words("repeat.value")], rows, "ll")
