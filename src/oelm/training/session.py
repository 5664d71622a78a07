"""One process's part of a run: how it starts, what it holds, how it is told to stop."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn

from oelm.audit import Fingerprint, audit, fingerprint
from oelm.config import RunConfig
from oelm.data import Store
from oelm.errors import Interrupted, UserError
from oelm.training import fast, parallel, results
from oelm.training.checkpoint import Checkpoints, restore
from oelm.training.display import Display, duration
from oelm.training.folder import MetricsLog, RunFolder, environment
from oelm.training.objective import Batch, Objective
from oelm.training.schedule import make_optimizer, total_steps


@dataclass
class Progress:
    """Where a run stands: what a checkpoint must know beside the weights."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    best: dict[str, Any] | None = None
    final: dict[str, Any] | None = None
    stale: int = 0  # evaluations since the best
    stopped_early: bool = False
    at_chance: bool = False
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass
class Session:
    """One process's part of a run, while it lasts."""

    config: RunConfig
    store: Store
    objective: Objective
    folder: RunFolder
    state: PartialState
    raw: Any  # the model
    model: nn.Module  # the model as it is called: perhaps wrapped
    optimizer: torch.optim.Optimizer
    scaler: Any
    autocast: Any
    precision: str
    checkpoints: Checkpoints
    before: Fingerprint
    report: Any
    total: int
    display: Display
    progress: Progress
    paths: fast.Paths
    log: MetricsLog | None = None
    trackers: list[Any] = field(default_factory=list)
    step_times: list[tuple[float, int]] = field(default_factory=list)  # seconds per step, over so many steps
    stop: "Stop" = field(default_factory=lambda: Stop())
    graphed: fast.GraphedStep | None = None  # the step as CUDA graphs, where it is

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
    precision, warning = parallel.resolve_precision(training.precision, state.device)
    # Masked cuDNN attention gives NaN gradients for large scores: gpt.MASKED_KERNELS; this is for others.
    torch.backends.cuda.enable_cudnn_sdp(False)
    raw.to(state.device)
    if training.gradient_checkpointing:
        raw.gradient_checkpointing_enable({"use_reentrant": False})
    before = fingerprint(raw)
    total = total_steps(
        training, objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    )
    paths = fast.Paths(
        padded=fast.why_padded(config, objective, raw, state.device),
        eager=fast.why_eager(config, state.num_processes, state.device, precision),
        compiled=fast.compile_blocks(raw, total, config, state.device),
    )
    objective.packed, objective.static = paths.padded is None, paths.eager is None
    model = parallel.wrap(raw, state, training.fsdp)
    optimizer = make_optimizer(raw, training, graphed=paths.eager is None)
    checkpoints = Checkpoints(folder.path / "checkpoints", training.keep)
    progress = Progress()
    scaler = torch.amp.GradScaler(state.device.type, enabled=precision == "fp16")
    loaded = checkpoints.load_last()
    if loaded is not None:
        restore(loaded, raw, optimizer)
        scaler.load_state_dict(loaded.state.pop("scaler", {}) or scaler.state_dict())
        progress = Progress(**loaded.state)
        audit(raw, before)
    for text in (warning, *store.warnings, *checkpoints.problems, *_habits(config)):
        if text:
            progress.warn(text)
    label = f"{config.method.name} on {store.task}"
    session = Session(
        config, store, objective, folder, state, raw, model, optimizer, scaler,
        parallel.autocast_of(precision, state.device), precision, checkpoints, before, report, total,
        Display(label, total, progress.step, show and state.is_main_process), progress, paths, stop=stop,
    )  # fmt: skip
    if paths.eager is None:
        session.graphed = _graphed_step(session)
    if session.main:
        if loaded is not None:
            checkpoints.settle(asdict(progress))
        _introduce(session, resumed=loaded is not None)
        folder.write(
            "environment.json", environment(state.device, state.num_processes) | {"data": store.fingerprint}
        )
        session.trackers = results.start_trackers(session)
        session.log = MetricsLog(folder.path / "metrics.jsonl", progress.step)
    return session


def _graphed_step(session: Session) -> fast.GraphedStep:
    """The step's two halves, as they are recorded."""
    training = session.config.training
    parameters = [p for p in session.raw.parameters() if p.requires_grad]

    def forward(batch: Batch) -> Tensor:
        with session.autocast():
            return session.objective.loss(session.model, batch)

    def finish() -> Tensor:
        norm = parallel.norm_of(parameters, training.clip)
        session.optimizer.step()
        session.optimizer.zero_grad(set_to_none=False)
        return norm

    return fast.GraphedStep(forward, finish, torch.zeros((), device=session.state.device))


def _habits(config: RunConfig) -> Iterator[str]:
    if config.training.choose_on == "test":
        yield "the best step is chosen on the test split: a published habit, not a fair measurement"


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

    reason: str | None = None
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
        names[signal.SIGALRM] = "the time limit"

    def ask(number: int, _: Any) -> None:
        if stop.reason is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        stop.reason = f"stopped by {names[signal.Signals(number)]}"
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
