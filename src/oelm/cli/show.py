"""What verbs print at their end: results as lines and tables, where everything is, and what to do next."""

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
    measured = results["test"] or results["best"]  # without a test, what validation says
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
    """A complete study's results, and what to do with any; empty where the folder is no study."""
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
    """The command that goes on with a study or, of a finished one, that uses its best model; empty where it
    has none."""
    from oelm.study.analysis import unfinished
    from oelm.study.kept_models import kept_models
    from oelm.training.predictions import is_published

    if any(is_published(record.folder) for record in analysis.records[:1]):  # nobody goes on with these
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
    """The command that uses a saved model, a study's or a run's, which is named by its `path`."""
    from oelm.data.tasks import task_kind

    config = model / "config.json"
    kind = read_object(config).get("task_kind") if config.is_file() else None
    if kind and task_kind(kind).reader is None:
        return command("generate", path, "Once upon a time")
    return command("predict", path, "texts.txt")


def command(*words: str | Path) -> str:
    """A command of ours as it is typed in a shell, whatever characters its paths hold."""
    return shlex.join(["oelm", *map(str, words)])


def _published(theirs: dict[str, Any]) -> list[str]:
    """The published figures of an experiment beside those of a run that repeats it."""
    from oelm.study.report.numbers import figure

    keys = ", ".join(theirs["differs_in"])
    how = f"differs from the published recipe in: {keys}" if keys else "an exact repeat"
    rows = {name: (figure(row["published"]), figure(row["here"])) for name, row in theirs["beside"].items()}
    lines = [f"  {name:<23} {a:>14} {b:>14}" for name, (a, b) in {"": ("published", "here"), **rows}.items()]
    return [f"{theirs['experiment']}: {how}", *lines]


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
    if asked := answer.get("zero_shot"):
        scores = asked["metrics"] | asked["references"]
        metrics = [name for name in next(iter(scores.values())) if name != "confusion"]
        head = ("score", *(word("metric", name) for name in metrics))
        named = {score: score for score in asked["metrics"]}  # "mean" is a trivial baseline's name, too
        named |= {score: word("trivial", score) for score in asked["references"]}
        rows = [(named[score], *(of[name] for name in metrics)) for score, of in scores.items()]
        parts.append(f"zero-shot on {asked['task']}: {asked['items']:,} items\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _measured(answer: dict[str, Any], metrics: dict[str, Any], labels: Sequence[str]) -> str:
    single = [(word("metric", name), value) for name, value in metrics.items() if name != "confusion"]
    text = f"{answer['task']}, {answer['split']}: {answer['items']:,} items\n{_table(('', ''), single)}"
    if "confusion" not in metrics:
        return text
    confusion, rows = metrics["confusion"], []
    for i, name in enumerate(labels):
        right, items, said = confusion[i][i], sum(confusion[i]), sum(row[i] for row in confusion)
        f1 = 2 * right / (items + said) if items + said else 0.0
        rows.append((name, items, right / said if said else None, right / items if items else None, f1))
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
