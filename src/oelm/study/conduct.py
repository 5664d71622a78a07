"""Conduct a study: prepare its data, build every model once, give its runs to a launcher, show progress."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from oelm.config import RunConfig
from oelm.data.tasks import task_kind
from oelm.data.trivial_baselines import compute_in_background, trivial_baselines
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.build import build_model
from oelm.models.initial_values import sharing_draws
from oelm.models.starts import is_study, starts_of
from oelm.study.analysis import analyse, more_seeds_useless
from oelm.study.design import FIRST_SEED, Study
from oelm.study.estimate import evaluations, makespan, measure_pace
from oelm.study.folder import Setting, StudyFolder
from oelm.study.launchers import LAUNCHERS, Launcher
from oelm.study.scheduler import Scheduler, StudyProgress
from oelm.system.notebook import notebook_line
from oelm.system.progress import duration
from oelm.system.terminal import console, say
from oelm.training import results
from oelm.training.freezing import Freezing
from oelm.training.parallel import process_state
from oelm.training.resolve import ResolvedRun, objective_of, prepare_data, resolve_run
from oelm.training.status import run_status
from oelm.training.stopping import stopping

SLOWEST_STEP = 10.0  # seconds: slower ones are not measured for an estimate


def prepare_settings(study: Study) -> list[Setting]:
    """Prepare the dataset of every task and its trivial baselines, before anything is trained."""
    device = process_state().device
    settings = []
    for task in study.tasks:
        config = study.task_config(task)
        if study.table.launcher == "slurm" and study.table.slurm.gpus and device.type != "cuda":
            _refuse_open_keys(config)
        config, store = prepare_data(config, device, show=True)
        metrics = [name for name in task_kind(store.kind).metrics if name != "loss"]
        if study.table.metric not in (None, *metrics):
            known = ", ".join(metrics)
            raise UserError(
                f"study.metric: {store.task} is not measured by {study.table.metric!r}; use {known}"
            )
        for warning in store.warnings:
            say(f"note: {store.task}: {warning}", err=True)
        # Computed once and read by all runs; with a GPU in the background, while the first runs train.
        (compute_in_background if device.type == "cuda" else trivial_baselines)(store)
        run = resolve_run(config, objective_of(config, store), device, study.table.gpus_per_run)
        settings.append(Setting(study, run.config, store, run.precision))
    names = [setting.task for setting in settings]
    if len(set(names)) < len(names):
        raise UserError(f"two tasks of the study have the same name: {', '.join(names)}")
    return settings


def _refuse_open_keys(config: RunConfig) -> None:
    """Refuse, on a machine without a GPU, a model or precision that is chosen by the GPU of the workers."""
    known = {"model": config.model.name is not None, "precision": config.training.precision != "auto"}
    if left := [key for key in known if not known[key]]:
        raise UserError(f"the runs get GPUs and this machine has none: give --{left[0]}")


def check_methods(settings: list[Setting]) -> None:
    """Build every model with every method once, so that one that cannot be built is refused before any
    run."""
    built = set()
    for setting in settings:
        for method, arm in setting.study.arms.items():
            model = method, repr(setting.config.model)
            if model not in built or Method.from_dict(arm.method).schedule:  # steps decide
                _build(setting, method)
            built.add(model)


def _build(setting: Setting, method: str) -> Any:
    """The model of an arm as its runs start it; `UserError`, naming the arm, where it cannot be built."""
    try:
        config = setting.run_config(replace(setting.any_cell, method=method))
        _check_starts(config, setting.study)
        objective_of(config, setting.store)
        model = build_model(config, setting.store)[0]
        if Method.from_dict(config.method.overrides()).schedule:
            Freezing(model, _resolved(setting, method).total_steps)
        return model
    except UserError as error:
        raise UserError(f"{method}: {error}") from None


def _check_starts(config: RunConfig, study: Study) -> None:
    """Refuse seeds without a model of their own in the study that this one starts from: runs that start from
    the same model vary less than independent ones."""
    name = str(config.model.name)
    if is_study(Path(name)):
        label = Method.from_dict(config.method.overrides()).name
        seeds = range(FIRST_SEED, FIRST_SEED + study.looks[-1])
        missing = [*{*seeds} - {start.seed for start in starts_of(name, label)}]
        if missing:
            fewer = min(missing) - FIRST_SEED
            raise UserError(
                f"{name} has models of this method for {len(seeds) - len(missing)} of {len(seeds)} seeds; "
                f"{f'ask for --seeds {fewer}, or ' * bool(fewer)}make the others in that study, with "
                "study.models=all (records that were imported have no models)"
            )


def estimate_run(setting: Setting) -> dict[str, float]:
    """The `memory_bytes` and `time_s` of one run of a setting, good to a factor of two."""
    model = _build(setting, setting.any_cell.method)
    return results.estimate(model, setting.store.kind, _resolved(setting))


def _resolved(setting: Setting, method: str | None = None) -> ResolvedRun:
    """A run of the setting, by default of its first arm."""
    cell = setting.any_cell
    config = setting.run_config(replace(cell, method=method or cell.method))
    objective = objective_of(config, setting.store)
    return resolve_run(config, objective, process_state().device, setting.study.table.gpus_per_run)


def study_time(
    settings: list[Setting], estimates: list[dict[str, float]], launcher: Launcher, runs: tuple[int, int]
) -> tuple[list[float], float, bool]:
    """Seconds of a measured run of each setting; seconds of a whole study with `runs` = (trials, measured
    runs) of each; whether they were measured here. If not, because another machine trains or a step takes
    long, they come from the estimates."""
    resolved = [_resolved(setting) for setting in settings]
    slow = any(e["time_s"] > SLOWEST_STEP * r.total_steps for e, r in zip(estimates, resolved, strict=True))
    try:
        environments = [] if slow else launcher.environments()
        paces = [measure_pace(setting, environments) if environments else None for setting in settings]
    finally:
        launcher.close()
    seconds, phases = [], []
    for run, estimate, pace in zip(resolved, estimates, paces, strict=True):
        trial = measured = estimate["time_s"]
        if pace is not None:
            trial, measured = (
                pace.run(run.total_steps, evaluations(run), tested) for tested in (False, True)
            )
        seconds.append(measured)
        phases.append([*zip(runs, (trial, measured), strict=True)])
    # The study, its workers and its report each import the package first.
    starts = 3 * max(pace.start if pace else 0.0 for pace in paces)
    return seconds, starts + makespan(phases, launcher.places), None not in paces


def make_launcher(study: Study, estimates: list[dict[str, float]], out: Path) -> Launcher:
    """The launcher that the study names, for runs of its largest setting."""
    memory = max(estimate["memory_bytes"] for estimate in estimates)
    return LAUNCHERS.find(study.table.launcher)(study.table, memory, out / "log")


def _count_startable(settings: list[Setting], out: Path) -> int:
    """The number of runs that could start now."""
    cells = [(setting, cell) for setting in settings for cell in setting.matrix().needed]
    return sum(not (setting.folder(out, cell) / "results.json").exists() for setting, cell in cells)


def conduct(
    study: Study, out: Path, stop_after: float | None, show: Callable[[StudyProgress], None]
) -> StudyProgress:
    """Train every run of the study that has no result yet. Raises `Interrupted` when asked to stop."""
    folder = StudyFolder(out)
    with folder.lock(study), stopping(stop_after) as stop:
        (out / "cancel").unlink(missing_ok=True)
        if study.table.launcher == "local":  # a missing tracker would fail every run
            for task in study.tasks:
                results.check_trackers(study.task_config(task).training.trackers)
        for seeds in study.looks:
            study = replace(study, table=replace(study.table, seeds=seeds))
            settings = prepare_settings(study)
            with contextlib.ExitStack() as stack:
                with sharing_draws():
                    estimates = [estimate_run(setting) for setting in settings]
                    launcher = stack.enter_context(contextlib.closing(make_launcher(study, estimates, out)))
                    launcher.prepare(_count_startable(settings, out))
                    check_methods(settings)
                stop.patient = True  # from here on the scheduler handles a stop: running runs save first
                folder.save(study, settings)
                folder.write(made=[setting.key for setting in settings])
                progress = Scheduler(settings, out, launcher, study.table.models).run(stop, show)
            if seeds == study.looks[-1] or more_seeds_useless(analyse(out)):
                break
            progress.news.append(f"not decided with {seeds} seeds; going on")
            show(progress)
            stop.patient = False
        launcher.finish()
        return progress


class ProgressView:
    """Shows a study's progress: a line per finished run and, in a terminal or a notebook, the running ones. A
    Scheduler calls `show`."""

    def __init__(self, shown: bool = True) -> None:
        self.began, self.done_before, self.shown = time.monotonic(), -1, shown
        self._line = notebook_line() if shown else None
        self._live: Live | None = None

    def __enter__(self) -> "ProgressView":
        if self.shown and sys.stderr.isatty():
            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()
        if self._line is not None:
            self._line.close()

    def show(self, progress: StudyProgress) -> None:
        if self.done_before < 0:
            self.done_before = progress.done
            if progress.done:
                runs = "run is" if progress.done == 1 else "runs are"
                progress.news.insert(0, f"{progress.done:,} {runs} done already")
        for line in progress.news if self.shown else ():
            if self._live is None:
                say(f"{line}; {self._summary(progress)}", err=self._line is None)
            else:
                self._live.console.print(line, highlight=False, markup=False)
        progress.news.clear()
        if self._line is not None:
            self._line.show("\n".join(self._now(progress)))
        if self._live is not None:
            self._live.update(Text("\n".join(self._now(progress))))

    def _summary(self, progress: StudyProgress) -> str:
        # A run may have written its results before its end is reported: it is done, not running.
        running = [run for run in progress.running if run.cell not in run.setting.scores]
        planned = [  # measured runs that follow once learning rates are chosen
            len(setting.study.arms) * len(setting.study.seeds)
            for setting, matrix in zip(progress.settings, progress.matrices, strict=True)
            if not (matrix.chosen or matrix.failed)
        ]
        expected = progress.done + len(running) + len(progress.waiting) + sum(planned)
        text = f"{progress.done:,} of {expected:,} runs"
        made = progress.done - self.done_before
        if made > 0 and expected > progress.done:
            half = len(running) / 2  # on average a running run is half done
            left = (expected - progress.done - half) / (made + half) * (time.monotonic() - self.began)
            text += f", about {duration(left)} left"
        return text

    def _now(self, progress: StudyProgress) -> Iterator[str]:
        starting = 0
        if progress.detached:  # oelm status shows each of them
            yield f"{len(progress.running):,} run{'s' * (len(progress.running) != 1)} queued or with workers"
        for run in progress.running if not progress.detached else ():
            if not (run.folder / "config.toml").exists():
                starting += 1
                continue
            state = run_status(run.folder)
            step = f"step {state.step}/{state.of}" if state.of else "starting"
            left = f", {duration(state.left_s)} left" if state.left_s is not None else ""
            yield f"{run.name}: {step}{left}"
        if starting:
            yield f"{starting:,} run{'s' * (starting != 1)} starting"
        yield from (f"FAILED {name}" for name in progress.failed)
        yield self._summary(progress)
