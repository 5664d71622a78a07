"""Conduct a study: prepare its data, build every model once, then hand the runs to a launcher."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.study.design import Study
from oelm.study.folder import Setting, StudyFolder
from oelm.study.launchers import LAUNCHERS, Launcher
from oelm.study.scheduler import Scheduler, StudyProgress
from oelm.system.terminal import say
from oelm.training.stopping import stopping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oelm.data.tasks.base import Objective


def prepare_settings(study: Study) -> list[Setting]:
    """Prepare the dataset of every task and its trivial baselines, before anything is trained."""
    from oelm.data.trivial_baselines import trivial_baselines
    from oelm.training.parallel import process_state
    from oelm.training.resolve import objective_of, prepare_data, resolve_run

    device = process_state().device
    settings = []
    for task in study.tasks:
        config, store = prepare_data(study.task_config(task), device, show=True)
        for warning in store.warnings:
            say(f"note: {store.task}: {warning}", err=True)
        trivial_baselines(store)  # computed once here; every run reads the cache
        run = resolve_run(config, objective_of(config, store), device, study.table.gpus_per_run)
        settings.append(Setting(study, run.config, store, run.precision))
    names = [setting.task for setting in settings]
    if len(set(names)) < len(names):
        raise UserError(f"two tasks of the study have the same name: {', '.join(names)}")
    return settings


def check_methods(settings: list[Setting]) -> None:
    """Build every model with every method once: one that cannot be built is refused before any run."""
    seen = []
    for setting in settings:
        if setting.config.model in seen:
            continue
        seen.append(setting.config.model)
        for method in setting.study.arms:
            try:
                _build(setting, setting.run_config(replace(setting.any_cell, method=method)))
            except UserError as error:
                raise UserError(f"{method}: {error}") from None


def _build(setting: Setting, config: RunConfig) -> "tuple[PreTrainedModel, Objective]":
    """The model of a run, on the CPU, and its objective."""
    from oelm.models.build import build_model
    from oelm.training.resolve import objective_of

    objective = objective_of(config, setting.store)
    model, _ = build_model(config, setting.store)
    return model, objective


def estimate_run(setting: Setting) -> dict[str, float]:
    """The `memory_bytes` and `time_s` of one run of a setting, good to a factor of two."""
    from oelm.training import results
    from oelm.training.parallel import process_state
    from oelm.training.resolve import resolve_run

    config = setting.run_config(setting.any_cell)
    model, objective = _build(setting, config)
    run = resolve_run(config, objective, process_state().device, setting.study.table.gpus_per_run)
    return results.estimate(model, setting.store.kind, run)


def make_launcher(study: Study, estimates: list[dict[str, float]], out: Path) -> Launcher:
    """The launcher that the study names, for runs of its largest setting."""
    memory = max(estimate["memory_bytes"] for estimate in estimates)
    return LAUNCHERS.find(study.table.launcher)(study.table, memory, out / "log")


def conduct(
    study: Study,
    out: Path,
    stop_after: float | None = None,
    show: Callable[[StudyProgress], None] = lambda progress: None,
) -> StudyProgress:
    """Make every run the study needs that is not there yet. Raises `Interrupted` when told to stop."""
    folder = StudyFolder(out)
    began = time.monotonic()
    with folder.lock(study):
        with stopping(stop_after):
            settings = prepare_settings(study)
            check_methods(settings)
            launcher = make_launcher(study, [estimate_run(setting) for setting in settings], out)
        folder.save(study, settings)
        folder.write(made=[setting.key for setting in settings])
        if stop_after is not None:
            stop_after = max(0.001, stop_after - (time.monotonic() - began))
        with stopping(stop_after) as stop:
            stop.patient = True
            return Scheduler(settings, out, launcher, study.table.models).run(stop, show)
