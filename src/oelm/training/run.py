"""A run in one process: its parts, how it starts, and how it falls back to the plain path."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerate import PartialState

from oelm.audit import Fingerprint, audit, fingerprint
from oelm.config import RunConfig
from oelm.data import Store
from oelm.data.tasks.base import Objective
from oelm.errors import UserError
from oelm.models.build import build_model
from oelm.models.gpt_sizes import numerics_of
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import Notice, notice, read_notice
from oelm.system.progress import Display, duration
from oelm.training import results
from oelm.training.checkpoint import Checkpoint, Checkpoints
from oelm.training.folder import MetricsLog, RunFolder, arithmetic, changes, environment
from oelm.training.resolve import ResolvedRun, objective_of
from oelm.training.step import PlainStep, Watch, make_step
from oelm.training.stopping import Stop


@dataclass
class Progress:
    """The progress of a run: what a checkpoint stores besides the weights."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    watch_time_s: float = 0.0  # of steps in which the fast path was compared; a part of train_time_s
    best: dict[str, Any] | None = None
    final: dict[str, Any] | None = None
    stale: int = 0  # evaluations since the best
    stopped_early: bool = False
    at_chance: bool = False
    due: float | None = None  # the epoch of an evaluation that was interrupted and must be repeated
    plain_from: int | None = None  # the first step of the plain path, if the fast one failed
    watch: Watch = field(default_factory=Watch)  # comparisons of the fast path with the plain one
    warnings: list[Notice] = field(default_factory=list)
    logged: int | None = None  # lines of metrics.jsonl
    made_with: dict[str, str] | None = None  # `folder.arithmetic` of the process that wrote it

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        warnings = [read_notice(warning) for warning in state.get("warnings", [])]
        state = {key: value for key, value in state.items() if key != "freezing"}  # read by the step
        return cls(**(state | {"watch": Watch(**state.get("watch", {})), "warnings": warnings}))

    def warn(self, warning: Notice) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


@dataclass
class Run:
    """A run in this process, from its start to its end."""

    resolved: ResolvedRun
    store: Store
    objective: Objective
    state: PartialState
    conversion: Any  # the report of how the model was converted
    before: Fingerprint  # of the frozen weights
    step: PlainStep  # takes the steps; holds the model and the optimizer
    progress: Progress
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    stop: Stop
    log: MetricsLog | None = None  # of the main process
    trackers: list[Any] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)  # seconds of each step
    saved_at: float = field(default_factory=time.monotonic)  # or when the process started
    on_entry: Callable[[dict[str, Any]], None] = lambda entry: None  # called with what the log gets
    unsaved_best: Checkpoint | None = None  # the best so far, if it is not on disk yet

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def main(self) -> bool:
        return bool(self.state.is_main_process)

    def close(self) -> None:
        self.display.close()
        if self.log is not None:
            self.log.close()
        for problem in results.finish_trackers(self.trackers):
            self.display.say(f"note: {problem}")
        self.step.close()


def start_run(
    resolved: ResolvedRun, objective: Objective, folder: RunFolder, state: PartialState, raw: Any,
    report: Any, show: bool, stop: Stop,
) -> Run:  # fmt: skip
    """Place the model on its device, wrap it, and restore the newest checkpoint if there is one."""
    config, store = resolved.config, objective.store
    before = fingerprint(raw.to(state.device))
    checkpoints = Checkpoints(folder.path / "checkpoints", config.training.keep, state)
    loaded = checkpoints.load_last()
    progress, scaler = Progress(), {}
    if loaded is not None:
        with _must_fit_run(loaded):
            scaler = loaded.state.pop("scaler", {})
            progress = Progress.of(loaded.state)
            processes = int((progress.made_with or {}).get("processes", state.num_processes))
            progress.tokens = progress.tokens * processes // state.num_processes  # a process counts its own
    if progress.plain_from is None:
        step = make_step(resolved, objective, raw, state, progress.watch)
    else:
        step = PlainStep(resolved, objective, raw, state)
        step.why_plain = f"the fast path failed at step {progress.plain_from}"
    if loaded is not None:
        with _must_fit_run(loaded):
            step.restore(loaded)
            step.scaler.load_state_dict(scaler or step.scaler.state_dict())
        audit(raw, before)
    environment_values: dict[str, Any] = {}
    if state.is_main_process:
        environment_values = environment(
            state.device, state.num_processes, numerics_of(str(config.model.name))
        )
        now = arithmetic(environment_values)
        # Warn if a resumed run goes on with other threads, processes, devices or packages than before.
        if progress.made_with and (changed := changes(progress.made_with, now)):
            progress.warn(notice("training.resumed_elsewhere", step=progress.step, changes=changed))
            progress.watch.again = True
        progress.made_with = now
    for warning in (*resolved.warnings, *checkpoints.problems):
        progress.warn(warning)
    label = f"{config.method.name} on {store.task}"
    display = Display(label, resolved.total_steps, progress.step, show and state.is_main_process)
    parts = (step, progress, folder, checkpoints, display, stop)
    run = Run(resolved, store, objective, state, report, before, *parts)
    if run.main:
        if loaded is not None:
            checkpoints.clean_up(asdict(progress))
        _announce(run, resumed=loaded is not None)
        folder.write("environment.json", environment_values | {"data": store.fingerprint})
        run.trackers = results.start_trackers(run)
        metrics = folder.path / "metrics.jsonl"
        run.log = MetricsLog(metrics, progress.step, progress.due is None, progress.logged)
        if run.log.missing:
            progress.warn(run.log.missing)
            display.say(f"note: {run.log.missing}")
    return run


def fall_back(run: Run, number: int) -> None:
    """Continue by the plain path from step `number`, with the weights and moments of the step before, which
    the failed step has not changed: see `system.private_torch.fault_of`."""
    progress = run.progress
    model, moments = run.step.hand_over(number - 1)
    frozen = {"freezing": run.step.freezing.record}
    run.objective = objective_of(run.config, run.store)
    raw, _ = build_model(run.config, run.store)
    run.step = PlainStep(run.resolved, run.objective, raw.to(run.state.device), run.state)
    run.step.why_plain = f"the fast path failed at step {number}"
    run.step.restore(Checkpoint(model, moments, frozen))
    audit(raw, run.before)
    run.step.model.train()
    progress.plain_from = number
    progress.warn(notice("training.left_fast_path", step=number))
    run.display.say(f"note: {progress.warnings[-1]}")


@contextlib.contextmanager
def _must_fit_run(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse a checkpoint that is intact but of another version or model."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"the checkpoint of step {checkpoint.state.get('step')} does not fit this run "
            f"({first_line(error)}); --overwrite the run, or name another folder"
        ) from None


def _announce(run: Run, resumed: bool) -> None:
    """Print the model's size, the memory and the time of the run; refuse a disk that is too small."""
    step, say = run.step, run.display.say
    estimate = results.estimate(step.raw, run.store.kind, run.resolved)
    say(str(run.conversion))
    say(
        f"{run.store.task}: {len(run.store['train']):,} training items, {run.resolved.total_steps:,} steps "
        f"on {run.state.device.type} in {step.precision}; about "
        f"{estimate['memory_bytes'] / 1e9:.1f} GB and {duration(estimate['time_s'])}"
    )
    if run.state.device.type == "cuda":
        say(str(step))
    for warning in run.progress.warnings:
        say(f"note: {warning}")
    if resumed:
        say(f"resuming after step {run.progress.step}")
    copies = run.config.training.keep + 2  # the kept ones, the best, and the one being written
    run.checkpoints.check_space(copies * int(estimate["checkpoint_bytes"]))
