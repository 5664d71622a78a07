"""Make the runs of a study: side by side, in processes that train one run after another."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oelm.errors import OUTCOMES, Interrupted, RunError, UserError
from oelm.study.folder import Setting
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import read_record
from oelm.system.library_errors import first_line
from oelm.system.messages import Notice, notice, read_notice
from oelm.training.failure import failure_kind
from oelm.training.session import Stop

STOP_PATIENCE = 120.0  # seconds for running runs to save when the study is told to stop
# Seconds before each further attempt at a run that a fault ended; after the last one the study stops.
PAUSES = (1.0, 5.0, 30.0)
DISK_PAUSES = (*PAUSES, 60.0, 120.0)  # someone may be making room
# What to do about a fault that does not pass. Every kind of `oelm.errors.FAULTS` that a run can have.
ADVICE = {
    "memory": notice("advice.study_memory"),
    "gpu_memory": notice("advice.study_memory"),
    "disk": notice("advice.study_disk"),
    "process": notice("advice.study_process"),
    "device": notice("advice.study_device"),
    "software": notice("advice.study_software"),
    "input": notice("advice.study_input"),
}


@dataclass(frozen=True)
class Slot:
    """Room for one run: the environment its process starts in."""

    environment: dict[str, str]
    processes: int = 1


class Worker:
    """One process that trains, and what it is busy with."""

    def __init__(self, slot: Slot, number: int, logs: Path, answers: "queue.Queue[Any]") -> None:
        self.slot, self.log = slot, logs / f"worker-{number}.log"
        self.job: Run | None = None
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oelm.study.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | slot.environment,
                start_new_session=True,  # Ctrl-C is for the study, which tells its workers itself
            )  # fmt: skip
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def _listen(self, answers: "queue.Queue[Any]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answers.put((self, json.loads(line)))
        answers.put((self, None))

    def give(self, run: "Run") -> None:
        assert self.process.stdin is not None
        self.job = run
        job = {
            "config": run.setting.run_config(run.cell).to_dict(),
            "store": str(run.setting.store.folder),
            "out": str(run.folder),
            "processes": self.slot.processes,
        }
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: its listener says so

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died before it had read its job
            self.process.kill() if self.job else self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Run:
    setting: Setting
    cell: Cell
    folder: Path

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{self.setting.task} {cell.method} lr {cell.lr:g} seed {cell.seed}"


@dataclass
class Progress:
    """Where a study stands, for whoever shows it."""

    settings: list[Setting]
    matrices: list[Matrix] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)
    waiting: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # run -> reason, where training itself went wrong
    done: int = 0
    news: list[str] = field(default_factory=list)  # lines to print once


class Runner:
    """The loop of a study: ask the matrix what is needed, give it to whoever is free, listen.

    A run that fails by its mathematics has a result. One that a fault ended has none: it is made again after
    a pause, and where that does not help the study stops, so that no fault decides a comparison.
    """

    def __init__(self, settings: list[Setting], root: Path, slots: list[Slot], keep_models: str) -> None:
        self.root, self.slots, self.keep_models = root, list(slots), keep_models
        self.progress = Progress(settings)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.workers: list[Worker] = []
        self.started = 0
        self.faults: Counter[Path] = Counter()  # that ended a run, by its folder
        self.not_before = 0.0  # the moment from which runs are started again after a fault
        self.broken: RunError | None = None  # the fault that stops the study
        self.stopping = False

    def run(self, stop: Stop, show: Any) -> Progress:
        """Until nothing is needed any more. `show(progress)` is called about twice a second."""
        (self.root / "log").mkdir(parents=True, exist_ok=True)
        try:
            while self._plan():
                if stop.reason is not None or self.broken is not None:
                    self._wind_up()
                    show(self.progress)
                    raise self.broken or Interrupted(stop.reason or "")
                self._hand_out()
                show(self.progress)
                self._listen(0.5)
            show(self.progress)
            return self.progress
        finally:
            for worker in self.workers:
                worker.close()

    def _plan(self) -> bool:
        """What every setting needs now; False when all is done."""
        progress = self.progress
        busy = {run.folder for run in progress.running}
        progress.matrices, progress.waiting = [], []
        progress.done = 0
        for setting in progress.settings:
            matrix = self._unfolded(setting)
            progress.matrices.append(matrix)
            for cell in matrix.needed:
                if cell in setting.scores:
                    progress.done += 1
                    continue
                run = Run(setting, cell, setting.folder(self.root, cell))
                if run.folder not in busy:
                    progress.waiting.append(run)
        return bool(progress.waiting or progress.running)

    def _unfolded(self, setting: Setting) -> Matrix:
        """The matrix with everything that is on disk taken into account."""
        while True:
            matrix = setting.unfold()
            fresh = False
            for cell in matrix.needed:
                if cell not in setting.scores and self._look_up(setting, cell):
                    fresh = True
            if not fresh:
                return matrix

    def _look_up(self, setting: Setting, cell: Cell) -> bool:
        folder = setting.folder(self.root, cell)
        try:
            record = read_record(folder) if folder.exists() else None
        except UserError as error:
            self._set_aside(folder, str(error))
            return False
        if record is None or not record.evaluated:
            return False
        if record.completed and record.fell_back:
            setting.take_plain_path(cell)
            self.progress.news.append(
                f"{Run(setting, cell, folder).name}: the fast path gave out at step "
                f"{record.arithmetic['plain_from']}; all runs of this seed are made by the plain path"
            )
            return False
        setting.scores[cell] = record.validation
        if not record.completed:
            self.progress.failed[Run(setting, cell, folder).name] = str(record.reason or "")
            return True
        if record.test is not None:
            setting.tests[cell] = record.test
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self._prune(setting, cell)
        return True

    def _set_aside(self, folder: Path, why: str) -> None:
        """A run whose record cannot be read is made again; what is left of it is kept apart."""
        aside = self.root / "damaged" / folder.name
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
        self.progress.news.append(f"{why}; moved to {aside}, and the run is made again")

    def _prune(self, setting: Setting, cell: Cell) -> None:
        """Keep the models the study is to keep: of each method the best by validation."""
        if cell.choosing or self.keep_models == "all":
            return
        cells = [c for c in setting.scores if c.method == cell.method and not c.choosing]
        sign = 1 if setting.larger_is_better else -1
        scored = [(sign * score, -c.seed, c) for c in cells if (score := setting.scores[c]) is not None]
        best = max(scored)[2] if scored and self.keep_models == "best" else None
        for c in cells:
            if c != best:
                shutil.rmtree(setting.folder(self.root, c) / "model", ignore_errors=True)

    def _hand_out(self) -> None:
        while self.progress.waiting and time.monotonic() >= self.not_before:
            worker = next((w for w in self.workers if w.job is None), None)
            run = self.progress.waiting[0]
            if worker is None:
                free = [slot for slot in self.slots if all(w.slot is not slot for w in self.workers)]
                if not free:
                    return
                try:
                    worker = Worker(free[0], self.started, self.root / "log", self.answers)
                except OSError as error:
                    self._fault(run, failure_kind(error), notice("run.no_process", error=first_line(error)))
                    return
                self.started += 1
                self.workers.append(worker)
            self.progress.waiting.pop(0)
            self.progress.running.append(run)
            worker.give(run)

    def _listen(self, seconds: float) -> None:
        try:
            worker, answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            return
        run, worker.job = worker.job, None
        if run is None:
            if answer is None and worker in self.workers:
                self.workers.remove(worker)
            return
        self.progress.running.remove(run)
        recorded = self._look_up(run.setting, run.cell)  # that counts, whatever became of its process
        if recorded:
            self.progress.news.append(_line(run))
        if answer is not None and answer["status"] == "completed":
            return
        kind, reason = _cause(worker, answer)
        if kind in OUTCOMES:
            if recorded:
                return
            kind, reason = "disk", notice("run.no_record")
        # A fault may have spoilt the process too, such as its GPU's state: the next run gets a fresh one.
        self.workers.remove(worker)
        worker.close()
        if recorded:
            return
        if self._is_crowded(worker, kind):
            self.slots = [slot for slot in self.slots if slot is not worker.slot]
            self.progress.news.append(f"{run.name}: out of memory; fewer runs side by side from now on")
        else:
            self._fault(run, kind, reason, worker.log)

    def _is_crowded(self, worker: Worker, kind: str) -> bool:
        """Whether the memory that was not enough is shared with other runs."""
        others = [w for w in self.workers if w.job is not None]
        if kind == "gpu_memory":
            others = [w for w in others if w.slot.environment == worker.slot.environment]
        return kind in ("memory", "gpu_memory") and bool(others)

    def _fault(self, run: Run, kind: str, reason: Notice, log: Path | None = None) -> None:
        """Nothing is known about the run: make it again after a pause, or stop the study."""
        if self.stopping:
            return
        if log is not None and kind in ("process", "software", "device"):
            reason = notice("run.see_log", reason=reason, log=log)
        self.faults[run.folder] += 1
        attempts, pauses = self.faults[run.folder], DISK_PAUSES if kind == "disk" else PAUSES
        if attempts <= len(pauses):
            pause = pauses[attempts - 1]
            self.not_before = max(self.not_before, time.monotonic() + pause)
            self.progress.news.append(f"{run.name}: {reason}; trying again in {pause:g} s")
            return
        stopped = notice("study.stopped", run=run.name, attempts=attempts, reason=reason)
        self.broken = self.broken or RunError(stopped, kind, ADVICE[kind])

    def _wind_up(self) -> None:
        """Every running run saves and stops."""
        self.stopping = True
        for worker in self.workers:
            if worker.job is not None:
                worker.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_PATIENCE
        while self.progress.running and time.monotonic() < end:
            self._listen(0.5)


def _cause(worker: Worker, answer: dict[str, Any] | None) -> tuple[str, Notice]:
    """Of which kind a failure is, and the reason. A process that is gone has said nothing."""
    if answer is None:
        code = worker.process.wait()
        if code >= 0:
            return "process", notice("run.exit_code", code=code)
        known = {-number: number.name for number in signal.Signals}
        return "process", notice("run.exit_signal", number=-code, name=known.get(code))
    reason = read_notice(answer["reason"])
    if answer["status"] == "interrupted":
        return "process", notice("run.exit_stopped", reason=reason)
    return str(answer["kind"]), reason


def _line(run: Run) -> str:
    record = read_record(run.folder)
    assert record is not None
    if not record.completed:
        return f"{run.name} FAILED: {record.reason}"
    measured = record.results["test"] or record.results["best"]
    value, took = measured["metrics"][record.metric], record.results["total_time_s"]
    return f"{run.name}: {measured['split']} {record.metric} {value:.4f} ({took:.0f} s)"
