"""The workers of a study as Slurm sees them: which there are, how to end them, how to queue one again."""

import os
import secrets
import subprocess
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
    """A worker as Slurm sees it."""

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
    """One command of Slurm; where there is none, or it does not answer, it has failed."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def tasks(root: Path) -> list[Task] | None:
    """All workers of a study: what sacct knows, where there is accounting, and what squeue says now. None if
    Slurm does not answer."""
    if (name := job_name(root, make=False)) is None:
        return []
    columns = ("ArrayJobID", "ArrayTaskID", "State", "Reason", "RestartCnt")
    fields = ",".join(f"{column}:|" for column in columns)
    asked = command("squeue", "--me", "-h", "-r", "-t", "all", "--name", name, "-O", fields)
    if asked.returncode:
        return None
    known: dict[str, Task] = {}
    past = command(
        "sacct", "-n", "-P", "-X", "-S", "now-30days", "--name", name, "-o", "JobID,State,Reason,Restarts"
    )
    for line in past.stdout.splitlines() if past.returncode == 0 else ():
        job, state, reason, restarts = (*line.split("|"), "", "", "")[:4]
        known[job] = Task(job, state.partition(" ")[0], reason, int(restarts or 0))
    for line in asked.stdout.splitlines():
        job, number, state, reason, restarts = (part.strip() for part in line.split("|")[:5])
        known[f"{job}_{number}"] = Task(f"{job}_{number}", state, reason, int(restarts or 0))
    return list(known.values())


def job_name(root: Path, make: bool = True) -> str | None:
    """The name of a study's Slurm jobs. It is on disk before the first is submitted, so that they are found
    whatever became of the command that submitted them. None if there is none and none is to be made."""
    path = root / "slurm" / "name"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"oelm-{folder_name(root.absolute().name, 40)}-{secrets.token_hex(4)}\n")
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def cancel(root: Path) -> None:
    """Have Slurm end all workers of a study; they are told, and save their runs."""
    if (name := job_name(root, make=False)) is not None:
        asked = command("scancel", "--me", "--name", name)
        if asked.returncode:
            raise RunError(notice("slurm.refused", command="scancel", error=error_line(asked)), "process")


def requeue() -> bool:
    """Ask Slurm to queue the job that this process is again; False where this is none, or Slurm refuses."""
    array, number = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return array is not None and command("scontrol", "requeue", f"{array}_{number}").returncode == 0


def error_line(asked: "subprocess.CompletedProcess[str]") -> str:
    """What Slurm said, in one line."""
    lines = [line.removeprefix("sbatch: error: ") for line in asked.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"exit code {asked.returncode}"
