"""The verb `convert`: a checkpoint in, a converted checkpoint out."""

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli import options
from oelm.errors import UserError
from oelm.system.terminal import say

if TYPE_CHECKING:
    from oelm.method import Method

SAMPLE_TEXTS = 32  # enough for a standard deviation, and fast


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The new checkpoint's folder.", callback=options.new_folder)],
    method: Annotated[str, typer.Option(help="oelm, oelm-polar, frozen, ...: docs/methods.md.")] = "oelm",
    seed: Annotated[int, typer.Option(help="Seed of drawn blocks.")] = 0,
    sample: Annotated[
        Path | None, typer.Option(help="Texts, one per line, to measure attention scores on.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer, if it is not in the model's folder.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field: method.gain=own")] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Print every head.")] = False,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Convert a checkpoint and save it as an ordinary one of its family; its task's head stays as it is.

    Example: oelm convert bert-base-uncased --method oelm --out bert-oelm
    """
    from oelm.models.folder import convert_checkpoint
    from oelm.training.lineage import model_folder

    chosen = _method(method, set_ or [])
    texts = _lines(sample) if sample is not None else None
    report = convert_checkpoint(model_folder(model), chosen, out, seed, tokenizer, texts)
    if as_json:
        say(json.dumps(report.to_dict()))
        return
    say(f"{report}\n\n{report.head_table()}" if heads else str(report))
    say(f"saved in {out}")


def _method(name: str, assignments: list[str]) -> "Method":
    from oelm.config import make_config, overrides
    from oelm.method import Method

    values = overrides({"method.name": name}, assignments)
    if set(values) != {"method"}:
        raise UserError("oelm convert --set takes keys of [method] only, for example method.init=fresh")
    return Method.from_dict(make_config(values, "options").method.overrides())


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [*islice((line.strip() for line in file if line.strip()), SAMPLE_TEXTS)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--sample {path} cannot be read: {error}") from None
    if not lines:
        raise UserError(f"--sample {path} holds no text; write one text per line")
    return lines
