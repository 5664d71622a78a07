"""The verb bench: speed and memory on this machine, against peers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Annotated, Any

import typer

from oelm.cli.options import seconds_of
from oelm.errors import UserError
from oelm.system.terminal import say

# What a laptop's two cores get through in some minutes, and what a large GPU needs to be busy.
ON_CPU: dict[str, Any] = {
    "max_length": 128,
    "tokens_per_step": 1024,
    "steps": 10,
    "rounds": 3,
    "lengths": "64,128,256",
}
ON_GPU: dict[str, Any] = {
    "max_length": 512,
    "tokens_per_step": 65536,
    "steps": 100,
    "rounds": 5,
    "lengths": "512,1024,2048,4096",
}


def bench(
    work: Annotated[str, typer.Option(help="classification, lm, freezing, lengths, or all.")] = "all",
    size: Annotated[str | None, typer.Option(help="gpt-tiny, gpt-medium-512, ...")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="A prepared folder (oelm data prepare); may be repeated.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a step of classification.")] = 16,
    tokens_per_step: Annotated[int | None, typer.Option(help="Tokens in a step of all other work.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a window; of large steps a fifth as many.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Windows of each arm, in turns.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a window and of made texts, at most.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Text lengths of --work lengths, with commas.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Of made texts, where no data is given.")] = 50257,
    leave_out: Annotated[str | None, typer.Option(help="Arms not to run, with commas.")] = None,
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile peers; default: on a GPU.")
    ] = None,
    rest: Annotated[
        float,
        typer.Option(
            help="Seconds without work before each window: a GPU's full clock, not its power limit."
        ),
    ] = 0.0,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Say which kernels a step's time goes to.")
    ] = False,
    stop_after: Annotated[str | None, typer.Option(help="Start nothing new after 90s, 9m or 2h.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw the ratios here, as SVG.")] = None,
    read: Annotated[Path | None, typer.Option(help="Show a record instead of measuring.")] = None,
) -> None:
    """Measure our training step and its peers' on this machine, interleaved, as ratios.

    Examples: oelm bench; oelm bench --work classification --data imdb --size gpt-medium-512 --json b.json;
    oelm bench --read b.json --chart b.svg
    """
    from oelm.bench.show import draw_chart, print_record, read_record

    given = locals()
    if read is not None and json_file is not None:
        raise UserError("--read shows a record that is there; --json is for one that is measured")
    if chart is not None and chart.suffix != ".svg":
        raise UserError(f"--chart {chart}: charts are SVG; name a file that ends in .svg")
    for path in (json_file, chart):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
    if chart is not None and find_spec("matplotlib") is None:
        raise UserError(
            "--chart needs matplotlib; without it, keep the record with --json and --read it elsewhere"
        )
    stopped = Event()
    with _first_interrupt(stopped):
        record = measured(given, json_file, stopped) if read is None else read_record(read)
    if chart is not None:
        draw_chart(record, chart)
    print_record(record)
    if stopped.is_set():
        raise typer.Exit(130)


@contextmanager
def _first_interrupt(stopped: Event) -> Iterator[None]:
    """Let the first Ctrl-C end the work in good order; the next one is as usual."""

    def stop(*_: object) -> None:
        say("stopping after this round; Ctrl-C again stops at once", err=True)
        stopped.set()
        signal.signal(signal.SIGINT, before)

    if current_thread() is not main_thread():  # only there can signals be handled
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def measured(given: dict[str, Any], json_file: Path | None, stopped: Event) -> dict[str, Any]:
    """Run the benchmark the flags ask for; what they leave open depends on the machine."""
    from oelm.bench.cases import WORKS, Settings
    from oelm.bench.run import run_bench
    from oelm.models.build import default_model
    from oelm.training.parallel import process_state

    device = process_state().device
    machine = ON_GPU if device.type == "cuda" else ON_CPU
    found = {name: given[name] if given[name] is not None else value for name, value in machine.items()}
    settings = Settings(
        work=WORKS if given["work"] == "all" else tuple(_parts(given["work"])),
        size=given["size"] or default_model(device),
        data=tuple(given["data"] or ()),
        batch_size=given["batch_size"],
        tokens_per_step=found["tokens_per_step"],
        steps=found["steps"],
        rounds=found["rounds"],
        max_length=found["max_length"],
        lengths=_numbers("--lengths", found["lengths"]),
        vocab_size=given["vocab_size"],
        leave_out=tuple(_parts(given["leave_out"] or "")),
        compile=device.type == "cuda" if given["compile_"] is None else given["compile_"],
        rest=given["rest"],
        profile=given["profile"],
        stop_after=seconds_of(given["stop_after"]),
    )
    tell = lambda text: say(text, err=True)  # noqa: E731
    return run_bench(settings, device, tell, json_file, stopped.is_set)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{flag} {text!r}: write lengths with commas between them, for example 512,1024")
    return tuple(map(int, parts))
