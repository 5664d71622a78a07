"""Measure the records of this folder again, one after the other, for as long as there is time.

    python benchmarks/make.py --on h200 --ready ready --time 25m     # all of queue.toml, in order
    python benchmarks/make.py --on h200 --ready ready --only h200-time.json,h200-predict.json

Each command is a process of its own; what it prints goes to NEW/RECORD.log. The new records, in which the
folders are cut from the commands, replace those here. One that takes more minutes than are left, by
queue.toml, is skipped.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from oelm.cli.options import seconds_of
from oelm.config import FORBID, read_toml
from oelm.errors import UserError
from oelm.system.files import write_text
from oelm.system.validation import checked_entries

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """A record of the queue; its keys are explained in queue.toml."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    record: str
    on: Literal["h200", "cpu"]
    minutes: float
    command: str

    def __post_init__(self) -> None:
        try:
            self.words(HERE, HERE)
        except (LookupError, ValueError) as error:
            raise UserError(
                f"command does not fit: {error}; it may name {{ready}}, {{shapes}} and {{record}}"
            ) from None

    def words(self, ready: Path, new: Path) -> list[str]:
        """The command, as a process is started with it."""
        places = {"ready": ready, "shapes": new / "shapes", "record": new / self.record}
        return [sys.executable, *(word.format_map(places) for word in shlex.split(self.command))]


def read_queue(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """The configs of the models that commands name, and the records."""
    queue = read_toml(path)
    entries = checked_entries(Entry, queue, str(path), "records", "shapes")
    shapes = queue.get("shapes", {})
    for name, config in shapes.items() if isinstance(shapes, dict) else [("NAME", shapes)]:
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise UserError(f'{path}: [shapes.{name}] needs a model_type, such as "bert"')
    return shapes, entries


def save_model(config: dict[str, Any], folder: Path) -> None:
    """A classifier with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a command and the processes that it started, which would slow down the next one."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(entry: Entry, ready: Path, new: Path, seconds: float) -> str:
    """Measure a record anew; how that went."""
    limit = seconds if seconds < math.inf else None
    with (new / f"{entry.record}.log").open("wb") as log:
        process = subprocess.Popen(
            entry.words(ready, new),
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "stopped, time is up"
        finally:
            if process.returncode is None:
                stop(process)
    if code:
        return f"failed, see {log.name}"
    record = new / entry.record
    if not record.is_file():
        return f"left no record, see {log.name}"
    text = record.read_text(encoding="utf-8")
    for folder in (new / "shapes", new, ready):
        text = text.replace(f"{folder}/", "")
    write_text(record, text)
    return "measured"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", choices=("h200", "cpu"), required=True, help="records of this machine")
    parser.add_argument("--ready", type=Path, default=Path("ready"), help="the folder of prepared datasets")
    parser.add_argument("--new", type=Path, default=Path("new"), help="a folder for the records")
    parser.add_argument("--only", help="records of the queue, with commas")
    parser.add_argument("--time", help="90s, 25m, 2h; default: until all are measured")
    parser.add_argument("--queue", type=Path, default=HERE / "queue.toml")
    args = parser.parse_args()
    shapes, entries = read_queue(args.queue)
    entries = [entry for entry in entries if entry.on == args.on]
    if args.only is not None:
        names = args.only.split(",")
        if unknown := {*names} - {entry.record for entry in entries}:
            sys.exit(f"--only: {args.queue} has no {', '.join(sorted(unknown))} on {args.on}")
        entries = [entry for entry in entries if entry.record in names]
    end = time.monotonic() + (seconds_of(args.time, "--time") or math.inf)
    ready, new = args.ready.resolve(), args.new.resolve()
    new.mkdir(parents=True, exist_ok=True)
    for name, config in shapes.items():
        folder = new / "shapes" / name
        if not folder.exists() and any(f"{{shapes}}/{name}" in entry.command for entry in entries):
            save_model(config, folder)
    states = {}
    for entry in entries:
        began = time.monotonic()
        fits = began + 60 * entry.minutes <= end
        states[entry.record] = measure(entry, ready, new, end - began) if fits else "skipped, no time"
        print(f"{entry.record:<28} {time.monotonic() - began:>6.0f} s  {states[entry.record]}", flush=True)
    sys.exit(any(state.startswith(("failed", "left")) for state in states.values()))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
