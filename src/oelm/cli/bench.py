"""The verb bench: speed and memory on this machine, against peers."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from oelm.cli.options import as_list, option, seconds_of, takes
from oelm.errors import UserError
from oelm.system.terminal import say

# Settings that finish in minutes on two cores of a laptop, and that keep a large GPU busy.
ON_CPU: dict[str, Any] = {"max_length": 128, "tokens_per_step": 1024, "steps": 10, "rounds": 3}
ON_GPU: dict[str, Any] = {"max_length": 512, "tokens_per_step": 65536, "steps": 100, "rounds": 5}


def _default(name: str) -> str:
    return f"Default: {ON_CPU[name]}, on a GPU {ON_GPU[name]}."


SETTINGS = {
    "work": option(
        str, "classification, lm, freezing, all of these; or large, or pretrained.", default="all"
    ),
    "size": option(str, "gpt-tiny, gpt-medium-512, ...; a model's folder for freezing and pretrained."),
    "data": option(list[str], "A prepared folder (oelm data prepare); may be repeated."),
    "batch_size": option(int, "Texts in a step of classification and pretrained.", default=16, min=1),
    "tokens_per_step": option(
        int, f"Tokens in a step of lm, freezing and large. {_default('tokens_per_step')}", min=1
    ),
    "steps": option(
        int, f"Steps of a timed window; a fifth as many for large steps. {_default('steps')}", min=1
    ),
    "rounds": option(int, f"Timed windows of each arm, interleaved. {_default('rounds')}", min=1),
    "max_length": option(
        int, f"Longest window or synthetic text, in tokens. {_default('max_length')}", min=1
    ),
    "vocab_size": option(int, "Vocabulary of synthetic texts, without --data.", default=50257, min=3),
    "leave_out": option(str, "Arms to leave out, with commas.", default=""),
    "compile": option(bool, "Compile peers; default: on a GPU.", "--compile/--no-compile"),
    "stop_after": option(str, "Start nothing new after 90s, 9m or 2h."),
}


@takes(given=SETTINGS)
def bench(
    given: dict[str, Any],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.")] = None,
    read: Annotated[Path | None, typer.Option(help="Show a record instead of measuring.")] = None,
) -> None:
    """Measure our training step and its peers' on this machine, interleaved, as ratios.

    Examples: oelm bench; oelm bench --work classification --data imdb --size gpt-medium-512 --json b.json;
    oelm bench --read b.json --chart b.svg
    """
    from oelm.bench.show import draw_chart, print_record, read_record

    if read is not None and json_file is not None:
        raise UserError("--read shows an existing record and --json writes a new one; keep one of them")
    if chart is not None and chart.suffix != ".svg":
        raise UserError(f"--chart {chart}: charts are SVG; name a file that ends in .svg")
    for path in (json_file, chart):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; create it first")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
    if chart is not None and find_spec("matplotlib") is None:
        raise UserError("--chart needs matplotlib: pip install matplotlib, or keep the record with --json")
    record = measured(given, json_file) if read is None else read_record(read)
    if chart is not None:
        draw_chart(record, chart)
    print_record(record)


def measured(given: dict[str, Any], json_file: Path | None) -> dict[str, Any]:
    """Run the benchmark, with the machine's defaults for options that were not given."""
    from oelm.bench.cases import WORKS, Settings
    from oelm.bench.run import run_bench
    from oelm.models.build import default_model
    from oelm.training.parallel import process_state

    device = process_state().device
    gpu = device.type == "cuda"
    values = (ON_GPU if gpu else ON_CPU) | {"size": default_model(device), "compile": gpu} | given
    values |= {"data": tuple(values.get("data", ())), "leave_out": tuple(as_list(values["leave_out"]))}
    values["work"] = WORKS if values["work"] == "all" else tuple(as_list(values["work"]))
    values["stop_after"] = seconds_of(values.get("stop_after"))
    return run_bench(Settings(**values), device, lambda text: say(text, err=True), json_file)
