"""The output of verbs at their end: results as lines and tables, the folders, and the next commands."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.errors import UserError
from oelm.system.files import read_object
from oelm.system.messages import fill, read_notice
from oelm.system.terminal import columns

if TYPE_CHECKING:
    from oelm.study.result_types import Analysis


def word(section: str, name: str) -> str:
    """The English word for a name in records, such as "macro F1" for f1_macro."""
    return fill(f"{{name:{section}}}", {"name": name}, "en")


def trained(results: dict[str, Any], folder: Path) -> str:
    """A finished run: its score beside those of the trivial baselines, notes, folders, next commands."""
    metric = results["metric"]
    chosen = "the last one" if results["chosen_on"] == "last" else f"chosen on {results['best']['split']}"
    measured = results["test"] or results["best"]  # without a test, the best evaluation
    split = measured["split"]
    lines = [
        f"{results['method']} on {results['task']}: {split} {word('metric', metric)} "
        f"{measured['metrics'][metric]:.4f} (step {measured['step']:,} of {results['steps']:,}, {chosen})"
    ]
    for name, splits in results["references"].items():
        if metric in splits.get(split, {}):
            lines.append(f"  {word('trivial', name)}: {splits[split][metric]:.4f}")
    lines += [f"  note: {read_notice(warning)}" for warning in results["warnings"]]
    if "published" in results:
        lines += _published(results["published"])
    lines.append(f"run      {folder}")
    if (model := folder / "model").is_dir():
        lines += [f"model    {model}", f"next     {use_of(folder, model)}; {command('report', folder)}"]
    return "\n".join(lines)


def study(folder: Path) -> str:
    """A complete study's results and the next commands; empty if the folder is not a study."""
    from oelm.models.starts import is_study
    from oelm.study.analysis import analyse, unfinished
    from oelm.study.report.summary import WIDTH, summary

    if not is_study(folder):
        return ""
    try:
        analysis = analyse(folder)
    except UserError as error:  # nothing is measured yet
        return str(error)
    go_on = after_study(folder, analysis)
    if unfinished(analysis):  # as oelm study, which prints its results at its end
        text = "test figures are shown when the study is complete, so that nobody stops by them"
        return "\n".join(filter(None, (text, go_on and next_line(go_on))))
    text = summary(analysis, width=columns(WIDTH))
    return f"{text}\n\n{next_line(go_on, command('report', folder))}"


def after_study(folder: Path, analysis: "Analysis") -> str:
    """The command that continues a study or, for a finished one, uses its best model; empty if it has
    none."""
    from oelm.study.analysis import unfinished
    from oelm.study.kept_models import kept_models
    from oelm.training.predictions import is_published

    if any(is_published(record.folder) for record in analysis.records[:1]):  # published records are final
        return ""
    if unfinished(analysis):
        return f"{command('study', '--out', folder)} (goes on with it)"
    try:
        models = kept_models(folder)
    except UserError as error:
        return str(error)
    if not models:
        return ""
    several = len({model.task for model in models}) > 1
    return use_of(models[0].run if several else folder, models[0].run / "model")


def next_line(*commands: str) -> str:
    return f"next     {'; '.join(filter(None, commands))}"


def use_of(path: Path, model: Path) -> str:
    """The command that uses a saved `model`; `path` is the run or study by which the command names it."""
    from oelm.data.tasks import task_kind

    config = model / "config.json"
    kind = read_object(config).get("task_kind") if config.is_file() else None
    if kind and task_kind(kind).reader is None:
        return command("generate", path, "Once upon a time")
    return command("predict", path, "texts.txt")


def command(*words: str | Path) -> str:
    """An oelm command, quoted for a shell."""
    return shlex.join(["oelm", *map(str, words)])


def _published(comparison: dict[str, Any]) -> list[str]:
    """The published figures of an experiment, and those of a run that repeats it."""
    from oelm.system.progress import figure

    keys = ", ".join(comparison["differs_in"])
    how = f"differs from the published recipe in: {keys}" if keys else "an exact repeat"
    figures = comparison["beside"]
    rows = {name: (figure(row["published"]), figure(row["here"])) for name, row in figures.items()}
    lines = [f"  {name:<23} {a:>14} {b:>14}" for name, (a, b) in {"": ("published", "here"), **rows}.items()]
    return [f"{comparison['experiment']}: {how}", *lines]


def evaluated(answer: dict[str, Any]) -> str:
    """The answer of `oelm evaluate` as tables; classes by their names."""
    parts = []
    if "metrics" in answer:
        parts.append(_measured(answer, answer["metrics"], answer.get("labels") or []))
    if generation := answer.get("generation"):
        sides = ("generated", "held_out")
        rows = [(name, *(pair[side] for side in sides)) for name, pair in generation["measures"].items()]
        given = f"{generation['prompts']:,} {generation['prompts_are']} continued"
        parts.append(f"{given}\n{_table(('', 'generated', 'held-out'), rows)}")
    if zero_shot := answer.get("zero_shot"):
        scores = zero_shot["metrics"] | zero_shot["references"]
        metrics = [name for name in next(iter(scores.values())) if name != "confusion"]
        head = ("score", *(word("metric", name) for name in metrics))
        named = {score: score for score in zero_shot["metrics"]}  # "mean" is a trivial baseline's name, too
        named |= {score: word("trivial", score) for score in zero_shot["references"]}
        rows = [(named[score], *(of[name] for name in metrics)) for score, of in scores.items()]
        parts.append(f"zero-shot on {zero_shot['task']}: {zero_shot['items']:,} items\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _measured(answer: dict[str, Any], metrics: dict[str, Any], labels: Sequence[str]) -> str:
    single = [(word("metric", name), value) for name, value in metrics.items() if name != "confusion"]
    text = f"{answer['task']}, {answer['split']}: {answer['items']:,} items\n{_table(('', ''), single)}"
    if "confusion" not in metrics:
        return text
    confusion, rows = metrics["confusion"], []
    for i, name in enumerate(labels):
        right, items, predicted = confusion[i][i], sum(confusion[i]), sum(row[i] for row in confusion)
        f1 = 2 * right / (items + predicted) if items + predicted else 0.0
        precision, recall = right / predicted if predicted else None, right / items if items else None
        rows.append((name, items, precision, recall, f1))
    return f"{text}\n\n{_table(('class', 'items', 'precision', 'recall', 'F1'), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain columns: the first to the left, numbers to the right."""
    cells = [[_figure(value) for value in row] for row in rows]
    cells = [list(head), *cells] if any(head) else cells
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) if at == 0 else text.rjust(width) for at, (text, width) in
                  enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )  # fmt: skip


def _figure(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
