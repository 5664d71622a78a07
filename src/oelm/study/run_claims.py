"""Claims on a shared folder: which worker trains which run, by O_EXCL and rename alone, as NFS has them.

    queue/jobs/NAME/job.json     a run to train
                   /1, 2, ...    its claims: the highest number says who has it
    queue/ended/NAME/            as above, once the run has ended; with answer.json where a fault ended it
    queue/.work/NAME.3/          the run's folder while the worker with claim 3 trains it

Taking a run, giving it up and ending it all mean creating the next number, which only one process can do. A
worker trains in a folder that carries its number, and whoever takes the run over renames that folder first:
one that was stopped and wakes up late finds its folder gone and its next number taken, and can overwrite
nothing. A claim expires when its file has not changed for so many seconds of the observer's own monotonic
clock; no two machines' clocks are ever compared.
"""

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPIRES = 90.0  # seconds without a heartbeat after which a claim no longer counts
BEATS = 6  # heartbeats within that time
MOST_LOST = 5  # workers in a row that may vanish with one run before it counts as failed
MOST_NEAR = 256  # runs from which a worker picks the next one at random, where there are many
SIZE = 512  # bytes of a claim: always the same, so that a heartbeat is one write


@dataclass
class Claim:
    """A run that this worker has taken. `lost`: how many workers in a row vanished with it."""

    queue: "Queue"
    name: str
    number: int
    lost: int
    beats: int = 0

    @property
    def work(self) -> Path:
        """The folder that the run is trained in."""
        return self.queue.work / f"{self.name}.{self.number}"

    @property
    def job(self) -> Path:
        return self.queue.jobs / self.name

    def beat(self) -> bool:
        """Tell the other workers that this one is alive; False where one has taken the run over."""
        if (self.job / f"{self.number + 1}").exists():
            return False
        self.beats += 1
        try:
            handle = os.open(self.job / f"{self.number}", os.O_WRONLY)
        except FileNotFoundError:
            return False
        with open(handle, "wb", buffering=0) as file:
            file.write(_entry("claim", self.queue.owner, self.lost, self.beats))
            os.fsync(handle)
        return True

    def end(self, event: str) -> bool:
        """Give the run up ("released") or end it ("finished"); False where another worker has taken it."""
        return self.queue.create(self.name, self.number + 1, event, 0)


@dataclass(frozen=True)
class State:
    """What a run's claims say. `event`: "queued" (never taken), "claim", "released" or "finished"."""

    number: int = 0
    event: str = "queued"
    owner: str = ""
    lost: int = 0
    raw: bytes = b""  # changes with every heartbeat
    changed: float = 0.0  # by the clock of the file system: to be shown, never to decide


class Queue:
    """The runs of a study that wait for workers or are being trained by them."""

    def __init__(
        self,
        root: Path,
        owner: str = "",
        expires: float = EXPIRES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.owner, self.expires, self.clock = root / "queue", owner, expires, clock
        self.jobs, self.ended, self.work = (self.folder / name for name in ("jobs", "ended", ".work"))
        self.finished = self.folder / "finished"
        self._listed = float("-inf")  # when the runs were last listed
        self._fresh: list[str] = []  # those that may never have been taken, the next one last
        self._taken: dict[str, float] = {}  # the others, and when their claims were last looked at
        self._seen: dict[str, tuple[bytes, float]] = {}  # run -> its claim, and since when that is the same

    def open(self) -> None:
        """Make the queue's folders; the study is not finished any more."""
        for folder in (self.jobs, self.ended, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.finished.unlink(missing_ok=True)

    def finish(self) -> None:
        """The study is complete: workers leave, and nothing of the queue is kept."""
        self.finished.touch()
        for folder in (self.jobs, self.ended, self.work):
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: str, job: dict[str, Any]) -> None:
        """Queue a run, unless it is queued or being trained already. One that has ended keeps its numbers."""
        if (self.jobs / name).exists():
            return
        beside = self.ended / name
        if not beside.exists():
            beside = self.folder / f".{name}.part"
            beside.mkdir(exist_ok=True)
        else:
            last = max((int(path.name) for path in beside.iterdir() if path.name.isdecimal()), default=0)
            (beside / f"{last + 1}").write_bytes(_entry("released", "", 0, 0))
        (beside / "answer.json").unlink(missing_ok=True)
        (beside / "job.json").write_text(json.dumps(job), encoding="utf-8")
        beside.rename(self.jobs / name)

    def names(self) -> list[str]:
        """The runs that have not ended, in the order in which they are taken."""
        return sorted(os.listdir(self.jobs)) if self.jobs.exists() else []

    def read(self, name: str, ended: bool = False) -> dict[str, Any] | None:
        return _read_json((self.ended if ended else self.jobs) / name / "job.json")

    def answer(self, name: str) -> dict[str, Any] | None:
        """Why a run that has ended has no result; None where it has one."""
        return _read_json(self.ended / name / "answer.json")

    def close_job(self, claim: Claim, answer: dict[str, Any] | None) -> None:
        """End a run, after `claim.end("finished")`."""
        with contextlib.suppress(FileNotFoundError):  # another worker saw its results, and was faster
            if answer is not None:
                (claim.job / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
            claim.job.rename(self.ended / claim.name)

    def take(self) -> Claim | None:
        """Take a run that nobody has; None if there is none now."""
        now, pause = self.clock(), self.expires / BEATS
        if not self._fresh or now - self._listed > pause:
            names, self._listed = self.names(), now
            self._fresh = [name for name in reversed(names) if name not in self._taken]
            self._taken = {name: self._taken[name] for name in names if name in self._taken}
        return self._take_known(now, pause) or self._take_fresh() or self._take_known(now, pause)

    def _take_known(self, now: float, pause: float) -> Claim | None:
        for name in [name for name, looked in self._taken.items() if now - looked >= pause]:
            self._taken[name] = now
            if (claim := self._take_over(name, now)) is not None:
                return claim
        return None

    def _take_fresh(self) -> Claim | None:
        while self._fresh:
            # In order, but for many runs not all workers the same one at the same time.
            near = min(MOST_NEAR, len(self._fresh) // 8 + 1)
            name = self._fresh.pop(-random.randint(1, near))
            if self.create(name, 1, "claim", 0):
                return Claim(self, name, 1, 0)
            self._taken[name] = float("-inf")
        return None

    def _take_over(self, name: str, now: float) -> Claim | None:
        """A run that was taken before, if it was given back or its worker has shown no sign of life."""
        state = self.state(name)
        if state is None:
            del self._taken[name]
            return None
        lost = 0
        if state.event in ("claim", "finished"):  # one that has finished is about to hand its run over
            raw, since = self._seen.get(name, (None, now))
            if raw != state.raw:
                self._seen[name] = (state.raw, now)
                return None
            if now - since < self.expires:
                return None
            lost = state.lost + 1
        number = state.number + 1
        return Claim(self, name, number, lost) if self.create(name, number, "claim", lost) else None

    def create(self, name: str, number: int, event: str, lost: int) -> bool:
        """Create a claim; False where it exists, or the run has ended."""
        try:
            handle = os.open(self.jobs / name / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except (FileExistsError, FileNotFoundError):
            return False
        with open(handle, "wb", buffering=0) as file:
            file.write(_entry(event, self.owner, lost, 0))
        return True

    def state(self, name: str) -> State | None:
        """A run's last claim; None for a run that has ended."""
        try:
            numbers = [int(entry) for entry in os.listdir(self.jobs / name) if entry.isdecimal()]
            if not numbers:
                return State()
            path = self.jobs / name / str(max(numbers))
            raw, changed = path.read_bytes(), path.stat().st_mtime
        except FileNotFoundError:
            return None
        values: dict[str, Any] = {"event": "claim"}  # its owner has created it and not yet written
        with contextlib.suppress(ValueError):
            values = json.loads(raw)
        known = (str(values["event"]), str(values.get("owner", "")), int(values.get("lost", 0)))
        return State(max(numbers), *known, raw, changed)

    def bring_work(self, claim: Claim) -> None:
        """Move what earlier workers have left of a run to this claim's folder, its checkpoints with it."""
        for number in range(claim.number - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                (self.work / f"{claim.name}.{number}").rename(claim.work)
                # Its lock may be held by a process that is stopped, and would keep this one waiting.
                (claim.work / "lock").unlink(missing_ok=True)
                return

    def work_folder(self, name: str) -> Path | None:
        """Where a run is trained, or was last."""
        found = [path for path in self.work.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
        return max(found, key=lambda path: int(path.suffix[1:]), default=None)

    def states(self) -> Iterator[tuple[str, State]]:
        for name in self.names():
            if (state := self.state(name)) is not None:
                yield name, state


def _entry(event: str, owner: str, lost: int, beats: int) -> bytes:
    text = json.dumps({"event": event, "owner": owner[:200], "lost": lost, "beats": beats})
    return text.encode("ascii").ljust(SIZE)


def _read_json(path: Path) -> Any:
    """None where the file is not there, or its writer has died in the middle of it."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
