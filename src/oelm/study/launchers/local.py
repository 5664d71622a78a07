"""Runs on this machine: worker processes (`oelm.study.worker`), each training one run after another."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from oelm.errors import OUTCOMES, UserError
from oelm.study.design import StudyConfig
from oelm.study.launchers.interface import EndedRun, Launcher, RunJob
from oelm.study.launchers.mps import MpsDaemon, start_daemons
from oelm.system.messages import Notice, notice, read_notice

PROCESS_BYTES = 1.2e9  # of a process that has imported torch, before it holds a model
MOST_PER_GPU = 8  # runs that share a GPU: more only queue for its processors
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A place for one run: the environment its process starts in."""

    environment: dict[str, str]
    processes: int = 1

    @property
    def gpu(self) -> str | None:
        """The GPU, or GPUs, visible to its run."""
        return self.environment.get(GPUS)


def slots_for(table: StudyConfig, memory_bytes: float) -> list[Slot]:
    """Places for runs that need this much memory each: on every GPU, or on the CPU's cores."""
    import torch

    # With all cores for each run, runs wait for one another: 15 on one GPU were several times slower.
    environment = {"OMP_NUM_THREADS": str(table.threads)}
    size = table.gpus_per_run
    each = memory_bytes + PROCESS_BYTES
    # Slurm's limits for this job, as not every cluster binds processes to them.
    cores = min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE", 1 << 20)))
    memory = min(
        psutil.virtual_memory().available, float(os.environ.get("SLURM_MEM_PER_NODE", 1 << 40)) * 2**20
    )
    count = torch.cuda.device_count()
    if not count:
        room = table.memory_gb * 1e9 or 0.8 * memory
        jobs = table.jobs or max(1, min(cores // (table.threads * size), int(room // (each * size))))
        if size > 1:
            environment["ACCELERATE_USE_CPU"] = "1"
        return [Slot(environment, size)] * jobs
    gpus = os.environ.get(GPUS, ",".join(map(str, range(count)))).split(",")
    if size > len(gpus):
        raise UserError(f"study.gpus_per_run is {size}, but there are {len(gpus)} GPUs")
    groups = [",".join(gpus[i : i + size]) for i in range(0, len(gpus) - size + 1, size)]
    room = table.memory_gb * 1e9 or 0.8 * torch.cuda.mem_get_info()[0]
    per_group = max(1, min(MOST_PER_GPU, cores // len(groups) // 2, int(room // each))) if size == 1 else 1
    jobs = table.jobs or per_group * len(groups)
    devices = [groups[i % len(groups)] for i in range(jobs)]
    return [Slot(environment | {GPUS: device}, size) for device in devices]


class WorkerProcess:
    """One worker process, and the run it trains (None while it waits for one)."""

    def __init__(self, slot: Slot, environment: dict[str, str], log: Path, answers: queue.Queue[Any]) -> None:
        self.slot, self.log = slot, log
        self.job: RunJob | None = None
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oelm.study.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the study, which tells its workers itself
            )  # fmt: skip
        threading.Thread(target=self._read_answers, args=(answers,), daemon=True).start()

    def _read_answers(self, answers: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                answers.put((self, json.loads(line)))
        answers.put((self, None))

    def train(self, job: RunJob) -> None:
        assert self.process.stdin is not None
        self.job = job
        values = {"config": job.config.to_dict(), "processes": self.slot.processes}
        values |= {"store": str(job.dataset), "out": str(job.folder), "gpu": bool(self.slot.gpu)}
        with contextlib.suppress(BrokenPipeError):  # the process has died: `_read_answers` reports it
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        if self.job:
            self._kill()
        with contextlib.suppress(BrokenPipeError):  # it died before it had read its job
            self.process.stdin.close()
        self.process.wait()

    def _kill(self) -> None:
        """Kill the process and its children one by one, as torchrun gives each a session of its own. A child
        that torchrun is just starting ends itself once this process is gone (`oelm.study.worker`)."""
        started = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=10)


class LocalLauncher(Launcher):
    """Worker processes on this machine, at most one for each slot."""

    def __init__(self, table: StudyConfig, memory_bytes: float, logs: Path) -> None:
        self.slots, self.logs = slots_for(table, memory_bytes), logs
        self.workers: list[WorkerProcess] = []
        self.answers: queue.Queue[Any] = queue.Queue()  # (worker, its answer on a run; None: it died)
        self.started = 0
        self.daemons: dict[str, MpsDaemon] | None = None  # by GPU; None: not started yet
        self.sharing = True  # new workers share their GPU by its daemon, if it has one

    @property
    def places(self) -> int:
        return len(self.slots)

    def prepare(self, runs: int) -> None:
        """Start workers early, as importing torch takes seconds."""
        with contextlib.suppress(OSError):  # `start` meets the same error, and reports it
            while len(self.workers) < min(runs, len(self.slots)):
                self._start_worker()

    def start(self, job: RunJob) -> bool:
        worker = next((w for w in self.workers if w.job is None), None)
        if worker is None:
            if len(self.workers) >= len(self.slots):
                return False
            worker = self._start_worker()
        worker.train(job)
        return True

    def _start_worker(self) -> WorkerProcess:
        """A worker in a free slot."""
        free = list(self.slots)
        for busy in self.workers:
            free.remove(busy.slot)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"worker-{self.started}.log"
        worker = WorkerProcess(free[0], self._environment(free[0]), log, self.answers)
        self.started += 1
        self.workers.append(worker)
        return worker

    def environments(self) -> list[dict[str, str]]:
        return [self._environment(slot) for slot in self.slots if slot.processes == 1]

    def _environment(self, slot: Slot) -> dict[str, str]:
        """The environment variables of a process in this slot."""
        if self.daemons is None:
            per_gpu = Counter(slot.gpu for slot in self.slots if slot.gpu and slot.processes == 1)
            self.daemons = start_daemons([gpu for gpu, runs in per_gpu.items() if runs > 1])
        daemon = self.daemons.get(slot.gpu or "") if self.sharing else None
        return os.environ | slot.environment | (daemon.environment if daemon else {})

    def poll(self, seconds: float) -> EndedRun | None:
        try:
            worker, answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            return None
        job, worker.job = worker.job, None
        if job is None:
            if answer is None and worker in self.workers:
                self.workers.remove(worker)
            return None
        if answer is not None and answer["status"] == "completed":
            return EndedRun(job.folder)
        kind, reason = _cause(worker, answer)
        if kind in OUTCOMES:
            return EndedRun(job.folder, kind, reason)
        # A fault may have damaged the process too, such as its GPU's state: the next run gets a new one.
        self.workers.remove(worker)
        worker.close()
        self.sharing &= kind != "device"  # it may have been the daemon that failed
        # Memory may have been short only because other runs share it.
        others = [w.slot for w in self.workers if w.job is not None]
        crowded = (kind == "memory" and bool(others)) or (kind == "gpu_memory" and worker.slot in others)
        if crowded:
            self.slots.remove(worker.slot)
        return EndedRun(job.folder, kind, reason, worker.log, crowded)

    def drop(self, folder: Path) -> None:
        """Kill the process that trains the run in this folder, if there is one; `poll` does not report it."""
        for worker in [w for w in self.workers if w.job is not None and w.job.folder == folder]:
            self.workers.remove(worker)
            worker.close()
            worker.job = None

    def stop(self) -> None:
        for worker in self.workers:
            if worker.job is not None:
                worker.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for daemon in (self.daemons or {}).values():  # it waits for its clients
            daemon.close()
        self.workers, self.daemons = [], None
        for log in self.logs.glob("worker-*.log"):
            if not log.stat().st_size:
                log.unlink()
        with contextlib.suppress(OSError):  # not empty, or never made
            self.logs.rmdir()


def _cause(worker: WorkerProcess, answer: dict[str, Any] | None) -> tuple[str, Notice]:
    """The kind of a failure and its reason; for a process that died they come from its exit code."""
    if answer is None:
        code = worker.process.wait()
        if code >= 0:
            return "process", notice("run.exit_code", code=code)
        names = {-number: number.name for number in signal.Signals}
        return "process", notice("run.exit_signal", number=-code, name=names.get(code))
    reason = read_notice(answer["reason"])
    if answer["status"] == "interrupted":
        return "process", notice("run.exit_stopped", reason=reason)
    return str(answer["kind"]), reason
