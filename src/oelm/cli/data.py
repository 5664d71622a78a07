"""`oelm data`: list, inspect and prepare data sets."""

import json
from pathlib import Path
from typing import Annotated

import typer

from oelm.cli.options import AsJson, MaxTargetLength, Target, new_folder
from oelm.system.terminal import say

app = typer.Typer(no_args_is_help=True, help="List, inspect and prepare data sets.")

Name = Annotated[str, typer.Argument(help="A task (`oelm data list`) or a CSV, TSV, JSONL or Parquet file.")]
Text = Annotated[str, typer.Option("--text", help="Column of the text (a file's).")]
TextPair = Annotated[str | None, typer.Option("--text-pair", help="Column of the second text (a file's).")]
Label = Annotated[str, typer.Option("--label", help="Column of the label (a file's).")]
TestFile = Annotated[Path | None, typer.Option("--test-file", help="A file of test rows.")]
TrainSize = Annotated[int | None, typer.Option("--train-size", help="Train on so many rows, stratified.")]
SplitSeed = Annotated[int, typer.Option("--split-seed", help="Decides which rows of a file are held out.")]
TrainOn = Annotated[str | None, typer.Option("--train-on", help="xnli: mnli or snli+mnli.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of NAME/SPLIT.parquet; no network.")]
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", help="gpt2, a hub id, a folder, or train:8192 (a file's default)."),
]
MaxLength = Annotated[int, typer.Option("--max-length", help="Longer texts are cut.")]


@app.command("list")
def list_tasks(as_json: AsJson = False) -> None:
    """The tasks known by name. Example: oelm data list"""
    from dataclasses import asdict

    from oelm.data.catalogue import TASKS

    if as_json:
        say(json.dumps([asdict(task) for task in TASKS.values()], indent=1))
        return
    for task in TASKS.values():
        hub = task.hub.path + (f" ({task.hub.config})" if task.hub.config else "") if task.hub else "-"
        tried = "" if task.tried_on_hub or not task.hub else ", not tried on the hub"
        say(f"{task.name:<14} {task.kind:<21} {task.metric:<15} {hub}{tried}")


@app.command()
def inspect(
    name: Name,
    text: Text = "text",
    text_pair: TextPair = None,
    label: Label = "label",
    target: Target = None,
    test_file: TestFile = None,
    train_size: TrainSize = None,
    split_seed: SplitSeed = 0,
    train_on: TrainOn = None,
    data_dir: DataDir = None,
    tokenizer: TokenizerName = None,
    max_length: MaxLength = 512,
    max_target_length: MaxTargetLength = None,
    as_json: AsJson = False,
) -> None:
    """Class balance, lengths, truncation, duplicates.

    Examples: oelm data inspect my.csv --text body --label topic;
    oelm data inspect pairs.csv --text article --target summary
    """
    from oelm.data import Choice
    from oelm.data.checks import describe, render

    choice = Choice(
        name,
        text,
        text_pair,
        label,
        test_file,
        train_size,
        split_seed,
        train_on,
        data_dir,
        tokenizer,
        max_length,
        target,
        max_target_length,
    )
    store = choice.store(show_progress=not as_json)
    report = describe(store)
    say(json.dumps(report, indent=1, ensure_ascii=False) if as_json else render(report))


@app.command()
def prepare(
    name: Name,
    text: Text = "text",
    text_pair: TextPair = None,
    label: Label = "label",
    target: Target = None,
    test_file: TestFile = None,
    train_size: TrainSize = None,
    split_seed: SplitSeed = 0,
    train_on: TrainOn = None,
    data_dir: DataDir = None,
    tokenizer: TokenizerName = None,
    max_length: MaxLength = 512,
    max_target_length: MaxTargetLength = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also copy the prepared folder here.", callback=new_folder)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise once and print the folder that training can use, here or on another machine.

    Example: oelm data prepare imdb --tokenizer gpt2 --max-length 512
    """
    from oelm.data import Choice
    from oelm.data.writer import copy_store

    choice = Choice(
        name,
        text,
        text_pair,
        label,
        test_file,
        train_size,
        split_seed,
        train_on,
        data_dir,
        tokenizer,
        max_length,
        target,
        max_target_length,
    )
    store = choice.store(show_progress=not as_json)
    if out is not None:
        store = copy_store(store, out)
    for warning in store.warnings:
        say(f"warning: {warning}", err=True)
    warnings = [warning.to_dict() for warning in store.warnings]
    answer = {"folder": str(store.folder), "fingerprint": store.fingerprint, "warnings": warnings}
    say(json.dumps(answer, ensure_ascii=False) if as_json else store.folder)
