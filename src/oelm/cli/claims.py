"""The verb claims: verdicts on the published claims."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oelm.cli import options
from oelm.errors import UserError
from oelm.system.terminal import console, say

if TYPE_CHECKING:
    from oelm.claims.collect import Collection
    from oelm.claims.verdicts import Verdict


def claims(
    paths: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Studies, runs, records of oelm bench --json.")
    ],
    lang: options.Lang = "en",
    as_json: options.AsJson = False,
    page: Annotated[
        Path | None, typer.Option(help="Write all that was found as a page with pictures: findings.md.")
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Judge the published claims C1 to C10 on any number of studies, runs and benchmark records together.

    Folders are searched for all three. Examples: oelm claims studies benchmarks;
    oelm claims studies/imdb bench.json --json
    """
    from oelm.claims.collect import collect
    from oelm.claims.data import claim_data
    from oelm.claims.verdicts import judge
    from oelm.study.report.view import Words

    Words(lang)  # refuses a language that does not exist
    collection = collect(paths)
    verdicts = judge(collection.analyses, collection.benchmarks)
    if page is not None:
        from oelm.claims.findings import write_page

        if page.suffix != ".md" or not page.parent.is_dir():
            raise UserError(f"--page {page}: name a file that ends in .md in a folder that exists")
        write_page(page, collection, verdicts)
    if as_json:
        rules = claim_data()["rules"] | {"date": claim_data()["rules"]["date"].isoformat()}
        answer = {"rules": rules, "runs": collection.ages, "left_out": collection.left_out}
        answer["studies"] = [analysis.title for analysis in collection.analyses]
        answer["benchmarks"] = [benchmark.name for benchmark in collection.benchmarks]
        answer["claims"] = [asdict(verdict) for verdict in verdicts]
        say(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    show(collection, verdicts, lang)


def show(given: "Collection", verdicts: "list[Verdict]", lang: str) -> None:
    """Print the number of studies, runs and benchmarks, then each claim with its verdict, number and reason,
    in 80 columns."""
    from rich.padding import Padding
    from rich.text import Text

    from oelm.claims.data import claim_data, sentence
    from oelm.claims.verdicts import measured

    language = ("en", "zh").index(lang)
    rules, ages = claim_data()["rules"], given.ages
    counts = {"studies": len(given.analyses), "benchmarks": len(given.benchmarks), "runs": sum(ages.values())}
    screen = console(width=80, highlight=False, markup=False, emoji=False)
    dated = rules | {"date": f"{rules['date']:%Y-%m-%d}"}
    screen.print(Text(sentence("judged", **dated, **counts, **ages)[language]))
    for problem in given.left_out:
        screen.print(Text(sentence("left_out", problem=problem)[language]))
    for verdict in verdicts:
        head = f"\n{verdict.id:<4}{claim_data()['verdicts'][verdict.verdict][language]}"
        if verdict.number is not None:
            head += f"   {measured(verdict, '..', language)}   n = {verdict.n}"
        screen.print(Text(head))
        screen.print(Padding(Text(verdict.why_zh if language else verdict.why), (0, 0, 0, 4)))
