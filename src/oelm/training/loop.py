"""The one training function: every task, every model, one process or many.

Everything a step does is a function of (configuration, step): which items, which rate, which random
numbers. So a run that is killed and resumed from a checkpoint goes on as if nothing had happened.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn

from oelm.audit import Fingerprint, audit, fingerprint
from oelm.config import RunConfig
from oelm.data import Store
from oelm.errors import AuditError, Interrupted, RunError, UserError
from oelm.training import parallel, results
from oelm.training.build import build_model, default_model
from oelm.training.checkpoint import Checkpoint, Checkpoints, capture, restore
from oelm.training.display import Display, duration
from oelm.training.evaluate import evaluate
from oelm.training.folder import MetricsLog, RunFolder, environment
from oelm.training.objective import Measured, Objective, make_objective
from oelm.training.schedule import has_dropout, learning_rate, make_optimizer, seed_step, total_steps

UNTIMED = 5  # first steps of a process are left out of the timings: caches and memory fill up


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
    log: MetricsLog | None = None
    trackers: list[Any] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    stop: str | None = None  # why this process was told to stop
    last_save: int = -1

    @property
    def main(self) -> bool:
        return bool(self.state.is_main_process)


def train(
    config: RunConfig,
    store: Store,
    out: str | Path,
    *,
    overwrite: bool = False,
    stop_after: float | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Train, evaluate and record one run in the folder `out`; return what its results.json says.

    An unfinished run of the same configuration in that folder is resumed. Raises `Interrupted` after a
    signal or `stop_after` seconds (everything is saved, start again to go on), `RunError` where going on
    makes no sense, `UserError` where the run cannot start.
    """
    state = PartialState()
    if config.model.name is None:
        config.model.name = default_model(state.device)
    objective = make_objective(
        store, config.task.max_length, config.training.label_smoothing, config.training.class_weights
    )
    folder = RunFolder(Path(out))
    with state.main_process_first():
        # Built before the folder is touched: what does not fit leaves nothing behind.
        raw, report = build_model(config, store, objective.auto_class)
    if state.is_main_process:
        folder.open(config, overwrite)
    state.wait_for_everyone()
    session = None
    try:
        session = _start(config, store, objective, folder, state, raw, report, show)
        with _signals(session, stop_after):
            _run(session)
        return _finish(session)
    except Interrupted as reason:
        _record(session, folder, "interrupted", str(reason))
        raise
    except (RunError, AuditError) as error:
        _record(session, folder, "failed", str(error))
        raise
    finally:
        if session is not None:
            session.display.close()
            if session.log is not None:
                session.log.close()
            for tracker in session.trackers:
                tracker.finish()
        folder.close()


def _start(
    config: RunConfig,
    store: Store,
    objective: Objective,
    folder: RunFolder,
    state: PartialState,
    raw: Any,
    report: Any,
    show: bool,
) -> Session:
    training = config.training
    precision, warning = parallel.resolve_precision(training.precision, state.device)
    raw.to(state.device)
    if training.gradient_checkpointing:
        raw.gradient_checkpointing_enable({"use_reentrant": False})
    before = fingerprint(raw)
    model = parallel.wrap(raw, state, training.fsdp)
    optimizer = make_optimizer(raw, training)
    total = total_steps(
        training, objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    )
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
        Display(label, total, progress.step, show and state.is_main_process), progress,
    )  # fmt: skip
    session.last_save = progress.step if loaded is not None else -1
    if session.main:
        session.log = MetricsLog(folder.path / "metrics.jsonl", progress.step)
        folder.write(
            "environment.json", environment(state.device, state.num_processes) | {"data": store.fingerprint}
        )
        session.trackers = results.start_trackers(session)
        _introduce(session, resumed=loaded is not None)
    return session


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
    for warning in session.progress.warnings:
        say(f"note: {warning}")
    if resumed:
        say(f"resuming after step {session.progress.step}")
    copies = session.config.training.keep + 2  # the kept ones, the best, and the one being written
    session.checkpoints.check_space(copies * int(estimate["checkpoint_bytes"]))


def _run(session: Session) -> None:
    """All steps that are left."""
    training, progress = session.config.training, session.progress
    plan = session.objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    plan.check(session.state.num_processes * training.accumulate)
    random = has_dropout(session.raw)
    session.model.train()
    recent: list[tuple[Tensor, np.ndarray]] = []  # losses not looked at yet: looking waits for the GPU
    started = time.perf_counter()
    done_before = progress.step
    for epoch, k, batches in plan.schedule(progress.step):
        if progress.step >= session.total or progress.stopped_early:
            break
        began = time.perf_counter()
        loss, norm, tokens = _step(session, epoch, k, batches, random)
        recent.append((loss, batches.batch(k)))
        progress.step += 1
        progress.samples += len(batches.batch(k))
        progress.tokens += tokens
        last = progress.step == session.total
        due = last or (
            progress.step % training.eval_every == 0 if training.eval_every else k == len(batches) - 1
        )
        logs = progress.step % training.log_every == 0 or last
        saves = bool(training.save_every) and progress.step % training.save_every == 0
        stops = (
            session.stop is not None
            if session.state.num_processes == 1
            else (logs and parallel.anyone(session.stop is not None, session.state))
        )
        if logs or due or saves or stops:
            value = _check_finite(session, recent)
        if progress.step - done_before > UNTIMED:
            session.step_times.append(time.perf_counter() - began)
        progress.train_time_s += time.perf_counter() - started
        if logs:
            _log_step(session, epoch + (k + 1) / len(batches), value, norm)
        improved = _evaluate(session, epoch + (k + 1) / len(batches)) if due else False
        if saves or improved or last or stops or progress.stopped_early:
            _save(session, improved)
        session.display.advance(progress.step, tokens)
        if stops and progress.step < session.total and not progress.stopped_early:
            raise Interrupted(session.stop or "another process was told to stop")
        started = time.perf_counter()


def _step(session: Session, epoch: int, k: int, batches: Any, random: bool) -> tuple[Tensor, Tensor, int]:
    """One optimizer step: the global batch's mean loss (on this process: its part), gradient norm, tokens."""
    training, state = session.config.training, session.state
    step, world = session.progress.step, state.num_processes
    count = session.objective.count("train", batches.batch(k))
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate(training, step, session.total)
    summed: Tensor = torch.zeros((), device=state.device)
    tokens = 0
    for micro in range(training.accumulate):
        part = micro * world + state.process_index
        items = batches.share(k, part, world * training.accumulate)
        batch = session.objective.batch("train", items).to(state.device)
        tokens += batch.tokens
        if random:
            seed_step(training.seed, step, part)
        with parallel.accumulating(session.model, micro == training.accumulate - 1):
            with session.autocast():
                loss = session.objective.loss(session.model, batch)
            # DDP and FSDP2 average over processes; times their number that is the sum.
            session.scaler.scale(loss * (world / count)).backward()
        summed += loss.detach() / count
    session.scaler.unscale_(session.optimizer)
    trained = [p for p in session.raw.parameters() if p.grad is not None]
    norm = parallel.norm_of(trained, training.clip)
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad(set_to_none=True)
    return summed, norm, tokens


def _check_finite(session: Session, recent: list[tuple[Tensor, np.ndarray]]) -> float:
    """The newest loss over all processes; a loss that is not finite ends the run with its step and items."""
    values = [float(loss) for loss, _ in recent]
    first = session.progress.step - len(recent) + 1
    for offset, value in enumerate(values):
        if parallel.anyone(not math.isfinite(value), session.state):
            items = recent[offset][1]
            ids = session.store["train"].ids[items].tolist() if session.store.kind != "lm" else items.tolist()
            last = session.checkpoints.index().get("last", "none")
            raise RunError(
                f"the loss is {value} at step {first + offset}; items of that batch: {ids[:16]}"
                f"{' ...' if len(ids) > 16 else ''}; the last good checkpoint is {last}; "
                "try a lower learning rate"
            )
    recent.clear()
    return parallel.total(values[-1], session.state)


def _log_step(session: Session, epoch: float, loss: float, norm: Tensor) -> None:
    progress = session.progress
    rate = learning_rate(session.config.training, progress.step - 1, session.total)
    session.display.note(loss=loss)
    if session.log is not None:
        session.log.add(
            kind="train", step=progress.step, of=session.total, epoch=round(epoch, 4), loss=loss, lr=rate,
            grad_norm=float(norm), samples=progress.samples, train_time_s=round(progress.train_time_s, 3),
        )  # fmt: skip
        results.track(session, {"loss": loss, "lr": rate, "grad_norm": float(norm)})


def _evaluate(session: Session, epoch: float) -> bool:
    """Measure on the split that choices are made on; True where this is the best so far."""
    progress, training = session.progress, session.config.training
    split = "test" if training.choose_on == "test" else "validation"
    began = time.perf_counter()
    measured = evaluate(session.model, session.objective, split, session.autocast)
    progress.eval_time_s += time.perf_counter() - began
    metric = session.objective.metric
    found: dict[str, Any] = {
        "step": progress.step,
        "epoch": round(epoch, 4),
        "split": split,
        "metrics": _brief(measured),
    }
    value = measured.metrics[metric]
    improved = (
        progress.best is None
        or training.choose_on == "last"
        or session.objective.better(value, progress.best["metrics"][metric])
    )
    progress.final = found
    progress.stale = 0 if improved else progress.stale + 1
    if improved:
        progress.best = found
    if training.early_stopping and progress.stale >= training.early_stopping:
        progress.stopped_early = True
    session.display.note(**{metric: value})
    session.display.say(
        f"step {progress.step}/{session.total}: {split} "
        + ", ".join(f"{k} {v:.4g}" for k, v in found["metrics"].items())
    )
    if session.log is not None:
        session.log.add(kind="eval", **found)
        results.track(session, {f"{split}/{k}": v for k, v in found["metrics"].items()})
    _watch_chance(session, split, len(session.store[split]))
    return improved


def _brief(measured: Measured) -> dict[str, float]:
    return {k: v for k, v in measured.metrics.items() if isinstance(v, int | float)}


def _watch_chance(session: Session, split: str, n: int) -> None:
    """Flag a run that has learned no more than the majority class after a set share of its steps."""
    progress, training = session.progress, session.config.training
    majority = session.objective.majority(split)
    if majority is None or progress.best is None or progress.step < training.chance_after * session.total:
        return
    level = majority + 2 * math.sqrt(majority * (1 - majority) / n)
    progress.at_chance = progress.best["metrics"]["accuracy"] <= level
    if progress.at_chance and training.stop_at_chance:
        raise RunError(
            f"step {progress.step}: the best accuracy on {split} is "
            f"{progress.best['metrics']['accuracy']:.3f}, and always answering the most frequent class gives "
            f"{majority:.3f}; stopped at chance level"
        )


def _save(session: Session, best: bool) -> None:
    """Audit, then write a checkpoint. Every process takes part: shards are gathered."""
    audit(session.raw, session.before)
    model, moments = capture(session.raw, session.optimizer)
    if session.main:
        state = asdict(session.progress) | {"scaler": session.scaler.state_dict()}
        session.checkpoints.save(session.progress.step, Checkpoint(model, moments, state), best)
    session.last_save = session.progress.step
    session.state.wait_for_everyone()


def _finish(session: Session) -> dict[str, Any]:
    """Test the best model once, and write everything down."""
    if session.progress.best is None:  # nothing was left to do, or no evaluation ever happened
        raise RunError("the run ended without an evaluation")
    restore(session.checkpoints.load_best(), session.raw, None)
    checked = audit(session.raw, session.before)
    tested = evaluate(session.model, session.objective, "test", session.autocast)
    if not session.main:
        return {}
    folder = session.folder
    np.savez_compressed(folder.path / "predictions.npz", **tested.arrays)  # type: ignore[arg-type]
    folder.write("freeze_audit.json", checked.to_dict() | {"fingerprint": session.before.to_dict()})
    folder.write("timing_stats.json", results.timing(session.step_times, session.progress.eval_time_s))
    final = results.completed(session, tested.metrics)
    results.save_model(session, final)
    folder.write("results.json", final)
    return final


def _record(session: Session | None, folder: RunFolder, status: str, reason: str) -> None:
    if session is not None and session.main:
        folder.write("results.json", results.unfinished(session, status, reason))


@contextlib.contextmanager
def _signals(session: Session, stop_after: float | None) -> Iterator[None]:
    """SIGTERM, SIGUSR1, Ctrl-C and the time limit ask the loop to save and leave.

    A second Ctrl-C does not ask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    names = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}

    def ask(number: int, _: Any) -> None:
        if number == signal.SIGINT and session.stop is not None:
            raise KeyboardInterrupt
        session.stop = f"stopped by {names.get(signal.Signals(number), 'the time limit')}"

    previous = {number: signal.signal(number, ask) for number in (*names, signal.SIGALRM)}
    if stop_after is not None:
        if stop_after <= 0:
            raise UserError("--stop-after needs a positive time, for example 9m")
        signal.setitimer(signal.ITIMER_REAL, stop_after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
