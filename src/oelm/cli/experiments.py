"""`oelm experiments`: the catalogue of published experiments."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from textwrap import TextWrapper, fill
from typing import Annotated, Any

import typer

from oelm.cli import options
from oelm.cli.options import option, takes
from oelm.config import to_toml
from oelm.errors import UserError
from oelm.study.catalogue import Experiment, clock, differences, get_experiment, list_experiments
from oelm.system.files import read_object
from oelm.system.terminal import say

WIDTH = 100  # columns of the table without a terminal
ITEM = TextWrapper(80, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
RECIPE = "Recipe, and where it comes from: a report, only the group's scripts, or us"


CHECK = {
    "steps": option(int, "Of --check: steps of each; default: 3, on a GPU 200.", min=1),
    "data_dir": option(str, "Of --check: folder of NAME/SPLIT.parquet; else data is made up."),
    "shrink": option(bool, "Of --check: small models, short texts.", "--shrink"),
}


@takes(settings=CHECK)
def experiments(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Show these in full.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the first steps of these, or of all, and time them.")
    ] = False,
    settings: dict[str, Any],
    record: Annotated[Path | None, typer.Option(help="Of --check: write the record here.")] = None,
    read: Annotated[Path | None, typer.Option(help="Print the table of a record of --check.")] = None,
    gpu: options.Gpu = None,
    as_json: options.AsJson = False,
) -> None:
    """The published experiments, what was reported for them, and whether they run here.

    Examples: oelm experiments GPT-02; oelm experiments --check GPT-02 XNLI-02 --record check.json
    """
    if not check and (settings or record):
        raise UserError("--steps, --data-dir, --shrink and --record belong to --check")
    if read is not None:
        from oelm.study.check import render_table

        say(render_table(read_object(read), read))
        return
    chosen = [get_experiment(id) for id in ids or ()] or list_experiments()
    if check:
        _check(chosen, settings, record, as_json)
    elif as_json:
        values = [asdict(experiment) for experiment in chosen]
        if ids:
            values = [v | {"records": _records(e)} for v, e in zip(values, chosen, strict=True)]
        say(_json(values[0] if ids and len(ids) == 1 else values))
    elif ids:
        say("\n\n".join(map(_render, chosen)))
    else:
        _print_table(chosen)


def _check(chosen: list[Experiment], settings: dict[str, Any], record: Path | None, as_json: bool) -> None:
    from oelm.study.check import check_experiments

    if record is not None and not record.parent.is_dir():
        raise UserError(f"{record}: there is no folder {record.parent}; create it first")
    done = check_experiments(chosen, **settings, say=lambda text: say(text, err=as_json), file=record)
    if as_json:
        say(_json(done))
    if any(entry["status"] != "ok" for entry in done["experiments"]):
        raise typer.Exit(1)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def _print_table(catalogue: list[Experiment]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("ID", "task", "model", "method", "lr", "length", "published", "time"):
        number = name in ("lr", "length", "published", "time")
        wraps = name in ("task", "model", "method")  # a narrow terminal breaks these; nothing is cut
        table.add_column(name, justify="right" if number else "left", no_wrap=not wraps, overflow="fold")
    for experiment in catalogue:
        config = experiment.config
        training = config["training"]
        table.add_row(
            experiment.id,
            config["task"]["name"],
            config["model"]["name"],
            config["method"]["name"],
            _rate(training["lr"]),
            f"{training['epochs']} epochs" if "epochs" in training else f"{training['steps'] // 1000}k",
            _headline(experiment.published),
            clock(experiment.published.get("time_s")),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    console.print("Length in steps unless it says epochs. Published: single runs, targets and not results.")
    for experiment in catalogue:
        if experiment.variant_of:
            console.print(_variant(experiment))
    first = catalogue[0].id
    console.print(
        f"next     oelm experiments {first} (recipe and figures); oelm train {first}", highlight=False
    )


def _variant(experiment: Experiment) -> str:
    return f"{experiment.id} is a variant of {experiment.variant_of}, not a published experiment of its own."


def _rate(lr: float) -> str:
    """The learning rate as 3e-4, not 0.0003 or 3e-04."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _headline(published: dict[str, Any]) -> str:
    if "best_accuracy" in published:
        return f"{100 * published['best_accuracy']:.2f} %"
    return f"PPL {published['perplexity']:.2f}"


def _render(experiment: Experiment) -> str:
    published = dict(experiment.published)
    histories = {key: published.pop(key) for key in list(published) if key.endswith("history")}
    counts, notes = published.pop("parameters"), published.pop("notes")
    figures = published | {f"parameters.{key}": count for key, count in counts.items()}
    width = max(map(len, figures))
    lines = [fill(f"{experiment.id}: {experiment.title}", 80)]
    if experiment.variant_of:
        lines.append(fill(_variant(experiment), 80))
    lines += ["", RECIPE, "", *_recipe(experiment), "", "Published"]
    lines += [f"  {key:<{width}}  {_figure(key, value)}" for key, value in figures.items()]
    for key, points in histories.items():
        cells = [f"{step:>8,} {value:.4f}" for step, value in points]
        rows = ["  " + "  ".join(cells[i : i + 4]) for i in range(0, len(cells), 4)]
        lines += ["", f"Validation {key.removesuffix('history').strip('_') or 'loss'} by step", *rows]
    for heading, texts in (("Habits", experiment.habits), ("Notes", notes)):
        lines += ["", heading, *(ITEM.fill(text) for text in texts)]
    if records := _records(experiment):
        lines += ["", "Records here", *map(_record_line, records)]
    lines += ["", "Run it", f"  oelm train {experiment.id} --out runs/{experiment.id}"]
    if experiment.config["training"]["choose_on"] == "test":
        lines.append(f"  oelm train {experiment.id} --fair  # validation held out, tested once")
    return "\n".join(lines)


def _records(experiment: Experiment) -> list[dict[str, Any]]:
    """The finished runs below runs/ and results/ that repeat the experiment or have its task, model and
    method. Runs of one folder and learning rate are one entry, with their number and means."""
    from oelm.study.records import find_records

    alike: dict[tuple[Any, ...], list[Any]] = {}
    recipe = [experiment.config[table]["name"] for table in ("task", "model", "method")]
    for root in (Path("runs"), Path("results")):
        for record in find_records(root, []) if root.is_dir() else ():
            repeats = record.config.experiment == experiment.id
            same_recipe = (
                record.test is not None and [record.task, record.config.model.name, record.method] == recipe
            )
            if record.best is not None and (repeats or same_recipe):
                key = (record.folder,) if repeats else (record.folder.parent, record.lr)
                alike.setdefault(key, []).append(record)
    entries = []
    for (folder, *_), runs in alike.items():
        entry: dict[str, Any] = {"folder": str(folder), "runs": len(runs), "lr": runs[0].lr}
        entry |= {"metric": runs[0].metric, "split": runs[0].results["best"]["split"]}
        entry |= {
            "best": fmean(r.best for r in runs),
            "time_s": fmean(r.results["total_time_s"] for r in runs),
        }
        entry["test"] = fmean(r.test for r in runs) if all(r.test is not None for r in runs) else None
        entries.append(entry | {"differs_in": differences(experiment, runs[0].config, runs[0].results)})
    return entries


def _record_line(entry: dict[str, Any]) -> str:
    how = f"differs in {', '.join(entry['differs_in'])}" if entry["differs_in"] else "an exact repeat"
    runs = f", mean of {entry['runs']} runs" if entry["runs"] > 1 else ""
    scores = [f"{entry['split']} {entry['metric']} {entry['best']:.4g}"]
    if entry["test"] is not None and entry["split"] != "test":
        scores.append(f"test {entry['test']:.4g}")
    return ITEM.fill(f"{entry['folder']}: {', '.join(scores)}{runs}, {clock(entry['time_s'])}; {how}")


def _recipe(experiment: Experiment) -> list[str]:
    """The config as TOML, with the source of every key as a comment beside it."""
    source_of = {key: source for source, keys in experiment.sources.items() for key in keys}
    text = to_toml(experiment.config).splitlines()
    width, section, lines = max(map(len, text)), "", []
    for line in text:
        section = line.strip("[]") if line.startswith("[") else section
        source = source_of.get(f"{section}.{line.partition(' ')[0]}")
        lines.append(f"{line:<{width}}  # {source}" if source else line)
    return lines


def _figure(key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} ({clock(value)})" if key.endswith("time_s") else text
