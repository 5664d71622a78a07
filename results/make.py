"""Make the runs that are missing here, study by study, for as long as there is time.

    python results/make.py --data-dir ready --time 25m --new new        # all of results/queue.toml, in order
    python results/make.py --data-dir ready --time 25m --new new --only published-recipe,lm-gap-screen
    python results/make.py --plan --only published-recipe               # its plan, to be committed before

A study starts from its records here and is made in studies/, where another call goes on. Its records are
written to `--new` while the next study is made; they replace those here. Runs that are training when the time
is up are saved in studies/ and have no record yet. `--set` changes a key of all studies, also one that the
queue sets.
"""

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from oelm.cli.options import seconds_of
from oelm.config import FORBID, read_toml
from oelm.errors import REQUEUE, UserError
from oelm.study.folder import StudyFolder
from oelm.study.request import plan_study
from oelm.system.files import read_object
from oelm.system.validation import checked_entries

HERE = Path(__file__).parent
STUDIES = Path("studies")
WRITING = 30.0  # seconds kept for the records of the last study


@dataclass(frozen=True)
class Entry:
    """A study of the queue; its keys are explained in queue.toml."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    study: str
    folder: str = ""
    set: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    keep: bool = False

    @property
    def name(self) -> str:
        return self.folder or self.study

    @property
    def out(self) -> Path:
        return STUDIES / self.name

    @property
    def log(self) -> Path:
        return STUDIES / f"{self.name}.log"


def read_queue(path: Path, only: str | None) -> list[Entry]:
    entries = checked_entries(Entry, read_toml(path), str(path), "studies")
    if only is None:
        return entries
    names = only.split(",")
    if unknown := {*names} - {entry.name for entry in entries}:
        sys.exit(f"--only: {path} has no {', '.join(sorted(unknown))}")
    return [entry for entry in entries if entry.name in names]


def write_plan(entry: Entry, results: Path, keys: list[str]) -> None:
    """Write what a study will compare and how, without preparing or training anything."""
    folder = results / entry.name
    if count_runs(folder):
        print(f"{entry.name}: has runs, and with them its plan")
        return
    study, _ = plan_study(entry.study, folder / "not-there", {}, {}, [*entry.set, *keys])
    folder.mkdir(parents=True, exist_ok=True)
    StudyFolder(folder).write_plan(study)
    print(f"{entry.name}: {folder / 'study.json'}")


def count_runs(folder: Path) -> int:
    return len([*folder.glob("runs/*/*/*/results.json")])


def newest(name: str, results: Path) -> Path:
    """The study of that name that was made here; otherwise its published records."""
    return STUDIES / name if count_runs(STUDIES / name) else results / name


def drop_interrupted(folder: Path) -> None:
    """Delete published runs that were interrupted: without their checkpoints nobody can go on with them."""
    for path in folder.glob("runs/*/*/*/results.json"):
        if read_object(path)["status"] == "interrupted":
            shutil.rmtree(path.parent)


def start(entry: Entry, *words: str) -> "subprocess.Popen[bytes]":
    """Start `oelm` with these words; its output goes to the study's log."""
    STUDIES.mkdir(exist_ok=True)
    with entry.log.open("ab") as log:
        command = [sys.executable, "-m", "oelm", *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def make(entry: Entry, results: Path, common: list[str], end: float) -> tuple[str, bool]:
    """Import what is there and make what is missing, until `end`: how far it came, and whether it failed."""
    keys = [*([] if entry.keep else ["study.models=none"]), *entry.set]
    command = ["study", entry.study, "--out", str(entry.out)]
    command += [word for key in keys for word in ("--set", key)]
    command += common  # after the study's own keys: of a key named twice the last counts
    failed = f"failed, see {entry.log}"
    with tempfile.TemporaryDirectory() as folder:
        sources = [results / entry.name, *(newest(name, results) for name in entry.runs)]
        for name in entry.trials:
            for run in newest(name, results).glob("runs/*/*/choice-*"):
                to = Path(folder, name, *run.parts[-4:])
                shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "model"))
            sources.append(Path(folder, name))
        known = [word for source in sources if count_runs(source) for word in ("--import", str(source))]
        if known and start(entry, *command, *known).wait():
            return failed, True
    limit = ["--stop-after", f"{max(1.0, end - time.monotonic()):.0f}s"] if end < math.inf else []
    code = start(entry, *command, *limit).wait()
    return {0: "complete", REQUEUE: "time is up"}.get(code, failed), code not in (0, REQUEUE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", help="90s, 25m, 2h; 30 s are for writing records; default: no end")
    parser.add_argument("--new", type=Path, default=Path("new"), help="a folder for the records")
    parser.add_argument("--only", help="studies of the queue by their folders, with commas")
    parser.add_argument("--plan", action="store_true", help="write the plans that are not here, and stop")
    parser.add_argument("--data-dir", type=Path, help="prepared datasets, as for oelm study")
    parser.add_argument("--set", action="append", default=[], help="a key of all studies: study.seeds=1")
    parser.add_argument("--queue", type=Path, default=HERE / "queue.toml")
    parser.add_argument("--results", type=Path, default=HERE, help="where published records are")
    asked = parser.parse_args()
    entries = read_queue(asked.queue, asked.only)
    if asked.plan:
        for entry in entries:
            write_plan(entry, asked.results, asked.set)
        return
    seconds = seconds_of(asked.time, "--time") or math.inf
    if seconds <= WRITING:
        raise UserError(f"--time {asked.time} is too short: {WRITING:.0f} s of it are for writing records")
    end = time.monotonic() + seconds - WRITING
    common = ["--data-dir", str(asked.data_dir)] if asked.data_dir else []
    common += [word for key in asked.set for word in ("--set", key)]
    writing: list[tuple[Path, subprocess.Popen[bytes]]] = []
    failures = 0
    for entry in entries:
        began = time.monotonic()
        if began > end:
            break
        state, failed = make(entry, asked.results, common, end)
        failures += failed
        runs, seconds = count_runs(entry.out), time.monotonic() - began
        print(f"{entry.name:<20} {runs:>4} runs {seconds:>6.0f} s  {state}", flush=True)
        if runs:
            records = asked.new / entry.name
            shutil.rmtree(records, ignore_errors=True)  # of an earlier call
            writing.append((records, start(entry, "report", str(entry.out), "--publish", str(records))))
    for records, process in writing:
        failures += process.wait() != 0
        drop_interrupted(records)
    sys.exit(failures > 0)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # the study that is being made has heard it too, and saves
        sys.exit(130)
