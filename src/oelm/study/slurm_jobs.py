"""The workers of a study as Slurm jobs: list them, end them, queue one again."""

import os
import secrets
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from oelm.errors import RunError
from oelm.system.files import folder_name, write_text
from oelm.system.messages import notice

PATIENCE = 60.0  # seconds for one command of Slurm
LIVE = (
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "SUSPENDED",
    "RESIZING",
)


@dataclass(frozen=True)
class Task:
    name: str  # 123_0
    state: str  # as squeue and sacct call it
    reason: str  # Slurm's, such as Resources or TimeLimit
    restarts: int

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def stands(self) -> str:
        """queued, requeued, running, ended or failed."""
        if self.state == "PENDING":
            return "requeued" if self.restarts else "queued"
        if self.live:
            return "running"
        return "ended" if self.state in ("COMPLETED", "CANCELLED") else "failed"

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("None", "") else ""
        again = f", started again {self.restarts} times" if self.restarts > 1 else ""
        return f"Slurm job {self.name}: {self.stands}, {self.state}{why}{again}"


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm; if it does not exist or does not answer, the result has exit code 1."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def tasks(root: Path) -> list[Task] | None:
    """All workers of a study: those that squeue lists and, on a cluster with accounting, those that ended
    according to sacct. None if Slurm does not answer."""
    if (name := job_name(root, make=False)) is None:
        return []
    columns = ("ArrayJobID", "ArrayTaskID", "State", "Reason", "RestartCnt")
    fields = ",".join(f"{column}:|" for column in columns)
    queue = command("squeue", "--me", "-h", "-r", "-t", "all", "--name", name, "-O", fields)
    if queue.returncode:
        return None
    known: dict[str, Task] = {}
    # Not every version of sacct has a field for restarts, but all list a job once for each start.
    accounting = command(
        "sacct", "-n", "-P", "-X", "-D", "-S", "now-30days", "--name", name, "-o", "JobID,State,Reason"
    )
    starts = Counter[str]()
    for line in accounting.stdout.splitlines() if accounting.returncode == 0 else ():
        job, state, reason = (*line.split("|"), "", "")[:3]
        starts[job] += 1
        task = Task(job, state.partition(" ")[0], reason, starts[job] - 1)
        known.pop(job, None)
        if not task.live:  # squeue has the live ones, with arrays that are not yet split ("12_[0-3]")
            known[job] = task
    for line in queue.stdout.splitlines():
        job, number, state, reason, restarts = (part.strip() for part in line.split("|")[:5])
        known[f"{job}_{number}"] = Task(f"{job}_{number}", state, reason, int(restarts or 0))
    return list(known.values())


def job_name(root: Path, make: bool = True) -> str | None:
    """The name of a study's Slurm jobs. It is written before the first job is submitted, so that jobs can be
    listed even if the command that submitted them died. None if there is none and `make` is False."""
    path = root / "slurm" / "name"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"oelm-{folder_name(root.absolute().name, 40)}-{secrets.token_hex(4)}\n")
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def cancel(root: Path, patience: float) -> None:
    """End all workers of a study: pending ones at once, running ones when their runs are saved, for which
    they have `patience` seconds."""
    if (name := job_name(root, make=False)) is None:
        return
    _end_jobs(name, "--state=PENDING")
    # The signal goes to the worker alone, which stops its runs: Slurm would kill all after a short wait.
    command("scancel", "--me", "--name", name, "--signal=TERM", "--batch")
    end = time.monotonic() + patience
    while (known := tasks(root)) is None or any(task.live for task in known):
        if time.monotonic() > end:
            _end_jobs(name)
            return
        if any(task.state == "PENDING" for task in known or ()):  # queued again just now
            _end_jobs(name, "--state=PENDING")
        time.sleep(1)


def _end_jobs(name: str, *which: str) -> None:
    answer = command("scancel", "--me", "--name", name, *which)
    if answer.returncode:
        raise RunError(notice("slurm.refused", command="scancel", error=error_line(answer)), "process")


def requeue() -> bool:
    """Ask Slurm to queue this process's job again; False if it is not a Slurm job, or Slurm refuses."""
    array, number = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return array is not None and command("scontrol", "requeue", f"{array}_{number}").returncode == 0


def error_line(answer: "subprocess.CompletedProcess[str]") -> str:
    """Slurm's error message, in one line."""
    lines = [line.removeprefix("sbatch: error: ") for line in answer.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {answer.returncode}"
