"""Options that several verbs share: one wording for each."""

from pathlib import Path
from typing import Annotated

import typer

from oelm.system.files import check_name
from oelm.system.plugins import load_plugins


def load(plugins: list[str] | None) -> list[str] | None:
    """Callback of every --plugin: what a plugin adds is known before any other option is looked at."""
    load_plugins(plugins or ())
    return plugins


def new_folder(path: Path | None) -> Path | None:
    """Callback of every --out: a name that cannot be used is refused before any work is done."""
    if path is not None:
        check_name(path)
    return path


Data = Annotated[str | None, typer.Option(help="Your own CSV, TSV, JSONL or Parquet, or prepared data.")]
Text = Annotated[str | None, typer.Option(help="Column of the text.")]
TextPair = Annotated[str | None, typer.Option(help="Column of the second text.")]
Label = Annotated[str | None, typer.Option(help="Column of the label.")]
Target = Annotated[str | None, typer.Option(help="Column of a text to be written for the text (T5, BART).")]
TestFile = Annotated[str | None, typer.Option(help="A file of test rows.")]
TrainSize = Annotated[int | None, typer.Option(help="Train on so many rows.")]
TrainOn = Annotated[str | None, typer.Option(help="xnli: mnli or snli+mnli.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a text or window; longer ones are cut.")]
MaxTargetLength = Annotated[int | None, typer.Option(help="Tokens of a target; default: --max-length.")]
Tokenizer = Annotated[str | None, typer.Option(help="gpt2, a hub id, a folder, or train:8192.")]
DataDir = Annotated[str | None, typer.Option(help="Folder of NAME/SPLIT.parquet; no network.")]
Model = Annotated[str | None, typer.Option(help="gpt-tiny, gpt-medium-512, ..., a hub id, a folder.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the training data.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.")]
BatchSize = Annotated[int | None, typer.Option(help="Texts or windows in a batch.")]
BatchTokens = Annotated[int | None, typer.Option(help="Tokens in a batch, instead of texts.")]
Precision = Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")]
StopAfter = Annotated[str | None, typer.Option(help="Save and leave after 90s, 9m or 2h; resumable.")]
Kind = Annotated[str | None, typer.Option(help="Of the task: classification, regression, ...")]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        help="A module with task kinds, families, methods or launchers: docs/extending.md.",
        callback=load,
        is_eager=True,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
