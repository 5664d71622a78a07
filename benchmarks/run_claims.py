"""How long planning a study of 10,000 runs takes, and claiming one with 100 workers on one folder.

    python benchmarks/run_claims.py FOLDER --out benchmarks/run_claims.json

FOLDER lies on the file system that is measured. Nothing is trained. Planning is what `oelm study` does from
prepared data to the first queued run: which runs are due, and where each of them lies. Then all of them are
queued, and 100 processes claim runs, wait some seconds as if they trained them, and end them. Once they have
a run they list the others where `oelm work` does, beside the training: that is timed on its own.
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
from collections.abc import Callable
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

RUNS, WORKERS, ENOUGH = 10_000, 100, 25  # ENOUGH: claims of each worker


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


Times = tuple[float, float]  # seconds by the clock, and of the worker's own processor time


def timed(action: Callable[[], Any]) -> tuple[Any, Times]:
    began = (time.perf_counter(), time.process_time())
    made = action()
    return made, (time.perf_counter() - began[0], time.process_time() - began[1])


def claim_runs(root: Path, ready: Any, times: Any) -> None:
    """A worker: it claims a run, has it for a while, gives a sign of life, ends it, and goes on; `times`: of
    the claims, and of the lists of all runs that it made after them."""
    queue, claims, lists = Queue(root, str(os.getpid())), list[Times](), list[Times]()
    ready.wait()
    time.sleep(random.uniform(0, 4))
    for _ in range(ENOUGH):
        claim, took = timed(queue.take)
        claims.append(took)
        if queue._stale:
            lists.append(timed(queue.refresh)[1])
        time.sleep(random.uniform(0, 4))
        assert claim is not None and claim.beat() and claim.end("finished")
        queue.close_job(claim, None)
    times.put((claims, lists))


def milliseconds(times: list[Times], which: int) -> dict[str, float]:
    seconds = sorted(one[which] for one in times)
    return {
        "n": len(seconds),
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
    kinds = {
        "claim": [one for claims, _ in workers for one in claims],
        "first_claim": [claims[0] for claims, _ in workers],
        "later_claim": [one for claims, _ in workers for one in claims[1:]],
        "list": [one for _, lists in workers for one in lists],
    }
    summaries = {f"{name}_ms": milliseconds(times, 0) for name, times in kinds.items()}
    summaries |= {f"{name}_cpu_ms": milliseconds(times, 1) for name, times in kinds.items()}
    return {
        "runs": RUNS, "workers": WORKERS, "claims": WORKERS * ENOUGH,
        "planning_s": round(planning, 3), "queueing_s": round(queueing, 3),
        **summaries,
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
