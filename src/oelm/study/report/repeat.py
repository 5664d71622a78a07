"""How to repeat what a report shows: commands, configuration, versions, hardware, data."""

import shlex
from collections import Counter

from oelm.config import to_toml
from oelm.study.report.document import Block, Code, Paragraph, Table, make_table
from oelm.study.report.view import View


def repeat(view: View, folder: str) -> list[Block]:
    """The blocks of the last section; `folder` is the folder of the report."""
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
    """Versions, hardware and data; several values each with its number of runs."""
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
    for name, counts in seen.items():
        texts = [words("repeat.of_runs", value=text, count=count) for text, count in counts.most_common()]
        rows.append([name, words.items(texts if len(counts) > 1 else counts)])
    return make_table([words("repeat.what"), words("repeat.value")], rows, left=(0, 1))
