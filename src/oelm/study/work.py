"""`oelm work`: claim runs of a study in its shared folder, train them on this machine, return the results."""

import contextlib
import errno
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oelm.config import rebuild_config
from oelm.errors import OUTCOMES, Interrupted, UserError
from oelm.study.design import StudyConfig
from oelm.study.folder import StudyFolder, set_aside
from oelm.study.launchers.interface import EndedRun, RunJob
from oelm.study.launchers.local import LocalLauncher
from oelm.study.records import read_record
from oelm.study.run_claims import BEATS, MOST_LOST, Claim, Queue, is_transient
from oelm.system.messages import notice
from oelm.system.version import NUMERICS, NUMERICS_OTHERS
from oelm.training.parallel import process_state
from oelm.training.stopping import Stop, stopping

STOP_PATIENCE = 100.0  # seconds for runs to save when the worker is asked to stop, unless given
# Keys of the [study] table that say how a worker makes runs; they travel with each job.
WORKER_KEYS = ("jobs", "threads", "memory_gb", "gpus_per_run")


def job_values(job: RunJob, table: StudyConfig, memory_bytes: float, root: Path) -> dict[str, Any]:
    """The JSON values of a run from which a worker on any machine can train it."""
    return {
        "config": job.config.to_dict(),
        "dataset": str(job.dataset.absolute()),
        "folder": str(job.folder.relative_to(root)),
        "table": {key: getattr(table, key) for key in WORKER_KEYS},
        "memory_bytes": memory_bytes,
        "numerics": [NUMERICS, NUMERICS_OTHERS],
        "device": process_state().device.type,
    }


def worker_name() -> str:
    """A name for this worker: where it runs, and its Slurm job."""
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    slurm = f"slurm-{job}_{task}-" if job else ""
    return f"{slurm}{socket.gethostname()}-{os.getpid()}"


def has_result(folder: Path) -> bool:
    """Whether the folder has a record that the study can use: a result, or a failure of the fast path."""
    with contextlib.suppress(UserError):
        record = read_record(folder) if folder.exists() else None
        return record is not None and (record.evaluated or record.fell_back)
    return False


@dataclass
class Worker:
    """One `oelm work`: claims on runs, and a local launcher that trains them side by side."""

    root: Path
    queue: Queue
    jobs: int | None = None  # runs side by side; None: as the study says
    say: Callable[[str], None] = print
    patience: float = STOP_PATIENCE
    launcher: LocalLauncher | None = None
    claims: dict[Path, tuple[Claim, Path]] = field(default_factory=dict)  # work folder -> claim, run's folder
    failing: float | None = None  # since when the shared storage fails

    def run(self, stop: Stop, idle: float | None) -> None:
        """Train runs until the study is finished or cancelled, `stop` has a reason, or there was nothing to
        do for `idle` seconds."""
        busy, announced = time.monotonic(), False
        try:
            while not self._finished():
                try:
                    self._work_once(stop)
                    self.failing = None
                except OSError as error:
                    self._wait_for_storage(error)
                if self.claims:
                    busy, announced = time.monotonic(), False
                waited = time.monotonic() - busy
                if idle is None or waited <= idle:
                    continue
                if self._may_leave(waited):
                    self.say(f"nothing to do for {waited:.0f} s; leaving")
                    return
                if not announced:
                    most = f"{2 * self.queue.expires:.0f} s (twice --expires)"
                    self.say(
                        f"nothing to do for {waited:.0f} s; others train, and one of their runs may come "
                        f"free: leaving after {most}"
                    )
                    announced = True
            self.say("the study is finished")
        finally:
            self._release_all()

    def _finished(self) -> bool:
        with contextlib.suppress(OSError):
            return self.queue.finished.exists()
        return False

    def _may_leave(self, waited: float) -> bool:
        # A run of another worker may become free: its claim expires only after a while.
        with contextlib.suppress(OSError):
            return waited > 2 * self.queue.expires or not self.queue.names()
        return False

    def _work_once(self, stop: Stop) -> None:
        if (self.root / "cancel").exists():
            stop.reason = notice("stop.cancelled")
        if stop.reason is not None:
            self._stop_runs()
            raise Interrupted(stop.reason)
        self._take_runs()
        if self.launcher is None or not self.claims:
            time.sleep(0.5)
        elif (ended := self.launcher.poll(0.5)) is not None:
            self._ended(ended, stopping=False)
        self._beat()

    def _wait_for_storage(self, error: OSError) -> None:
        """Go on although the storage fails, until this worker's claims would expire; then raise the error."""
        self.failing = self.failing or time.monotonic()
        if not is_transient(error) or time.monotonic() - self.failing > self.queue.expires:
            raise error
        time.sleep(0.5)
        self._beat()

    def _release_all(self) -> None:
        """Kill what is still being trained, and only then release the runs to other workers."""
        if self.launcher is not None:
            self.launcher.close()
        for claim, _ in self.claims.values():
            with contextlib.suppress(OSError):
                claim.end("released")

    def _take_runs(self) -> None:
        while self.launcher is None or len(self.claims) < self.launcher.places:
            claim = self.queue.take()
            if claim is None:
                return
            self._start(claim)
            self.queue.refresh()

    def _start(self, claim: Claim) -> None:
        try:
            self._prepare_run(claim)
        except (UserError, OSError):  # another machine may be able to train it
            self.claims.pop(claim.work, None)
            claim.end("released")
            raise

    def _prepare_run(self, claim: Claim) -> None:
        values = self.queue.read(claim.name)
        if values is None:
            self._end(claim, {"kind": "disk", "reason": notice("run.no_job").to_dict()})
            return
        self._check(values)
        folder = self.root / values["folder"]
        # Moved before the result is looked for: after it, an earlier worker can no longer hand over a result.
        self.queue.move_work_folder(claim)
        if has_result(folder):  # another worker has finished the run
            self._end(claim, None)
            shutil.rmtree(claim.work, ignore_errors=True)
            return
        self.claims[claim.work] = (claim, folder)
        if has_result(claim.work):  # the last worker died before it could hand the result over
            self._publish(claim.work)
        elif claim.lost >= MOST_LOST:
            del self.claims[claim.work]
            self._end(
                claim, {"kind": "process", "reason": notice("run.workers_lost", count=claim.lost).to_dict()}
            )
        else:
            self._train(claim, folder, values)

    def _train(self, claim: Claim, folder: Path, values: dict[str, Any]) -> None:
        if self.launcher is None:
            table = StudyConfig(**values["table"])
            table = table if self.jobs is None else replace(table, jobs=self.jobs)
            logs = self.root / "log" / self.queue.owner
            self.launcher = LocalLauncher(table, values["memory_bytes"], logs)
        job = RunJob(rebuild_config(values["config"]), Path(values["dataset"]), claim.work)
        if self.launcher.start(job):
            again = f" (worker {claim.number} of this run)" if claim.number > 1 else ""
            self.say(f"takes {folder.relative_to(self.root / 'runs')}{again}")
        else:
            del self.claims[claim.work]
            claim.end("released")

    def _check(self, values: dict[str, Any]) -> None:
        """Refuse to train on a machine that would not compute the same run."""
        if values["numerics"] != [NUMERICS, NUMERICS_OTHERS]:
            raise UserError(
                f"this machine's oelm has other arithmetic (numerics {NUMERICS}, {NUMERICS_OTHERS}) than the "
                f"study ({', '.join(map(str, values['numerics']))}); install the study's version"
            )
        here = process_state().device.type
        if values["config"]["training"]["precision"] == "auto" and values["device"] != here:
            raise UserError(
                f"the study's precision was chosen for {values['device']}, and this worker has {here}; start "
                "the study again with --precision"
            )
        if not Path(values["dataset"]).is_dir():
            raise UserError(
                f"the prepared dataset {values['dataset']} is not on this machine; set OELM_CACHE_DIR to a "
                "folder that all machines share, and start the study again"
            )

    def _beat(self) -> None:
        """Write the heartbeats that are due, and abandon runs that another worker has taken."""
        for work, (claim, folder) in list(self.claims.items()):
            silent = self.queue.clock() - claim.renewed
            if silent < self.queue.expires / BEATS:
                continue
            try:
                still_claimed = claim.beat()
            except OSError as error:
                if not is_transient(error):
                    raise
                still_claimed = silent < self.queue.expires
            if not still_claimed:
                self._abandon(work, folder)

    def _ended(self, ended: EndedRun, stopping: bool) -> None:
        try:
            self._hand_over(ended, stopping)
        except OSError:  # the next worker finds the run's folder
            if ended.folder in self.claims:
                self.claims.pop(ended.folder)[0].end("released")
            raise

    def _hand_over(self, ended: EndedRun, stopping: bool) -> None:
        claim, folder = self.claims[ended.folder]
        if ended.kind is None or ended.kind in OUTCOMES or has_result(ended.folder):
            self._publish(ended.folder)
            return
        del self.claims[ended.folder]
        name = folder.relative_to(self.root / "runs")
        reason = ended.reason or ended.full_reason
        if stopping or ended.crowded or reason.code == "run.exit_stopped":  # it has saved a checkpoint
            self.say(f"gives back {name}: {reason}")
            claim.end("released")
            return
        reason = ended.full_reason
        self.say(f"{name} failed: {reason}")
        self._end(claim, {"kind": ended.kind, "reason": reason.to_dict()})

    def _publish(self, work: Path) -> None:
        """Move a run that has a result into the study, unless another worker has done so."""
        claim, folder = self.claims.pop(work)
        if not claim.end("finished"):
            self._abandon(work, folder)
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._move(work, folder)
        except FileNotFoundError:  # taken over after the claim had ended: its new worker finds the result
            return
        self.say(f"finished {folder.relative_to(self.root / 'runs')}")
        self.queue.close_job(claim, None)

    def _move(self, work: Path, folder: Path) -> None:
        """Move a result to its folder in the study. A result that is there already counts; anything else is
        set aside."""
        try:
            work.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if has_result(folder):
                shutil.rmtree(work, ignore_errors=True)
                return
            self.say(f"{folder} held no result; moved to {set_aside(self.root, folder)}")
            work.rename(folder)

    def _end(self, claim: Claim, answer: dict[str, Any] | None) -> None:
        if claim.end("finished"):
            self.queue.close_job(claim, answer)

    def _abandon(self, work: Path, folder: Path) -> None:
        """Stop a run that another worker has taken over. Its folder is left: the other worker moves it."""
        self.claims.pop(work, None)
        if self.launcher is not None:
            self.launcher.drop(work)
        self.say(f"lost {folder.relative_to(self.root / 'runs')} to another worker: no sign of life in time")

    def _stop_runs(self) -> None:
        """Ask every run to save a checkpoint, and release it."""
        if self.launcher is None:
            return
        self.launcher.stop()
        end = time.monotonic() + self.patience
        while self.claims and time.monotonic() < end:
            if (ended := self.launcher.poll(0.5)) is not None:
                self._ended(ended, stopping=True)
            self._beat()
        for work, (claim, folder) in list(self.claims.items()):
            self.say(
                f"gives back {folder.relative_to(self.root / 'runs')}: not saved in {self.patience:.0f} s"
            )
            self.launcher.drop(work)  # before another worker may train it
            del self.claims[work]
            claim.end("released")


def work(
    root: Path,
    jobs: int | None,
    idle: float | None,
    expires: float,
    say: Callable[[str], None],
    patience: float = STOP_PATIENCE,
) -> None:
    """Train runs of the study in `root` until there is nothing left to do."""
    queue = Queue(root, worker_name(), expires)
    again = f"oelm study --out {shlex.quote(str(root))}"
    if StudyFolder(root).read().table.launcher == "local":
        raise UserError(f"{root} trains its runs itself; {again} --launcher workers shares them")
    if (root / "cancel").exists():
        raise UserError(f"{root} was cancelled; {again} starts it again")
    with stopping(None) as stop:
        stop.patient = True
        Worker(root, queue, jobs, say, patience).run(stop, idle)
