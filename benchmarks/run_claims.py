"""How long planning a study of 10,000 runs takes, and claiming one with 100 workers on one folder.

    python benchmarks/run_claims.py FOLDER --out benchmarks/run_claims.json

FOLDER lies on the file system that is measured. Nothing is trained. Planning is what `oelm study` does from
prepared data to the first queued run: which runs are due, and where each of them lies. Then all of them are
queued, and 100 processes claim runs, wait some seconds as if they trained them, and end them.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oelm.study.design import make_study
from oelm.study.folder import Setting
from oelm.study.launchers.workers import WorkersLauncher
from oelm.study.run_claims import Queue
from oelm.study.scheduler import Scheduler
from oelm.training.folder import environment
from oelm.training.stopping import Stop

RUNS, WORKERS, ENOUGH = 10_000, 100, 5  # ENOUGH: claims of each worker


def plan(root: Path) -> tuple[Scheduler, float]:
    """A study of 10,000 trials, and the seconds that finding them took."""
    study = make_study(
        {
            "task": {"name": "imdb"}, "model": {"name": "gpt-tiny"},
            "study": {"lrs": [1e-5 * (n + 1) for n in range(50)], "choose_seeds": 100, "launcher": "workers"},
        }
    )  # fmt: skip
    store: Any = SimpleNamespace(
        task="imdb", metric="accuracy", fingerprint="0" * 64, folder=root / "dataset"
    )
    setting = Setting(study, study.task_config(None), store, "fp32")
    launcher = WorkersLauncher(study.table, 1e9, root / "log")
    scheduler = Scheduler([setting], root, launcher, "none")
    began = time.perf_counter()
    scheduler._find_due_runs()
    took = time.perf_counter() - began
    assert len(scheduler.progress.waiting) == RUNS
    return scheduler, took


def claim_runs(root: Path, ready: Any, times: Any) -> None:
    """A worker: it claims a run, gives a sign of life, ends it, and goes on; `times`: of the claims, by the
    clock and of its own processor."""
    queue, taken = Queue(root, str(os.getpid())), []
    ready.wait()
    for _ in range(ENOUGH):
        time.sleep(random.uniform(0, 8))
        began = (time.perf_counter(), time.process_time())
        claim = queue.take()
        taken.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        assert claim is not None and claim.beat() and claim.end("finished")
        queue.close_job(claim, None)
    times.put(taken)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    seconds = sorted(seconds)
    return {
        "median": round(1e3 * statistics.median(seconds), 3),
        "p95": round(1e3 * seconds[int(0.95 * len(seconds))], 3),
        "largest": round(1e3 * seconds[-1], 3),
    }


def measure(root: Path) -> dict[str, Any]:
    scheduler, planning = plan(root)
    began = time.perf_counter()
    scheduler._start_runs(Stop())
    queueing = time.perf_counter() - began
    context = multiprocessing.get_context("fork")
    ready, times = context.Barrier(WORKERS), context.Queue()
    processes = [context.Process(target=claim_runs, args=(root, ready, times)) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    workers = [times.get() for _ in processes]
    for process in processes:
        process.join()
    assert len(Queue(root).names()) == RUNS - WORKERS * ENOUGH, "a run was claimed twice, or not at all"
    return {
        "runs": RUNS, "workers": WORKERS, "claims": WORKERS * ENOUGH,
        "planning_s": round(planning, 3), "queueing_s": round(queueing, 3),
        "claim_ms": milliseconds([one for taken in workers for one, _ in taken]),
        "first_claim_ms": milliseconds([taken[0][0] for taken in workers]),  # the worker lists the runs
        "later_claim_ms": milliseconds([one for taken in workers for one, _ in taken[1:]]),
        "first_claim_cpu_ms": milliseconds([taken[0][1] for taken in workers]),
        "later_claim_cpu_ms": milliseconds([cpu for taken in workers for _, cpu in taken[1:]]),
        "load": os.getloadavg(),  # processes that wanted to run, with those of others
        "environment": environment(SimpleNamespace(type="cpu"), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    root = arguments.folder / "claims-benchmark"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        record = measure(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = json.dumps({"command": "python " + " ".join(sys.argv)} | record, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
