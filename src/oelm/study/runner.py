"""Make the runs of a study: side by side, in processes that train one run after another."""

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

from oelm.atomic import write_json, write_text
from oelm.config import to_toml
from oelm.errors import Interrupted, UserError
from oelm.study.folder import Setting
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import read_record
from oelm.training.results import SCHEMA
from oelm.training.session import Stop
from oelm.version import NUMERICS

STOP_PATIENCE = 120.0  # seconds for running runs to save when the study is told to stop
CRASHES = 3  # processes that may end by themselves on one run before it counts as failed


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
        self.process.kill() if self.job else self.process.stdin.close()  # type: ignore[union-attr]
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
    failed: dict[str, str] = field(default_factory=dict)  # run -> reason
    done: int = 0
    news: list[str] = field(default_factory=list)  # lines to print once


class Runner:
    """The loop of a study: ask the matrix what is needed, give it to whoever is free, listen."""

    def __init__(self, settings: list[Setting], root: Path, slots: list[Slot], keep_models: str) -> None:
        self.root, self.slots, self.keep_models = root, list(slots), keep_models
        self.progress = Progress(settings)
        self.answers: queue.Queue[Any] = queue.Queue()
        self.workers: list[Worker] = []
        self.started = 0
        self.crashes: Counter[Path] = Counter()

    def run(self, stop: Stop, show: Any) -> Progress:
        """Until nothing is needed any more. `show(progress)` is called about twice a second."""
        (self.root / "log").mkdir(parents=True, exist_ok=True)
        try:
            while self._plan():
                if stop.reason is not None:
                    self._wind_up(stop.reason)
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
        if record is None or not record.completed:
            return False
        setting.scores[cell] = record.validation
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
        while self.progress.waiting:
            worker = next((w for w in self.workers if w.job is None), None)
            if worker is None:
                free = [slot for slot in self.slots if all(w.slot is not slot for w in self.workers)]
                if not free:
                    return
                worker = Worker(free[0], self.started, self.root / "log", self.answers)
                self.started += 1
                self.workers.append(worker)
            run = self.progress.waiting.pop(0)
            self.progress.running.append(run)
            worker.give(run)

    def _listen(self, seconds: float) -> None:
        try:
            worker, answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            return
        run, worker.job = worker.job, None
        if answer is None:
            self.workers.remove(worker)
        if run is None:
            return
        self.progress.running.remove(run)
        if answer is None:
            self._crashed(worker, run)
            return
        if answer["status"] == "no memory" and self.progress.running:
            # Too many side by side: from now on one fewer, and this one again.
            self.slots = [slot for slot in self.slots if slot is not worker.slot]
            self.workers.remove(worker)
            worker.close()
            self.progress.news.append(f"{run.name}: out of memory; fewer runs side by side from now on")
        elif answer["status"] == "completed":
            self._look_up(run.setting, run.cell)
            self.progress.news.append(_line(run))
        elif answer["status"] != "interrupted":
            self._failed(run, answer["reason"])

    def _crashed(self, worker: Worker, run: Run) -> None:
        """A process that ends by itself (killed, out of memory) says nothing about its run: try it again."""
        self.crashes[run.folder] += 1
        code = worker.process.wait()
        sign = f"signal {-code}" if code < 0 else f"exit code {code}"
        how = f"its process ended with {sign}; see {worker.log}"
        if self.crashes[run.folder] < CRASHES:
            self.progress.news.append(f"{run.name}: {how}; trying again")
        else:
            self._failed(run, f"{how}, {CRASHES} times")

    def _failed(self, run: Run, reason: str) -> None:
        record_failure(run, reason)
        run.setting.scores[run.cell] = None
        self.progress.failed[run.name] = reason
        self.progress.news.append(f"{run.name} FAILED: {reason}")

    def _wind_up(self, reason: str) -> None:
        """Every running run saves and stops, then so does the study."""
        for worker in self.workers:
            if worker.job is not None:
                worker.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_PATIENCE
        while self.progress.running and time.monotonic() < end:
            self._listen(0.5)
        raise Interrupted(reason)


def record_failure(run: Run, reason: str) -> None:
    """A run that failed without leaving a record gets one: what a study chose by must be there to read."""
    record = read_record(run.folder) if run.folder.exists() else None
    if record is not None and record.results["status"] == "failed":
        return
    setting, config = run.setting, run.setting.run_config(run.cell)
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / "config.toml", to_toml(config.to_dict()))
    write_json(run.folder / "environment.json", {"data": setting.store.fingerprint, "numerics": NUMERICS})
    write_json(
        run.folder / "results.json",
        {
            "schema": SCHEMA,
            "status": "failed",
            "reason": reason,
            "task": setting.task,
            "method": run.cell.method,
            "model": config.model.name,
            "metric": setting.store.metric,
            "precision": setting.precision,
            "seed": run.cell.seed,
            "lr": run.cell.lr,
        },
    )


def _line(run: Run) -> str:
    record = read_record(run.folder)
    assert record is not None
    measured = record.results["test"] or record.results["best"]
    value, took = measured["metrics"][record.metric], record.results["total_time_s"]
    return f"{run.name}: {measured['split']} {record.metric} {value:.4f} ({took:.0f} s)"
