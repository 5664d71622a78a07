"""Claims on a shared folder: which worker trains which run, by O_EXCL and rename alone, which NFS supports.

    queue/jobs/NAME/job.json     a run to train
                   /1, 2, ...    its claims: the highest number says who has it
    queue/ended/NAME/            the same once the run has ended; with answer.json if a fault ended it
    queue/.work/NAME.3/          the run's folder while the worker with claim 3 trains it
                NAME.0/          the unfinished run of a study that trained on one machine before

Taking a run, giving it up and ending it all mean creating the next number, which only one process can do. A
worker trains in a folder that carries its number, and another that takes the run over renames that folder
first. So a worker that was suspended finds its folder gone and its next number taken when it goes on, and
cannot overwrite anything. A claim states after how many seconds without a heartbeat it expires. Other workers
count these seconds by their own monotonic clock, and start again if they were suspended themselves: the
clocks of two machines are never compared.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

EXPIRES = 90.0  # seconds without a heartbeat after which a claim no longer counts, unless it says otherwise
BEATS = 6  # heartbeats within that time
MOST_LOST = 5  # workers in a row that may vanish with one run before it counts as failed
MOST_NEAR = 1024  # runs from which a worker picks the next one at random, if there are many
MOST_MISSES = 32  # attempts in a row on runs already taken after which runs are listed again at once
MANY_MISSES = 8  # such attempts after which they are listed again once a run is claimed
FIRST_LOOK = 512  # runs that a worker lists before its first claim; it lists all of them after it
RETRY = 10.0  # seconds for which writing the end of a claim is retried if the storage fails
SIZE = 512  # bytes of a claim: always the same, so that a heartbeat is one write
# Errors of shared storage that may be gone at the next attempt.
TRANSIENT = {
    errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK, errno.EREMOTEIO,
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENOTCONN, errno.ECONNRESET,
}  # fmt: skip


def is_transient(error: OSError) -> bool:
    """Whether this error of the storage may be gone at the next attempt."""
    return error.errno in TRANSIENT


@dataclass
class Claim:
    """A run that this worker has taken. `lost`: how many workers in a row vanished with it."""

    queue: "Queue"
    name: str
    number: int
    lost: int
    beats: int = 0
    renewed: float = 0.0  # when it was last renewed, by this worker's clock

    def __post_init__(self) -> None:
        self.renewed = self.queue.clock()

    @property
    def work(self) -> Path:
        """The folder that the run is trained in."""
        return self.queue.work / f"{self.name}.{self.number}"

    @property
    def job(self) -> Path:
        return self.queue.jobs / self.name

    def beat(self) -> bool:
        """Write a heartbeat; False if another worker has taken the run over. OSError if the storage fails."""
        now = self.queue.clock()
        if (self.job / f"{self.number + 1}").exists():
            return False
        try:
            handle = os.open(self.job / f"{self.number}", os.O_WRONLY)
        except FileNotFoundError:
            return False
        self.beats += 1
        with open(handle, "wb", buffering=0) as file:
            # Closing the file makes it visible to others, on NFS too; no fsync, as it need not survive a
            # crash.
            file.write(self.queue.entry("claim", self.lost, self.beats))
        self.renewed = now
        return True

    def end(self, event: str) -> bool:
        """Give the run up ("released") or end it ("finished"); False if another worker has taken it, or if
        the storage fails for RETRY seconds: then the claim expires."""
        last = time.monotonic() + RETRY
        while True:
            try:
                if self.queue.create(self.name, self.number + 1, event, 0):
                    return True
                state = self.queue.state(self.name)  # an attempt that raised may have been written anyway
                own = (self.number + 1, event, self.queue.owner)
                return state is not None and (state.number, state.event, state.owner) == own
            except OSError as error:
                if not is_transient(error):
                    raise
                if time.monotonic() > last:
                    return False
                time.sleep(0.5)


@dataclass(frozen=True)
class State:
    """A run's last claim. `event`: "queued" (never taken), "claim", "released" or "finished"."""

    number: int = 0
    event: str = "queued"
    owner: str = ""
    lost: int = 0
    expires: float = EXPIRES  # of this claim, as its owner has chosen
    raw: bytes = b""  # changes with every heartbeat
    changed: float = 0.0  # by the clock of the file system: only for display


@dataclass
class LastSeen:
    """What this worker last saw of a run that another worker has taken."""

    looked: float = float("-inf")
    raw: bytes | None = None  # its claim
    since: float = 0.0  # when it was first seen like this


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
        self._listed, self._changed = float("-inf"), 0  # time of the last listing; mtime of the jobs' folder
        self._stale = True  # not all runs are listed, or many of those listed are taken
        self._fresh: list[str] = []  # runs that may never have been taken, the next one last
        self._taken: dict[str, LastSeen] = {}  # the other runs

    def open(self) -> None:
        """Make the queue's folders, and remove the mark that the study is finished."""
        for folder in (self.jobs, self.ended, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.finished.unlink(missing_ok=True)

    def finish(self) -> None:
        """Mark the study as finished, so that workers end, and delete the queue."""
        self.finished.touch()
        for folder in (self.jobs, self.ended, self.work):
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: str, job: dict[str, Any], unfinished: Path | None = None) -> None:
        """Queue a run, unless it is queued or being trained already. A run that ended before keeps counting
        its claims. `unfinished`: a folder with the run's checkpoints, which is moved to its first worker; no
        worker can have the run yet."""
        if self.has(name):
            return
        if unfinished is not None and self.work_folder(name) is None:
            unfinished.rename(self.work / f"{name}.0")
        beside = self.ended / name
        if not beside.exists():
            beside = self.folder / f".{name}.part"
            beside.mkdir(exist_ok=True)
        else:
            last = max((int(path.name) for path in beside.iterdir() if path.name.isdecimal()), default=0)
            (beside / f"{last + 1}").write_bytes(self.entry("released", 0, 0))
        (beside / "answer.json").unlink(missing_ok=True)
        (beside / "job.json").write_text(json.dumps(job), encoding="utf-8")
        beside.rename(self.jobs / name)

    def has(self, name: str) -> bool:
        """Whether the run is waiting or being trained."""
        return (self.jobs / name).exists()

    def names(self) -> list[str]:
        """The names of the runs that have not ended, in the order in which workers take them."""
        try:
            return sorted(os.listdir(self.jobs))
        except FileNotFoundError:
            return []

    def read(self, name: str, ended: bool = False) -> dict[str, Any] | None:
        return _read_json((self.ended if ended else self.jobs) / name / "job.json")

    def answer(self, name: str) -> dict[str, Any] | None:
        """Why a run that has ended has no result; None if it has one."""
        return _read_json(self.ended / name / "answer.json")

    def close_job(self, claim: Claim, answer: dict[str, Any] | None) -> None:
        """End a run, after `claim.end("finished")`."""
        with contextlib.suppress(FileNotFoundError):  # another worker found the result and closed it first
            if answer is not None:
                (claim.job / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
            claim.job.rename(self.ended / claim.name)

    def take(self) -> Claim | None:
        """Claim a run that no worker has; None if there is none now. OSError if the storage fails."""
        now, pause = self.clock(), self.expires / BEATS
        if not self._all_listed:
            self._list_some()
        if not self._fresh:
            self._list(now, pause)
        return self._take_known(now, pause) or self._take_fresh(now) or self._take_known(now, pause)

    def refresh(self) -> None:
        """List the runs again if the next claim needs it. Listing thousands takes longer than a claim, so a
        worker does it after it has started its run."""
        if self._stale:
            self._list(self.clock(), 0.0)

    @property
    def _all_listed(self) -> bool:
        return self._listed > float("-inf")

    def _list_some(self) -> None:
        """List the first FIRST_LOOK entries of the jobs' folder, which are enough for a claim."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.jobs) as entries:
            self._keep_untaken(sorted(entry.name for entry in islice(entries, FIRST_LOOK)))

    def _list(self, now: float, pause: float) -> None:
        """List the runs if the jobs' folder has changed, or after `pause` seconds."""
        try:
            changed = self.jobs.stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed != self._changed or now - self._listed >= pause:
            names, self._listed, self._changed, self._stale = self.names(), now, changed, False
            self._taken = {name: self._taken[name] for name in names if name in self._taken}
            self._keep_untaken(names)

    def _keep_untaken(self, names: list[str]) -> None:
        self._fresh = [name for name in reversed(names) if name not in self._taken]

    def _take_known(self, now: float, pause: float) -> Claim | None:
        due = [name for name, seen in self._taken.items() if now - seen.looked >= pause]
        # Of many runs each call checks only a part, so that all of them are checked within a pause.
        for name in due[: max(MOST_MISSES, len(self._taken) // 8)]:
            if (claim := self._take_over(name, now, pause)) is not None:
                return claim
        return None

    def _take_fresh(self, now: float) -> Claim | None:
        misses = 0
        while self._fresh:
            # In order, but with many runs at random among the next ones, so that workers rarely collide.
            near = min(MOST_NEAR, len(self._fresh) // 8 + 1)
            name = self._fresh.pop(-random.randint(1, near))
            self._taken[name] = LastSeen()
            if self.create(name, 1, "claim", 0):
                return Claim(self, name, 1, 0)
            misses += 1
            self._stale = self._stale or misses == MANY_MISSES
            if misses == MOST_MISSES or not (self._fresh or self._all_listed):  # the list is out of date
                self._list(now, 0.0)
        return None

    def _take_over(self, name: str, now: float, pause: float) -> Claim | None:
        """Claim a run that was taken before, if it was given back or its claim has expired; otherwise
        None."""
        seen, state = self._taken[name], self.state(name)
        before, seen.looked = seen.looked, now
        if state is None:
            del self._taken[name]
            return None
        lost = 0
        if state.event in ("claim", "finished"):  # after "finished" the worker still moves the result
            # This worker was suspended itself: the same cause may have delayed the other's heartbeats.
            suspended = now - before > 2 * pause
            if suspended or state.raw != seen.raw:
                seen.raw, seen.since = state.raw, now
                return None
            if now - seen.since < state.expires:
                return None
            lost = state.lost + 1
        number = state.number + 1
        return Claim(self, name, number, lost) if self.create(name, number, "claim", lost) else None

    def create(self, name: str, number: int, event: str, lost: int) -> bool:
        """Create a claim; False if it exists or the run has ended. OSError if the storage fails."""
        try:
            handle = os.open(self.jobs / name / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except (FileExistsError, FileNotFoundError):
            return False
        with open(handle, "wb", buffering=0) as file:
            file.write(self.entry(event, lost, 0))
        return True

    def entry(self, event: str, lost: int, beats: int) -> bytes:
        values = {"event": event, "owner": self.owner[:200], "expires": self.expires, "lost": lost}
        return json.dumps(values | {"beats": beats}).encode("ascii").ljust(SIZE)

    def state(self, name: str) -> State | None:
        """A run's last claim; None for a run that has ended. OSError if the storage fails."""
        try:
            numbers = [int(entry) for entry in os.listdir(self.jobs / name) if entry.isdecimal()]
            if not numbers:
                return State()
            path = self.jobs / name / str(max(numbers))
            raw, changed = path.read_bytes(), path.stat().st_mtime
        except FileNotFoundError:
            return None
        values: dict[str, Any] = {"event": "claim"}  # of a file that is created and not yet written
        with contextlib.suppress(ValueError):
            values = json.loads(raw)
        known = (str(values["event"]), str(values.get("owner", "")), int(values.get("lost", 0)))
        return State(max(numbers), *known, float(values.get("expires", EXPIRES)), raw, changed)

    def move_work_folder(self, claim: Claim) -> None:
        """Move the folder of the run's last worker, with its checkpoints, to this claim's folder."""
        for number in range(claim.number - 1, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                (self.work / f"{claim.name}.{number}").rename(claim.work)
                # A suspended process may still hold its lock, for which this worker would wait.
                (claim.work / "lock").unlink(missing_ok=True)
                return

    def work_folder(self, name: str) -> Path | None:
        """The folder where a run is being trained, or was last; None if there is none."""
        folders = [path for path in self.work.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
        return max(folders, key=lambda path: int(path.suffix[1:]), default=None)

    def states(self) -> Iterator[tuple[str, State]]:
        for name in self.names():
            if (state := self.state(name)) is not None:
                yield name, state


def _read_json(path: Path) -> Any:
    """The contents; None if the file does not exist, or its writer died before it was complete."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
