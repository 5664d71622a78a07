"""The verb `convert`: a checkpoint in, a converted checkpoint out."""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from oelm.cli import options as options
from oelm.errors import UserError
from oelm.system.terminal import say

SAMPLE_TEXTS, SAMPLE_TOKENS = 32, 128  # enough for a standard deviation, and soon done


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a hub id.")],
    out: Annotated[Path, typer.Option(help="The new checkpoint's folder.", callback=options.new_folder)],
    method: Annotated[str, typer.Option(help="oelm, oelm-polar, frozen, ...: docs/methods.md.")] = "oelm",
    seed: Annotated[int, typer.Option(help="Decides what is drawn.")] = 0,
    sample: Annotated[
        Path | None, typer.Option(help="Texts, one a line, to measure the scale of the scores on.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the tokenizer is, if not with the model.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A field: method.gain=own")] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Print every head.")] = False,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Convert a checkpoint and save it, its task's head as it is, as an ordinary one of its family.

    Example: oelm convert bert-base-uncased --method oelm --out bert-oelm
    """
    from oelm.convert import convert as convert_model
    from oelm.data.tokenizer import load_tokenizer
    from oelm.models.folder import check_new_folder, model_card, short_name, write_model
    from oelm.models.pretrained import check_checkpoint, load_as_saved
    from oelm.training.lineage import model_folder as run_model

    check_new_folder(out)
    chosen = _method(method, set_ or [])
    texts = _lines(sample) if sample is not None else None
    model = run_model(model)
    check_checkpoint(model)
    words = load_tokenizer(tokenizer or model)
    loaded = load_as_saved(model)
    rows = int(loaded.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if len(words) > rows:
        raise UserError(
            f"the tokenizer of {tokenizer or model} has {len(words):,} tokens, but the model knows {rows:,}; "
            "name its own with --tokenizer"
        )
    report = convert_model(
        loaded, chosen, seed=seed, sample=_batch(words, texts) if texts is not None else None
    )
    title = f"{short_name(model)}, converted by `{report.method}`"
    card = model_card(title, loaded, report, model, [UNTRAINED])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_model(out, loaded, words, card)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}; name another folder") from None
    if as_json:
        say(json.dumps(report.to_dict()))
        return
    say(f"{report}\n\n{report.head_table()}" if heads else str(report))
    say(f"saved in {out}")


UNTRAINED = "It was converted and not trained since: expect little of it before it is fine-tuned."


def _method(name: str, assignments: list[str]) -> Any:
    from oelm.config import from_assignment, make_config, update
    from oelm.method import Method

    values: dict[str, Any] = {"method": {"name": name}}
    for assignment in assignments:
        update(values, from_assignment(assignment))
    if set(values) != {"method"}:
        raise UserError("oelm convert --set knows the keys of [method] only, for example method.init=fresh")
    return Method.from_dict(make_config(values, "options").method.overrides())


def _lines(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [*islice((line.strip() for line in file if line.strip()), SAMPLE_TEXTS)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--sample {path} cannot be read: {error}") from None
    if not lines:
        raise UserError(f"--sample {path} holds no text")
    return lines


def _batch(tokenizer: Any, texts: list[str]) -> dict[str, Any]:
    import torch

    from oelm.data.tokenizer import pad_id

    rows = tokenizer(texts, truncation=True, max_length=SAMPLE_TOKENS)["input_ids"]
    rows = [row for row in rows if row]
    if not rows:
        raise UserError("the sample has no token: give it more text")
    real = torch.arange(max(map(len, rows))) < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.full(real.shape, pad_id(tokenizer))
    ids[real] = torch.tensor([token for row in rows for token in row])
    return {"input_ids": ids, "attention_mask": real.long()}
