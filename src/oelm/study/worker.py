"""A process that trains one run after another: importing torch once serves many runs.

Jobs come as lines of JSON on standard input, answers go as lines of JSON to standard output. When the
process that gives the jobs is gone, so is this one: a run is never trained by two at once.
"""

import gc
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from oelm.config import rebuild_config
from oelm.data import open_store
from oelm.errors import REQUEUE, AuditError, Interrupted, RunError, UserError
from oelm.training.loop import train

LOCK_PATIENCE = 20.0  # seconds for a killed predecessor to let go of a run's folder


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train one run to its end. What it leaves is records and, where it was tested, a model."""
    try:
        if job["processes"] > 1 and "WORLD_SIZE" not in os.environ:
            _launch(job)
        else:
            _train(job)
    except Interrupted as reason:
        return {"status": "interrupted", "reason": str(reason)}
    except (UserError, RunError, AuditError) as error:
        return {"status": "failed", "reason": str(error)}
    except torch.OutOfMemoryError as error:
        return {"status": "no memory", "reason": str(error).splitlines()[0]}
    except Exception as error:  # a study goes on without this run; the worker's log has the whole story
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"status": "completed"}


def _train(job: dict[str, Any]) -> None:
    config, store, out = rebuild_config(job["config"]), open_store(job["store"]), Path(job["out"])
    end = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            train(config, store, out, show=False)
            break
        except UserError as error:
            if "in use by another process" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.2)
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _launch(job: dict[str, Any]) -> None:
    """One run as several processes."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(job))
        file.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(job["processes"]), "-m", "oelm.study.worker", file.name]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
    results = Path(job["out"]) / "results.json"
    found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    if found.get("status") == "interrupted":
        raise Interrupted(found["reason"])
    if code or found.get("status") != "completed":
        raise RunError(found.get("reason") or f"its processes ended with exit code {code}")


def _read(jobs: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with the processes it may have launched
    os._exit(1)


def main() -> None:
    if len(sys.argv) > 1:  # one of several processes of one run
        answer = run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        sys.exit({"completed": 0, "interrupted": REQUEUE}.get(answer["status"], 1))
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        answer = run(jobs.get())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
