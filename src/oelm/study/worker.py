"""A process that trains one run after another: importing torch once serves many runs.

Jobs come as lines of JSON on standard input, answers go as lines of JSON to standard output. This process
ends when the one that gives the jobs is gone, and the processes of a run end with the one that launched them,
so that a run is never trained twice at once.
"""

import contextlib
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
from oelm.errors import REQUEUE, AuditError, FolderInUse, Interrupted, RunError, UserError
from oelm.system.files import write_json
from oelm.system.messages import notice, read_notice
from oelm.system.plugins import load_plugins
from oelm.system.terminal import reserve_stdout
from oelm.training.failure import failure_kind, reason_of
from oelm.training.loop import train

LOCK_PATIENCE = 20.0  # seconds for a killed predecessor to release the lock of a run's folder


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train one run to its end: its status and, where it failed, the kind of failure and the reason."""
    try:
        if job["processes"] > 1 and "WORLD_SIZE" not in os.environ:
            _launch(job)
        else:
            _train(job)
    except Interrupted as reason:
        return {"status": "interrupted", "reason": reason.notice.to_dict()}
    except Exception as error:
        if not isinstance(error, RunError | UserError | AuditError):  # unexpected: keep the traceback
            with contextlib.suppress(OSError):  # the log may lie on a disk that is full
                traceback.print_exc()
        return {"status": "failed", "kind": failure_kind(error), "reason": reason_of(error).to_dict()}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"status": "completed"}


def _train(job: dict[str, Any]) -> None:
    if job["gpu"] and not torch.cuda.is_available():  # torch would train on the CPU without a warning
        raise RunError(notice("run.no_gpu"), "device")
    config = rebuild_config(job["config"])
    load_plugins(config.plugins)
    store, out = open_store(job["store"]), Path(job["out"])
    end = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            train(config, store, out, show=False)
            break
        except FolderInUse:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _launch(job: dict[str, Any]) -> None:
    """Train one run as several processes; each writes its answer beside the job's file."""
    terminated = False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job | {"launched_by": os.getpid()}), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(job["processes"]), "-m", "oelm.study.worker", str(file)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)

        def stop(*_: Any) -> None:
            nonlocal terminated
            terminated = True
            process.terminate()

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("answer-*")]
    if code == 0:
        return
    if terminated:
        raise Interrupted(notice("stop.signal", signal="SIGTERM"))
    failed = [answer for answer in answers if answer["status"] == "failed"]
    # Processes that wait for a failed one end too, with their library's error: the first cause sorts first.
    failed.sort(key=lambda answer: answer["kind"] in ("software", "process"))
    if failed:
        raise RunError(read_notice(failed[0]["reason"]), failed[0]["kind"])
    raise RunError(notice("run.exit_code", code=code), "process")


def _watch(launched_by: int) -> None:
    """End this process, one of several of a run, when torchrun or the worker that launched it is gone."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        torchrun = psutil.Process(os.getppid())
        while torchrun.ppid() == launched_by and os.getppid() == torchrun.pid:
            time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _read(jobs: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with the processes it may have launched
    os._exit(1)


def main() -> None:
    if len(sys.argv) > 1:  # one of several processes of one run
        job = Path(sys.argv[1])
        values = json.loads(job.read_text(encoding="utf-8"))
        threading.Thread(target=_watch, args=(values["launched_by"],), daemon=True).start()
        answer = run(values)
        write_json(job.with_name(f"answer-{os.environ['RANK']}"), answer)
        sys.exit({"completed": 0, "interrupted": REQUEUE}.get(answer["status"], 1))
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    answers = reserve_stdout()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        answer = run(jobs.get())
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
