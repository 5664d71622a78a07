"""The verb `convert`: convert a checkpoint and save it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli import options, show
from oelm.config import make_config, overrides
from oelm.errors import UserError
from oelm.system.terminal import say

if TYPE_CHECKING:
    from oelm.method import Method


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The new checkpoint's folder.", callback=options.new_folder)],
    method: Annotated[str, typer.Option(help="oelm, oelm-polar, frozen, ...: docs/methods.md.")] = "oelm",
    seed: Annotated[int, typer.Option(help="Seed of drawn blocks.", callback=options.seed_in_64_bits)] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer, if it is not in the model's folder.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field: method.gain=own")] = None,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Convert a checkpoint and save it as an ordinary one of its family; its task's head stays as it is.

    Example: oelm convert bert-base-uncased --method oelm --out bert-oelm
    """
    from oelm.models.folder import convert_checkpoint
    from oelm.models.starts import is_study, model_folder

    if is_study(Path(model)):
        raise UserError(f"{model} is a study; name one of the models in {model}/runs")
    chosen = _method(method, set_ or [])
    report = convert_checkpoint(model_folder(model), chosen, out, seed, tokenizer)
    if as_json:
        say(json.dumps(report.to_dict()))
        return
    say(str(report))
    say(f"saved in {out}")
    train = show.command("train", "--model", out, "--method", "frozen", "--data", "my.csv")
    say(show.next_line(train, f"in Python: oelm.load({str(out)!r})"))


def _method(name: str, assignments: list[str]) -> "Method":
    from oelm.method import Method

    values = overrides({"method.name": name}, assignments)
    if set(values) != {"method"}:
        raise UserError("oelm convert --set takes keys of [method] only, for example method.init=fresh")
    return Method.from_dict(make_config(values, "options").method.overrides())
