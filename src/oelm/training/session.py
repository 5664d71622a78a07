"""One process's part of a run: how it starts, what it holds, how it is told to stop."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from accelerate import PartialState

from oelm.audit import Fingerprint, audit, fingerprint
from oelm.config import RunConfig
from oelm.data import Store
from oelm.data.tasks.objective import Objective, make_objective
from oelm.errors import Interrupted, UserError
from oelm.models.build import build_model
from oelm.speed.live_rows import live_weights
from oelm.speed.watch import Watch
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import Notice, notice, read_notice
from oelm.training import parallel, results
from oelm.training.checkpoint import Checkpoint, Checkpoints, capture, restore
from oelm.training.display import Display, duration
from oelm.training.folder import MetricsLog, RunFolder, arithmetic, changes, environment
from oelm.training.lineage import notes_on_start
from oelm.training.schedule import layer_scales, shrinkage
from oelm.training.stepper import Stepper, make_stepper


@dataclass
class Progress:
    """Where a run stands: what a checkpoint must know beside the weights."""

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
    due: float | None = None  # the epoch of an evaluation that was broken off and has still to be made
    plain_from: int | None = None  # the first step of the plain path, where the fast one gave out
    watch: Watch = field(default_factory=Watch)  # how far the fast path was from the plain one
    warnings: list[Notice] = field(default_factory=list)
    logged: int | None = None  # lines of metrics.jsonl
    made_with: dict[str, str] | None = None  # what may change the last bits: `folder.arithmetic`

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        warnings = [read_notice(warning) for warning in state.get("warnings", [])]
        return cls(**(state | {"watch": Watch(**state.get("watch", {})), "warnings": warnings}))

    def warn(self, warning: Notice) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


@dataclass(kw_only=True)
class Session(Stepper):
    """One process's part of a run, while it lasts."""

    store: Store
    folder: RunFolder
    checkpoints: Checkpoints
    before: Fingerprint
    report: Any
    display: Display
    progress: Progress
    log: MetricsLog | None = None
    trackers: list[Any] = field(default_factory=list)
    step_times: list[tuple[float, int]] = field(default_factory=list)  # seconds per step, over so many steps
    stop: "Stop" = field(default_factory=lambda: Stop())

    @property
    def main(self) -> bool:
        return bool(self.state.is_main_process)


def start_session(
    config: RunConfig,
    store: Store,
    objective: Objective,
    folder: RunFolder,
    state: PartialState,
    raw: Any,
    report: Any,
    show: bool,
    stop: "Stop",
) -> Session:
    """Place the model, wrap it, and go back to the newest checkpoint where there is one."""
    training = config.training
    _, warning = parallel.resolve_precision(training.precision, state.device)
    before = fingerprint(raw.to(state.device))
    checkpoints = Checkpoints(folder.path / "checkpoints", training.keep)
    loaded = checkpoints.load_last()
    progress, scaler = Progress(), {}
    if loaded is not None:
        with _fitting(loaded):
            scaler = loaded.state.pop("scaler", {})
            progress = Progress.of(loaded.state)
    way = config if progress.plain_from is None else on_the_plain_path(config)
    stepper = make_stepper(way, objective, raw, state)
    stepper.config, stepper.watch = config, progress.watch
    if loaded is not None:
        with _fitting(loaded):
            restore(loaded, raw, stepper.optimizer)
            stepper.scaler.load_state_dict(scaler or stepper.scaler.state_dict())
        audit(raw, before)
    around: dict[str, Any] = {}
    if state.is_main_process:
        around = environment(state.device, state.num_processes)
        _compare(progress, arithmetic(around))
    start = notes_on_start(config.model.name or "", store.kind, config.task.max_length)
    habits = [notice("training.chosen_on_test")] if training.choose_on == "test" else []
    for told in (warning, *store.warnings, *start, *checkpoints.problems, *habits):
        if told:
            progress.warn(told)
    label = f"{config.method.name} on {store.task}"
    session = Session(
        **vars(stepper), store=store, folder=folder, checkpoints=checkpoints, before=before, report=report,
        display=Display(label, stepper.total, progress.step, show and state.is_main_process),
        progress=progress, stop=stop,
    )  # fmt: skip
    if session.main:
        if loaded is not None:
            checkpoints.settle(asdict(progress))
        _introduce(session, resumed=loaded is not None)
        folder.write("environment.json", around | {"data": store.fingerprint})
        session.trackers = results.start_trackers(session)
        session.log = MetricsLog(
            folder.path / "metrics.jsonl", progress.step, progress.due is None, progress.logged
        )
        if session.log.missing:
            progress.warn(session.log.missing)
            session.display.say(f"note: {session.log.missing}")
    return session


def on_the_plain_path(config: RunConfig) -> RunConfig:
    return replace(config, training=replace(config.training, fast=False))


def fall_back(session: Session, step: int) -> None:
    """Go on by the plain path from `step`, with the weights and moments of the step before.

    The fast path has left these as they were: see `own_adamw.fault_of`.
    """
    model, moments = capture(session.raw, session.optimizer)
    config, progress = session.config, session.progress
    training, scales = config.training, layer_scales(session.raw, config.training.layer_decay)
    for name, live in live_weights(session.raw).items():  # rows set aside take the decay they missed
        shrunk = 1.0 if live.replaced else shrinkage(training, scales[name], step - 1, session.total)
        model[name][live.idle] *= shrunk
    objective = make_objective(
        session.store, config.task.max_length, training.label_smoothing, training.class_weights
    )
    raw, _ = build_model(config, session.store, objective.auto_class)
    stepper = make_stepper(on_the_plain_path(config), objective, raw.to(session.state.device), session.state)
    restore(Checkpoint(model, moments, {}), raw, stepper.optimizer)
    audit(raw, session.before)
    vars(session).update(vars(stepper) | {"config": config, "watch": progress.watch})
    session.model.train()
    progress.plain_from = step
    progress.warn(notice("training.left_fast_path", step=step))
    session.display.say(f"note: {progress.warnings[-1]}")


def _compare(progress: Progress, now: dict[str, str]) -> None:
    """Note where a resumed run goes on with other threads, processes, devices or packages than it had."""
    if progress.made_with and (changed := changes(progress.made_with, now)):
        progress.warn(notice("training.resumed_elsewhere", step=progress.step, changes=changed))
        progress.watch.again = True
    progress.made_with = now


@contextlib.contextmanager
def _fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse a checkpoint that is whole, but of another version or model."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"the checkpoint of step {checkpoint.state.get('step')} does not fit this run "
            f"({first_line(error)}); --overwrite the run, or name another folder"
        ) from None


def _introduce(session: Session, resumed: bool) -> None:
    """Say what is about to happen: size, memory, time; and refuse a disk that is too small."""
    estimate = results.estimate(session.raw, session.objective, session.config, session.total, session.state)
    say = session.display.say
    say(str(session.report))
    say(
        f"{session.store.task}: {len(session.store['train']):,} training items, {session.total:,} steps on "
        f"{session.state.device.type} in {session.precision}; about "
        f"{estimate['memory_bytes'] / 1e9:.1f} GB and {duration(estimate['time_s'])}"
    )
    if session.state.device.type == "cuda":
        say(str(session.paths))
    for warning in session.progress.warnings:
        say(f"note: {warning}")
    if resumed:
        say(f"resuming after step {session.progress.step}")
    copies = session.config.training.keep + 2  # the kept ones, the best, and the one being written
    session.checkpoints.check_space(copies * int(estimate["checkpoint_bytes"]))


@dataclass
class Stop:
    """Why this process was told to stop, if it was.

    `patient` while steps are made: the loop looks at `reason` after each and saves before it leaves. At any
    other time all that is worth keeping is on disk, and the order is obeyed at once.
    """

    reason: Notice | None = None
    patient: bool = False


@contextlib.contextmanager
def stopping(stop_after: float | None) -> Iterator[Stop]:
    """SIGTERM, SIGUSR1, Ctrl-C and the time limit ask a run to save and leave.

    A second Ctrl-C does not ask.
    """
    stop = Stop()
    if stop_after is not None and stop_after <= 0:
        raise UserError("--stop-after needs a positive time, for example 9m")
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python delivers signals to the main thread only
        return
    names = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}
    if stop_after is not None:  # without a limit the alarm stays its owner's
        names[signal.SIGALRM] = ""

    def ask(number: int, _: Any) -> None:
        if stop.reason is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        name = names[signal.Signals(number)]
        stop.reason = notice("stop.signal", signal=name) if name else notice("stop.time_limit")
        if not stop.patient:
            raise Interrupted(stop.reason)

    previous = {number: signal.signal(number, ask) for number in names}
    try:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, stop_after)
        yield stop
    finally:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
