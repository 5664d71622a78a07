"""Conduct a study: data first, then as many runs side by side as there is room for."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.study.design import Study, StudyConfig
from oelm.study.folder import Setting, StudyFolder
from oelm.study.scheduler import Progress, Runner, Slot
from oelm.system.terminal import say
from oelm.training.session import stopping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oelm.data.tasks.base import Objective

PROCESS_BYTES = 1.2e9  # of a process that has imported torch, before it holds a model
MOST_PER_GPU = 6  # runs that share a GPU: more only queue for its processors


@dataclass(frozen=True)
class Estimate:
    """What one run of a setting takes; good to a factor of two."""

    memory_bytes: float
    time_s: float


def prepare_settings(study: Study, show: bool) -> list[Setting]:
    """The data of every task with its trivial references, prepared and checked before anything is trained."""
    from oelm.data.trivial_baselines import trivial_baselines
    from oelm.inference.trained import prepared_store
    from oelm.models.build import default_model
    from oelm.training.parallel import process_state, resolve_precision

    device = process_state().device
    settings = []
    for task in study.tasks:
        config = study.task_config(task)
        config.model.name = config.model.name or default_model(device)
        store = prepared_store(config, show)
        for warning in store.warnings if show else ():
            say(f"note: {store.task}: {warning}", err=True)
        trivial_baselines(store)  # computed once here, found in the cache by every run
        precision, _ = resolve_precision(config.training.precision, device)
        settings.append(Setting(study, config, store, precision))
    names = [setting.task for setting in settings]
    if len(set(names)) < len(names):
        raise UserError(f"two tasks of the study have one name: {', '.join(names)}")
    return settings


def check_methods(settings: list[Setting]) -> None:
    """Make every model with every method once: what cannot be made must not cost the runs before it."""
    seen = []
    for setting in settings:
        if setting.config.model in seen:
            continue
        seen.append(setting.config.model)
        for method in setting.study.methods:
            try:
                _built(setting, setting.run_config(replace(setting.any_cell, method=method)))
            except UserError as error:
                raise UserError(f"{method}: {error}") from None


def _built(setting: Setting, config: RunConfig) -> "tuple[PreTrainedModel, Objective]":
    """The model of a run, on the CPU, and what it learns."""
    from oelm.data.tasks import make_objective
    from oelm.models.build import build_model

    training = config.training
    objective = make_objective(
        setting.store, config.task.max_length, training.label_smoothing, training.class_weights
    )
    model, _ = build_model(config, setting.store)
    return model, objective


def estimate_run(setting: Setting) -> Estimate:
    """Build the model once and count."""
    from oelm.training import results
    from oelm.training.parallel import process_state
    from oelm.training.schedule import total_steps

    config = setting.run_config(setting.any_cell)
    training = config.training
    model, objective = _built(setting, config)
    plan = objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    found = results.estimate(model, objective, config, total_steps(training, plan), process_state())
    return Estimate(found["memory_bytes"], found["time_s"])


def slots_for(table: StudyConfig, memory_bytes: float) -> list[Slot]:
    """Room for runs that need this much memory each: on every GPU, or on the CPU's cores."""
    import psutil
    import torch

    # Runs that each take all cores wait for one another: 15 on one GPU were several times slower for it.
    threads = {"OMP_NUM_THREADS": str(table.threads)}
    if gpus := torch.cuda.device_count():
        return _gpu_slots(table, memory_bytes, gpus, threads)
    room = table.memory_gb * 1e9 or 0.8 * psutil.virtual_memory().available
    each = memory_bytes + PROCESS_BYTES
    cores = len(os.sched_getaffinity(0)) // (table.threads * table.gpus_per_run)
    jobs = table.jobs or max(1, min(cores, int(room // (each * table.gpus_per_run))))
    environment = threads | ({"ACCELERATE_USE_CPU": "1"} if table.gpus_per_run > 1 else {})
    return [Slot(environment, table.gpus_per_run) for _ in range(jobs)]


def _gpu_slots(table: StudyConfig, memory_bytes: float, gpus: int, threads: dict[str, str]) -> list[Slot]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    if table.gpus_per_run > len(visible):
        raise UserError(f"study.gpus_per_run is {table.gpus_per_run}, but there are {len(visible)} GPUs")
    groups = [
        visible[i : i + table.gpus_per_run]
        for i in range(0, len(visible) - table.gpus_per_run + 1, table.gpus_per_run)
    ]
    room = table.memory_gb * 1e9 or 0.8 * torch.cuda.mem_get_info()[0]
    cores = len(os.sched_getaffinity(0)) // len(groups)
    fitting = int(room // (memory_bytes + PROCESS_BYTES))
    each = 1 if table.gpus_per_run > 1 else max(1, min(MOST_PER_GPU, cores // 2, fitting))
    jobs = table.jobs or each * len(groups)
    return [
        Slot(threads | {"CUDA_VISIBLE_DEVICES": ",".join(groups[i % len(groups)])}, table.gpus_per_run)
        for i in range(jobs)
    ]


def conduct(
    study: Study,
    out: Path,
    stop_after: float | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
    talk: bool = True,
) -> Progress:
    """Make every run the study needs that is not there yet. Raises `Interrupted` when told to stop."""
    folder = StudyFolder(out)
    began = time.monotonic()
    with folder.opened(study):
        with stopping(stop_after):
            settings = prepare_settings(study, talk)
            check_methods(settings)
            memory = max(estimate_run(setting).memory_bytes for setting in settings)
        folder.save(study, settings)
        folder.belong([setting.key for setting in settings])
        slots = slots_for(study.table, memory)
        if stop_after is not None:
            stop_after = max(0.001, stop_after - (time.monotonic() - began))
        with stopping(stop_after) as stop:
            stop.patient = True
            return Runner(settings, out, slots, study.table.models).run(stop, show)
