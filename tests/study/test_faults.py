"""Faults of the machine in real studies: a full disk, killed processes, no memory.

The oracle is the undisturbed study: the same rates chosen, the same records bit for bit, times aside.
"""

import contextlib
import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.study.studies import make_file, records, run, start, wait_for_progress

MORE = ("--seeds", "1", "--set", "training.steps=60")
MIB = 1 << 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(data):
    out = data.parent / "undisturbed"
    code, text = run(data, out, *MORE)
    assert code == 0, text
    return records(out)


class Watched:
    """A study in its process, and the lines it has printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, what: Callable[[], object], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.005)

    def end(self) -> int:
        code = self.process.wait(timeout=400)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A real file system of so many bytes; it is gone when the process that holds it is."""
    holder = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size={size} tmpfs /mnt && echo here && exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "here\n":
            reason = f"no file system can be mounted here: {holder.stderr.read().strip()}"
            (pytest.fail if os.environ.get("OELM_REQUIRE_DATA") else pytest.skip)(reason)
        yield Path(f"/proc/{holder.pid}/root/mnt")
    finally:
        holder.kill()
        holder.communicate()


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


@pytest.mark.slow
def test_a_disk_that_fills_and_empties_again_changes_nothing(data, undisturbed):
    with small_disk(256 * MIB) as disk:
        out = disk / "s"
        study = Watched(start(data, out, *MORE, "--jobs", "2"))
        study.wait_for(lambda: list(out.glob("runs/*/oelm/choice-*/metrics.jsonl")))
        fill(disk / "filler")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (disk / "more").write_bytes(b"\0" * MIB)
        (disk / "more").unlink()
        study.wait_for(lambda: re.search(r" oelm lr .* seed 1001: .*; trying again in ", study.text))
        (disk / "filler").unlink()
        assert study.end() == 0, study.text
        assert "FAILED" not in study.text and "failed   " not in study.text
        assert records(out) == undisturbed


@pytest.mark.slow
def test_a_disk_that_stays_full_stops_the_study_and_loses_nothing(data, undisturbed):
    with small_disk(256 * MIB) as disk:
        out = disk / "s"
        study = Watched(start(data, out, *MORE, "--jobs", "1", hasty=True))
        study.wait_for(lambda: list(out.glob("runs/*/oelm/choice-*/metrics.jsonl")))
        fill(disk / "filler")
        assert study.end() == 1, study.text
        last = study.lines[-1]
        assert re.search(r"made \w+ lr [\d.]+ seed 1001 failed 6 times", last) and "make room" in last
        assert last.endswith("start again to go on") and "learning rate" not in last
        (disk / "filler").unlink()
        code, text = run(data, out, *MORE)
        assert code == 0 and records(out) == undisturbed, text


@pytest.mark.slow
def test_a_worker_killed_again_and_again_stops_the_study_and_rules_nothing_out(data, undisturbed, tmp_path):
    out = tmp_path / "s"
    study = Watched(start(data, out, *MORE, "--jobs", "1"))
    for _ in range(4):
        assert wait_for_progress(study.process, out, extra=0), study.text
        (worker,) = psutil.Process(study.process.pid).children()
        worker.kill()
    assert study.end() == 1, study.text
    assert study.text.count("trying again in") == 3
    last = study.lines[-1]
    assert re.search(r"made baseline lr 0.001 seed 1001 failed 4 times.*signal 9 \(SIGKILL\)", last)
    assert last.endswith("start again to go on") and "learning rate" not in last
    assert not list(out.rglob("results.json"))  # nothing is said about the method
    code, text = run(data, out, *MORE)
    assert code == 0 and records(out) == undisturbed, text


def limit_memory(study: psutil.Process, size: int, stop: threading.Event) -> None:
    """Give every worker that a study starts so much address space; torch takes seconds to load."""
    while not stop.wait(0.05):
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in study.children():
                resource.prlimit(worker.pid, resource.RLIMIT_AS, (size, size))


@pytest.mark.slow
def test_no_memory_is_a_fault_with_its_own_advice(data, tmp_path):
    """Two runs side by side, neither of which has room for its optimizer: first one fewer, then the end."""
    code = "import oelm.study.worker; print(next(l for l in open('/proc/self/status') if 'VmPeak' in l))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    room = int(loaded.split()[1]) * 1024 + 192 * MIB
    out = tmp_path / "s"
    study = Watched(start(data, out, *MORE, "--jobs", "2", "--model", "gpt-medium-512", hasty=True))
    stop = threading.Event()
    limiter = threading.Thread(target=limit_memory, args=(psutil.Process(study.process.pid), room, stop))
    limiter.start()
    try:
        assert study.end() == 1, study.text
    finally:
        stop.set()
        limiter.join()
    assert study.text.count("out of memory; fewer runs side by side from now on") == 1
    last = study.lines[-1]
    assert "there is not enough memory (" in last and "training.accumulate" in last
    assert last.endswith("start again to go on") and "learning rate" not in last
    found = [json.loads(path.read_text()) for path in out.rglob("results.json")]
    assert all(results["failure"] == {"kind": "memory"} for results in found)
