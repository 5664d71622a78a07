"""The runs of studies that wait for workers or are in their hands, as `oelm status` shows them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from oelm.study.run_claims import Queue, State
from oelm.study.slurm_jobs import Task, tasks
from oelm.system.messages import notice, read_notice
from oelm.training.status import RunStatus, find_runs, run_status

Workers = dict[Path, list[Task] | None]  # study -> its workers in Slurm; None: Slurm does not answer


def slurm_workers(roots: list[Path]) -> Workers:
    """What Slurm says of the studies at or below these folders; asked once for a picture."""
    return {study: tasks(study) for study in _studies(roots, "slurm/name")}


def all_runs(roots: list[Path], workers: Workers) -> list[RunStatus]:
    """Every run at or below these folders, with those in the queues of studies."""
    runs = [run_status(folder) for folder in find_runs(roots)]
    studies = _studies(roots)
    return runs + [run for study in studies for run in _queued_runs(study, workers.get(study) or [])]


def slurm_lines(workers: Workers) -> list[str]:
    """A line for each worker that Slurm has queued, runs or has seen fail."""
    lines = []
    for known in workers.values():
        told = ["Slurm does not answer"] if known is None else [str(t) for t in known if t.stands != "ended"]
        lines += told
    return lines


def _studies(roots: list[Path], sign: str = "queue/jobs") -> list[Path]:
    return [path.parents[1] for root in roots for path in sorted(root.rglob(sign))]


def _queued_runs(root: Path, workers: list[Task]) -> list[RunStatus]:
    queue = Queue(root)
    runs = []
    for name, state in queue.states():
        if (job := queue.read(name)) is not None:
            status, reason = _stands(state)
            if status != "running":
                reason = "; ".join(filter(None, [reason, _waits_for(state, workers)])) or None
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
    silent = time.time() - state.changed  # by two clocks: it is shown, and decides nothing
    if silent < state.expires:
        return "running", None
    return "requeued", str(notice("run.worker_silent", worker=state.owner, seconds=round(silent)))


def _waits_for(state: State, workers: list[Task]) -> str | None:
    """Slurm's word on the worker that had the run last; or, where no worker runs, on one that does not."""
    for task in workers:
        if state.owner.startswith(f"slurm-{task.name}-") and task.stands in ("requeued", "failed"):
            return str(task)
    if any(task.stands == "running" for task in workers):
        return None  # it waits for its turn
    waiting = [task for task in workers if task.stands in ("queued", "requeued")]
    failed = [task for task in workers if task.stands == "failed"]
    return str((waiting[:1] or failed[-1:])[0]) if waiting or failed else None


def _run(root: Path, work: Path | None, job: dict[str, Any], status: str, reason: str | None) -> RunStatus:
    """The run as far as its worker, or the one before, has come."""
    folder = str(root / job["folder"])
    if work is not None and (work / "config.toml").exists():
        return replace(run_status(work), folder=folder, status=status, reason=reason)
    task, method = Path(job["folder"]).parts[1:3]
    seed = int(job["config"]["training"]["seed"])
    return RunStatus(folder, status, task, method, seed, 0, 0, None, None, None, None, reason)
