"""The verb explain: what the heads of trained models attend to."""

import json
from pathlib import Path
from typing import Annotated

import typer

from oelm.cli import options
from oelm.cli.predict import RunOrStudy, note
from oelm.errors import UserError
from oelm.system.files import write_text
from oelm.system.terminal import say


def explain(
    run: RunOrStudy,
    other: Annotated[Path | None, typer.Argument(metavar="[RUN2]", help="Another, to compare with.")] = None,
    texts: Annotated[int, typer.Option(help="How many texts are read.")] = 32,
    split: Annotated[str, typer.Option(help="A split of the run's dataset.")] = "test",
    lines: Annotated[
        Path | None, typer.Option(help="Read the lines of this file in place of the run's dataset.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML page; default: RUN's explain.html.")] = None,
    lang: options.Lang = "en",
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """What each head attends to, the scale of its scores, the rank of its block: heat maps, or JSON.

    Examples: oelm explain runs/x; oelm explain runs/baseline runs/oelm --out heads.html
    """
    from oelm.inference.attention_page import attention_page
    from oelm.inference.attention_sample import explain_model
    from oelm.inference.attention_statistics import differences
    from oelm.inference.predictor import open_trained
    from oelm.study.report.view import Words

    Words(lang)  # refuses a language that does not exist
    if out is not None and not out.parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.parent}; create it first")
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; name a file")
    if out is not None and as_json:
        raise UserError("--out writes a page and --json prints JSON; keep one: --json > FILE writes that")
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: the page is HTML; name a file that ends in .html, or --json > FILE")
    folders = [run] if other is None else [run, other]
    if other is not None and run.resolve() == other.resolve():
        raise UserError(f"{run} is named twice: there is nothing to compare")
    statistics = {
        str(folder): explain_model(open_trained(folder, note), texts, split, lines) for folder in folders
    }
    shapes = [[(h.attention, h.layer, h.head) for h in one.heads] for one in statistics.values()]
    if shapes[0] != shapes[-1]:
        raise UserError(f"{run} and {other} have different layers or heads: explain them one at a time")
    if as_json:
        answer = {name: one.to_dict() for name, one in statistics.items()}
        more = {"difference": differences(*statistics.values())} if other is not None else {}
        say(json.dumps(answer | more))
        return
    page = out or run / "explain.html"
    write_text(page, attention_page(statistics, lang))
    for name, one in statistics.items():
        for text in one.notes:
            note(f"{name}: {text}")
    say(f"page     {page}")
