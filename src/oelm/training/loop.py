"""The one training function: every task, every model, one process or many.

Everything a step does is a function of (configuration, step): which items, which rate, which random
numbers. So a run that is killed and resumed from a checkpoint goes on as if nothing had happened.
"""

import contextlib
import functools
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch import Tensor

from oelm.audit import audit
from oelm.config import RunConfig
from oelm.data import Epoch, Plan, Store
from oelm.data.tasks.objective import Measured, make_objective
from oelm.errors import Interrupted, RunError
from oelm.models.build import build_model, default_model
from oelm.speed.live_rows import put_back
from oelm.speed.plain import plain_path
from oelm.system.messages import Notice, notice
from oelm.training import parallel, results
from oelm.training.checkpoint import Checkpoint, capture, full_state, restore
from oelm.training.determinism import same_bits
from oelm.training.evaluate import evaluate
from oelm.training.failure import explained
from oelm.training.folder import RunFolder
from oelm.training.predictions import write_predictions
from oelm.training.schedule import layer_scales, learning_rate, shrinkage
from oelm.training.session import Session, Stop, fall_back, start_session, stopping

UNTIMED = 5  # first steps of a process are left out of the timings: caches and memory fill up


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
    signal or `stop_after` seconds (what was trained is saved, start again to go on), `RunError` where going
    on makes no sense, `UserError` where the run cannot start.
    """
    state = parallel.process_state()
    with stopping(stop_after) as stop, same_bits(config.training.deterministic, state.device):
        return _train(config, store, RunFolder(Path(out)), overwrite, show, stop, state)


def _train(
    config: RunConfig,
    store: Store,
    folder: RunFolder,
    overwrite: bool,
    show: bool,
    stop: Stop,
    state: PartialState,
) -> dict[str, Any]:
    if config.model.name is None:
        config.model.name = default_model(state.device)
    training = config.training
    objective = make_objective(
        store, config.task.max_length, training.label_smoothing, training.class_weights
    )
    # Checked and built before the folder is touched: what does not fit leaves nothing behind.
    plan = objective.plan("train", training.batch_size, training.batch_tokens, training.seed)
    plan.check(state.num_processes * training.accumulate)
    results.check_trackers(training.trackers)
    parallel.check_sharding(training.fsdp, state)
    with state.main_process_first():
        raw, report = build_model(config, store, objective.auto_class)
    session = None
    try:
        if state.is_main_process:
            folder.open(config, overwrite, store.fingerprint)
        state.wait_for_everyone()
        session = start_session(config, store, objective, folder, state, raw, report, show, stop)
        stop.patient = True
        _run(session, plan)
        stop.patient = False
        if parallel.anyone(stop.reason is not None, state):  # told while the last step was evaluated or saved
            raise Interrupted(stop.reason or notice("stop.other_process"))
        return _finish(session)
    except BaseException as error:
        failure = explained(session, folder, error)
        _record(session, folder, failure)
        if failure is error:
            raise
        raise failure from error
    finally:
        if session is not None:
            session.display.close()
            if session.log is not None:
                session.log.close()
            for tracker in session.trackers:
                tracker.finish()
        folder.close()


@dataclass(frozen=True)
class Taken:
    """A step that was taken and not looked at yet: looking waits for the GPU."""

    loss: Tensor
    norm: Tensor
    items: np.ndarray
    tokens: int


class NotFinite(Exception):
    """A step met a number that is not finite. `untouched`: the weights are those of the step before."""

    def __init__(self, what: Notice, items: list[int], untouched: bool) -> None:
        super().__init__(what)
        self.what, self.items, self.untouched = what, items, untouched


def _run(session: Session, plan: Plan) -> None:
    """All steps that are left; by the plain path from the first one on that the fast path cannot compute."""
    if session.progress.due is not None:
        _evaluate(session, session.progress.due)
        _save(session)
    while True:
        try:
            return _steps(session, plan)
        except NotFinite as bad:
            step = session.progress.step + 1
            alone = session.state.num_processes == 1  # several processes would have to do it together
            again = session.config.training.fallback and not session.plain and alone and bad.untouched
            if not again:
                raise _diverged(session, step, bad) from None
            fall_back(session, step)


def _steps(session: Session, plan: Plan) -> None:
    training, progress = session.config.training, session.progress
    session.model.train()
    recent: list[Taken] = []
    started = time.perf_counter()
    timed_from = progress.step + UNTIMED
    for epoch, k, batches in plan.schedule(progress.step):
        if progress.step >= session.total or progress.stopped_early:
            break
        recent.append(_step(session, batches, k))
        norm, tokens = recent[-1].norm, recent[-1].tokens
        last = progress.step == session.total
        due = last or (
            progress.step % training.eval_every == 0 if training.eval_every else k == len(batches) - 1
        )
        logs = progress.step % training.log_every == 0 or last
        saves = bool(training.save_every) and progress.step % training.save_every == 0
        stops = (
            session.stop.reason is not None
            if session.state.num_processes == 1
            else (logs and parallel.anyone(session.stop.reason is not None, session.state))
        )
        if session.windows is not None and (due or saves or stops):
            session.windows.fold()  # here, where its time is training's
        if logs or due or saves or stops:
            steps = len(recent)
            value = _check_finite(session, recent)
            elapsed = time.perf_counter() - started
            progress.train_time_s += elapsed
            if progress.step - steps >= timed_from:
                session.step_times.append((elapsed / steps, steps))
        if logs:
            _log_step(session, epoch + (k + 1) / len(batches), value, norm)
        improved = _evaluate(session, epoch + (k + 1) / len(batches)) if due else False
        if saves or improved or last or stops or progress.stopped_early:
            _save(session)
        session.display.advance(progress.step, tokens)
        if stops and progress.step < session.total and not progress.stopped_early:
            raise Interrupted(session.stop.reason or notice("stop.other_process"))
        if not recent:
            started = time.perf_counter()


def _step(session: Session, batches: Epoch, k: int) -> Taken:
    """One optimizer step, counted."""
    progress, items = session.progress, batches.batch(k)
    checks, began = session.watch.checks, time.perf_counter()
    loss, norm, tokens = session.take_watched_step(progress.step, batches, k)
    if session.watch.checks > checks:
        progress.watch_time_s += time.perf_counter() - began
    progress.step += 1
    progress.samples += len(items)
    progress.tokens += tokens
    return Taken(loss, norm, items, tokens)


def _check_finite(session: Session, recent: list[Taken]) -> float:
    """The newest loss over all processes. Raises NotFinite at the first loss or gradient that is not finite,
    with the progress of the step before it.

    Only a loss scaler (fp16) lives with infinite gradients: it skips the step.
    """
    progress, value = session.progress, 0.0
    for n, step in enumerate(recent):
        value, norm = float(step.loss), 0.0 if session.scaler.is_enabled() else float(step.norm)
        seen = {"loss": value, "gradient": norm}
        bad = next(((name, str(x)) for name, x in seen.items() if not math.isfinite(x)), None)
        if parallel.anyone(bad is not None, session.state):
            undone = recent[n:]
            progress.step -= len(undone)
            progress.samples -= sum(len(taken.items) for taken in undone)
            progress.tokens -= sum(taken.tokens for taken in undone)
            split = session.store["train"]
            ids = step.items if session.store.kind == "lm" else split.ids[step.items]
            what = notice("run.value", what=bad[0], value=bad[1]) if bad else notice("run.other_not_finite")
            raise NotFinite(what, ids.tolist(), untouched=not math.isfinite(norm))
    recent.clear()
    return parallel.total(value, session.state)


def _diverged(session: Session, step: int, bad: NotFinite) -> RunError:
    """The error of a run whose numbers are not finite by the path that is left."""
    session.progress.step = step  # that far it got
    code = "run.not_finite" if session.progress.plain_from is None else "run.not_finite_twice"
    last = session.checkpoints.last()
    reason = notice(code, what=bad.what, step=step, items=bad.items, checkpoint=last)
    return RunError(reason, "diverged", notice("advice.lower_lr"))


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

    def watch(done: int, of: int) -> None:
        session.display.evaluating(split, done, of)
        # Several processes would have to agree: theirs is finished first.
        if session.stop.reason is not None and session.state.num_processes == 1:
            progress.due = epoch
            _save(session)
            raise Interrupted(session.stop.reason)

    with plain_path(session.plain):
        measured = evaluate(session.model, session.objective, split, session.autocast, watch)
    progress.due = None
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
    if level >= 1:  # so few items, or so large a majority, that nothing could be told apart
        return
    progress.at_chance = progress.best["metrics"]["accuracy"] <= level
    if progress.at_chance and training.stop_at_chance:
        accuracy = progress.best["metrics"]["accuracy"]
        values = {"step": progress.step, "split": split, "accuracy": accuracy, "majority": majority}
        raise RunError(notice("run.at_chance", **values), "at_chance")


def _save(session: Session) -> None:
    """Audit, then write a checkpoint. Every process takes part: shards are gathered."""
    audit(session.raw, session.before)
    model, moments = capture(session.raw, session.optimizer)
    # The step before may have had a finite gradient and still thrown the weights out of range.
    spoilt = next((name for name, value in model.items() if not value.isfinite().all()), None)
    if spoilt is not None:
        values = {"name": spoilt, "step": session.progress.step, "checkpoint": session.checkpoints.last()}
        raise RunError(notice("run.weight_not_finite", **values), "diverged", notice("advice.lower_lr"))
    if session.main:
        if session.log is not None:
            session.log.sync()
            session.progress.logged = session.log.lines
        state = asdict(session.progress) | {"scaler": session.scaler.state_dict()}
        session.checkpoints.save(Checkpoint(model, moments, state))
    session.state.wait_for_everyone()


def _finish(session: Session) -> dict[str, Any]:
    """Test the best model once, and write everything down."""
    if session.progress.best is None:  # nothing was left to do, or no evaluation ever happened
        raise RunError(notice("run.no_evaluation"))
    best = session.progress.best["step"]
    restore(session.checkpoints.load(best), session.raw, None)
    training = session.config.training
    scales = layer_scales(session.raw, training.layer_decay)
    put_back(session.raw, lambda name: shrinkage(training, scales[name], best, session.total))
    checked = audit(session.raw, session.before)
    tested = None
    if training.test:
        watch = functools.partial(session.display.evaluating, "test")
        with plain_path(session.plain):
            tested = evaluate(session.model, session.objective, "test", session.autocast, watch)
    weights = (
        full_state(session.raw) if training.test else {}
    )  # every process takes part: shards are gathered
    if not session.main:
        return {}
    folder = session.folder
    folder.write("freeze_audit.json", checked.to_dict() | {"fingerprint": session.before.to_dict()})
    folder.write("timing_stats.json", results.timing(session.step_times, session.progress.eval_time_s))
    final = results.completed(session, tested.metrics if tested else None)
    if tested:
        write_predictions(folder.path, tested.arrays)
        results.save_model(session, final, weights)
    session.stop.patient = True  # with its results the run is complete: nothing is left to be stopped
    folder.write("results.json", final)
    return final


def _record(session: Session | None, folder: RunFolder, error: BaseException) -> None:
    """Write down how the run ended; one that never started leaves nothing."""
    if session is None:
        folder.discard()
    elif session.main:
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError):  # the disk may be full: the reason is still raised
            folder.write("results.json", results.unfinished(session, status, error))
