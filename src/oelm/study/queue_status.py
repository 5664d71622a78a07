"""The runs of studies that wait for workers or are in their hands, as `oelm status` shows them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from oelm.study.run_claims import EXPIRES, Queue, State
from oelm.study.slurm_jobs import tasks
from oelm.system.messages import notice, read_notice
from oelm.training.status import RunStatus, find_runs, run_status


def all_runs(roots: list[Path]) -> list[RunStatus]:
    """Every run at or below these folders, with those in the queues of studies."""
    runs = [run_status(folder) for folder in find_runs(roots)]
    return runs + [run for study in _studies(roots) for run in _queued_runs(study)]


def slurm_lines(roots: list[Path]) -> list[str]:
    """A line for each worker that Slurm has queued, runs or has seen fail."""
    lines = []
    for study in _studies(roots, "slurm/name"):
        known = tasks(study)
        lines += (
            ["Slurm does not answer"] if known is None else [str(t) for t in known if t.stands != "ended"]
        )
    return lines


def _studies(roots: list[Path], sign: str = "queue/jobs") -> list[Path]:
    return [path.parents[1] for root in roots for path in sorted(root.rglob(sign))]


def _queued_runs(root: Path) -> list[RunStatus]:
    queue = Queue(root)
    waiting = [str(task) for task in tasks(root) or () if task.stands in ("queued", "requeued", "failed")]
    runs = []
    for name, state in queue.states():
        if (job := queue.read(name)) is not None:
            status, reason = _stands(state)
            if status != "running" and waiting:
                reason = "; ".join(filter(None, [reason, waiting[-1]]))
            runs.append(_run(root, queue.work_folder(name), job, status, reason))
    for name in sorted(path.parent.name for path in queue.ended.glob("*/answer.json")):
        answer, job = queue.answer(name), queue.read(name, ended=True)
        if answer is not None and job is not None:
            reason = str(read_notice(answer["reason"]))
            runs.append(_run(root, queue.work_folder(name), job, "failed", reason))
    return runs


def _stands(state: State) -> tuple[str, str | None]:
    if state.event in ("queued", "released"):
        return ("queued" if state.event == "queued" else "requeued"), None
    silent = time.time() - state.changed  # by two clocks: good enough to be shown
    if silent < EXPIRES:
        return "running", None
    return "requeued", str(notice("run.worker_silent", worker=state.owner, seconds=round(silent)))


def _run(root: Path, work: Path | None, job: dict[str, Any], status: str, reason: str | None) -> RunStatus:
    """The run as far as its worker, or the one before, has come."""
    folder = str(root / job["folder"])
    if work is not None and (work / "config.toml").exists():
        return replace(run_status(work), folder=folder, status=status, reason=reason)
    task, method = Path(job["folder"]).parts[1:3]
    seed = int(job["config"]["training"]["seed"])
    return RunStatus(folder, status, task, method, seed, 0, 0, None, None, None, None, reason)
