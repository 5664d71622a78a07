"""`oelm data`: list, inspect and prepare datasets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from oelm.cli import options, show
from oelm.system.terminal import say
from oelm.training.request import normalized_options

app = typer.Typer(no_args_is_help=True, help="List, inspect and prepare datasets.")

Name = Annotated[str, typer.Argument(help="A task (`oelm data list`) or a CSV, TSV, JSONL or Parquet file.")]
SplitSeed = Annotated[int, typer.Option(help="Decides which rows of a file are held out.")]
HoldOut = Annotated[bool, typer.Option(help="Take validation rows out of train where there is no split.")]


@app.command("list")
def list_tasks(as_json: options.AsJson = False) -> None:
    """The tasks known by name. Example: oelm data list"""
    from oelm.data.catalogue import TASKS

    if as_json:
        say(json.dumps([asdict(task) for task in TASKS.values()], indent=1))
        return
    for task in TASKS.values():
        hub = task.hub.path + (f" ({task.hub.config})" if task.hub.config else "") if task.hub else "-"
        say(f"{task.name:<14} {task.kind:<21} {task.metric:<15} {hub}")


@app.command()
@options.takes(given=options.DATA)
def inspect(
    name: Name,
    given: dict[str, Any],
    split_seed: SplitSeed = 0,
    hold_out: HoldOut = True,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Class balance, lengths, truncation, duplicates.

    Examples: oelm data inspect my.csv --text body --label topic;
    oelm data inspect pairs.csv --text article --target summary
    """
    from oelm.data import TASKS, Choice
    from oelm.data.checks import describe, render

    choice = Choice(name, **normalized_options(given), split_seed=split_seed, hold_out=hold_out)
    store = choice.store(show_progress=not as_json)
    report = describe(store)
    say(json.dumps(report, indent=1, ensure_ascii=False) if as_json else render(report))
    if not as_json:
        option = "--task" if name in TASKS else "--data"
        say(f"next     {show.command('train', option, name)}, or oelm study, with the same options")


@app.command()
@options.takes(given=options.DATA)
def prepare(
    name: Name,
    given: dict[str, Any],
    split_seed: SplitSeed = 0,
    hold_out: HoldOut = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Also copy the prepared dataset to this new folder.", callback=options.new_folder),
    ] = None,
    bins: Annotated[
        Path | None, typer.Option(help="Also write a corpus here as train.bin, val.bin and test.bin.")
    ] = None,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Tokenise once and print the folder that training can use, here or on another machine.

    Example: oelm data prepare imdb --tokenizer gpt2 --max-length 512
    """
    from oelm.data import Choice
    from oelm.data.catalogue import TASKS
    from oelm.data.token_bins import check_bins, write_bins
    from oelm.data.writer import copy_store

    choice = Choice(name, **normalized_options(given), split_seed=split_seed, hold_out=hold_out)
    if bins is not None and name in TASKS:  # before the minutes that tokenising takes
        check_bins(name, TASKS[name].kind, bins)
    store = choice.store(show_progress=not as_json)
    if bins is not None:
        write_bins(store, bins)
    if out is not None:
        store = copy_store(store, out, choice.named())
    for warning in store.warnings:
        say(f"warning: {warning}", err=True)
    warnings = [warning.to_dict() for warning in store.warnings]
    answer = {"folder": str(store.folder), "fingerprint": store.fingerprint, "warnings": warnings}
    say(json.dumps(answer, ensure_ascii=False) if as_json else store.folder)
    if not as_json:
        say(f"next: {show.command('train', '--data', store.folder)}", err=True)
