"""Decide which run of a study comes next, give it to the launcher, and read what it left in its folder."""

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from oelm.errors import OUTCOMES, Interrupted, RunError, UserError
from oelm.study.folder import Setting, set_aside
from oelm.study.launchers import Launcher, RunJob
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import read_record
from oelm.system.library_errors import first_line
from oelm.system.messages import Notice, notice, read_notice
from oelm.training.failure import failure_kind
from oelm.training.stopping import Stop

STOP_PATIENCE = 120.0  # seconds for running runs to save when the study is told to stop
# Seconds before each new attempt at a run that a fault ended; after the last one the study stops.
PAUSES = (1.0, 5.0, 30.0)
DISK_PAUSES = (*PAUSES, 60.0, 120.0)  # longer, as space may be freed meanwhile
# Advice for a fault that persists, for every kind of `oelm.errors.FAULTS` that a run can have.
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
class DueRun:
    """A run that the study needs and has no result of."""

    setting: Setting
    cell: Cell
    folder: Path

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{self.setting.task} {cell.method} lr {cell.lr:g} seed {cell.seed}"


@dataclass
class StudyProgress:
    """The state of a study, for its display."""

    settings: list[Setting]
    matrices: list[Matrix] = field(default_factory=list)
    running: list[DueRun] = field(default_factory=list)
    waiting: list[DueRun] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # run -> reason, where training itself went wrong
    done: int = 0
    news: list[str] = field(default_factory=list)  # lines to print once
    detached: bool = False  # runs are in the hands of workers, elsewhere


class Scheduler:
    """The loop of a study: find the runs that are due, start them, read the results of those that ended.

    A run that diverged or stayed at chance level has a result. One that a fault of the machine ended has
    none: it is started again after a pause, and if that does not help the study stops, so that no fault
    decides a comparison.
    """

    def __init__(self, settings: list[Setting], root: Path, launcher: Launcher, keep_models: str) -> None:
        self.root, self.launcher, self.keep_models = root, launcher, keep_models
        self.progress = StudyProgress(settings, detached=launcher.detached)
        self.folders: dict[tuple[str, Cell, bool], Path] = {}  # of the runs seen so far
        self.faults: Counter[Path] = Counter()  # run folder -> how many faults have ended the run
        self.not_before = 0.0  # after a fault: the time from which runs are started again
        self.broken: RunError | None = None  # the fault that stops the study
        self.stopping = False

    def run(self, stop: Stop, show: Callable[[StudyProgress], None]) -> StudyProgress:
        """Train all runs of the study. `show(progress)` is called about twice a second."""
        while self._find_due_runs():
            if self._stop_requested(stop) or self.broken is not None:
                self._stop_runs()
                show(self.progress)
                raise self.broken or Interrupted(stop.reason or "")
            self._start_runs(stop)
            show(self.progress)
            self._wait_for_run(0.5)
        show(self.progress)
        return self.progress

    def _stop_requested(self, stop: Stop) -> bool:
        if (self.root / "cancel").exists():
            stop.reason = notice("stop.cancelled")
        return stop.reason is not None

    def _find_due_runs(self) -> bool:
        """Update the progress; False when nothing runs and nothing is due."""
        progress = self.progress
        running = {run.folder for run in progress.running}
        progress.matrices, progress.waiting, progress.done = [], [], 0
        for setting in progress.settings:
            while True:  # every result read from disk may make further runs necessary
                matrix = setting.matrix()
                unknown = [
                    cell
                    for cell in matrix.needed
                    if cell not in setting.scores and self._folder(setting, cell) not in running
                ]
                if not [cell for cell in unknown if self.read_result(setting, cell)]:
                    break
            progress.matrices.append(matrix)
            for cell in matrix.needed:
                if cell in setting.scores:
                    progress.done += 1
                elif (folder := self._folder(setting, cell)) not in running:
                    progress.waiting.append(DueRun(setting, cell, folder))
        return bool(progress.waiting or progress.running)

    def _folder(self, setting: Setting, cell: Cell) -> Path:
        """The folder of a run, cached: it is needed for all runs, twice a second."""
        key = (setting.task, cell, cell.pairing in setting.plain)
        if key not in self.folders:
            self.folders[key] = setting.folder(self.root, cell)
        return self.folders[key]

    def read_result(self, setting: Setting, cell: Cell) -> bool:
        """Read a run's result from its folder into the setting; False if there is none that counts."""
        folder = self._folder(setting, cell)
        try:
            record = read_record(folder) if folder.exists() else None
            record = record and record.with_metric(setting.metric)
        except UserError as error:
            moved = set_aside(self.root, folder)
            self.progress.news.append(f"{error}; moved to {moved}, and the run is made again")
            return False
        if record is None:
            return False
        name = DueRun(setting, cell, folder).name
        if record.fell_back:
            setting.take_plain_path(cell)
            step = record.arithmetic.get("plain_from") or record.results["reason"]["values"]["step"]
            which = "this learning rate and seed" if cell.choosing else "this seed"
            self.progress.news.append(
                f"{name}: the fast path failed at step {step}; all runs of {which} are made by the plain path"
            )
            return False
        if not record.evaluated:
            return False
        setting.scores[cell] = record.validation
        if not record.completed:
            self.progress.failed[name] = str(record.reason or "")
            return True
        if record.test is not None:
            setting.tests[cell] = record.test
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self._delete_models(setting, cell)
        return True

    def _delete_models(self, setting: Setting, cell: Cell) -> None:
        """Delete trained models that `study.models` does not keep; "best" keeps one of each method, by
        validation."""
        if cell.choosing or self.keep_models == "all":
            return
        cells = [c for c in setting.scores if c.method == cell.method and not c.choosing]
        sign = 1 if setting.larger_is_better else -1
        scored = [(sign * score, -c.seed, c) for c in cells if (score := setting.scores[c]) is not None]
        best = max(scored)[2] if scored and self.keep_models == "best" else None
        for c in cells:
            if c != best:
                shutil.rmtree(setting.folder(self.root, c) / "model", ignore_errors=True)

    def _start_runs(self, stop: Stop) -> None:
        """Start runs while there is room. Queueing thousands takes long, so a request to stop is checked."""
        waiting = self.progress.waiting
        while waiting and time.monotonic() >= self.not_before and not self._stop_requested(stop):
            run = waiting[0]
            job = RunJob(run.setting.run_config(run.cell), run.setting.store.folder, run.folder)
            try:
                if not self.launcher.start(job):
                    return
            except OSError as error:
                self._fault(run, failure_kind(error), notice("run.no_process", error=first_line(error)))
                return
            self.progress.running.append(waiting.pop(0))

    def _wait_for_run(self, seconds: float) -> None:
        """Wait for a run to end, and decide what its end means."""
        ended = self.launcher.poll(seconds)
        if ended is None:
            return
        run = next(run for run in self.progress.running if run.folder == ended.folder)
        self.progress.running.remove(run)
        if self.read_result(run.setting, run.cell):  # a result counts even if its process failed afterwards
            self.progress.news.append(_result_line(run))
        elif run.folder != run.setting.folder(self.root, run.cell):
            pass  # it is made again by the plain path, in another folder
        elif ended.crowded:
            self.progress.news.append(f"{run.name}: out of memory; fewer runs side by side from now on")
        elif ended.kind in OUTCOMES:
            self._fault(run, "disk", notice("run.no_record"))
        elif ended.kind is not None:
            self._fault(run, ended.kind, ended.full_reason)

    def _fault(self, run: DueRun, kind: str, reason: Notice) -> None:
        """Handle a fault, which says nothing about the method: start the run again after a pause, or stop the
        study if it has failed too often."""
        if self.stopping:
            return
        self.faults[run.folder] += 1
        attempts, pauses = self.faults[run.folder], DISK_PAUSES if kind == "disk" else PAUSES
        if attempts <= len(pauses):
            pause = pauses[attempts - 1]
            self.not_before = max(self.not_before, time.monotonic() + pause)
            self.progress.news.append(f"{run.name}: {reason}; trying again in {pause:g} s")
            return
        stopped = notice("study.stopped", run=run.name, attempts=attempts, reason=reason)
        self.broken = self.broken or RunError(stopped, kind, ADVICE.get(kind, ADVICE["software"]))

    def _stop_runs(self) -> None:
        """Ask every run to save and stop, and wait for them."""
        self.stopping = True
        self.launcher.stop()
        end = time.monotonic() + (0.0 if self.launcher.detached else STOP_PATIENCE)
        while self.progress.running and time.monotonic() < end:
            self._wait_for_run(0.5)


def _result_line(run: DueRun) -> str:
    record = read_record(run.folder)
    assert record is not None
    record = record.with_metric(run.setting.metric)
    if not record.completed:
        advice = record.results.get("advice")
        return f"{run.name} FAILED: {record.reason}" + (f"; {read_notice(advice)}" if advice else "")
    measured = record.results["best"]  # never test scores, by which someone could decide when to stop
    value, took = measured["metrics"][record.metric], record.results["total_time_s"]
    return f"{run.name}: {measured['split']} {record.metric} {value:.4f} ({took:.0f} s)"
