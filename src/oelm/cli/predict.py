"""The verbs of a trained model that answers or writes: predict, generate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from oelm.cli import options
from oelm.config import TABLES
from oelm.errors import UserError
from oelm.system.startup import without_collection
from oelm.system.terminal import say

app = typer.Typer()

RunOrStudy = Annotated[
    Path, typer.Argument(help="A run's folder, a saved model's, or a study's: its best model by validation.")
]


def note(text: str) -> None:
    say(text, err=True)


def watched(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, counted on standard error while they come."""
    from oelm.system.progress import Display

    with contextlib.closing(Display("predicting", None, 0, True, "row")) as display:
        for number, row in enumerate(rows, 1):
            display.advance(number)
            yield row


@app.command()
def predict(
    run: RunOrStudy,
    file: Annotated[
        Path,
        typer.Argument(help="A CSV, TSV, JSONL or Parquet file, or one text per line; - is standard input."),
    ] = Path("-"),
    text: Annotated[str | None, typer.Option(help="Column of the text; default: that of training.")] = None,
    text_pair: Annotated[
        str | None, typer.Option(help="Column of the second text; default: as above.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column to compare; default: that of training.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write .csv, .tsv, .jsonl or .parquet; default: JSONL on standard output."),
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Labels, numbers, tags, answers or targets for the rows of a file, or for lines. Pairs: text, tab, text.

    Examples: oelm predict runs/x mails.csv --text body --out p.csv; echo 'a fine film' | oelm predict runs/x
    """
    with without_collection():
        from oelm.data.table_writer import as_json, check_new_table, write_table
        from oelm.inference import tables
        from oelm.inference.prediction import open_lines
        from oelm.inference.predictor import open_trained

    if out is not None:
        check_new_table(out)
    is_table = file.suffix.lower() in TABLES
    if not is_table and (text or text_pair or label):
        raise UserError(f"--text, --text-pair and --label name columns, and {file} is read line by line")
    table = None
    trained = open_trained(run, note)
    if is_table:
        table = tables.Table(trained, file, text, text_pair, label)
        rows, names, schema = table.predict(note), table.names, getattr(table.source, "schema", None)
    else:
        rows, names, schema = trained.predict(open_lines(file), note), [], None
    if out is None:
        for row in rows:
            say(as_json(row))
    else:
        count = write_table(out, watched(rows), names, schema and schema())
        note(f"{out}: {count:,} rows")
    if table is None or table.reader.compared is None:
        return
    if compared := str(table.agreement):
        note(compared)
    elif out is not None:
        note("next     --label COLUMN compares the answers with a column of labels")


@app.command()
def generate(
    run: RunOrStudy,
    prompt: Annotated[str, typer.Argument(help="How the text begins.")] = "",
    tokens: options.Tokens = 100,
    temperature: options.Temperature = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(help="Same seed, same text.", callback=options.seed_in_64_bits)] = 0,
    plugin: options.Plugin = None,
) -> None:
    """Continue a prompt with a language model, or write a target for it with an encoder-decoder.

    Example: oelm generate runs/x 'Once upon a time'
    """
    with without_collection():
        from oelm.inference.predictor import open_trained

    trained = open_trained(run, note)
    written = trained.generate(prompt, tokens, temperature, top_k, seed)
    say(written if trained.writes else prompt + written)
