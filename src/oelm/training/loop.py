"""The one training function: every task, every model, one process or many.

Everything a step does is a function of (configuration, step): its items, its learning rate, its random
numbers. So a run that is killed and resumed from a checkpoint computes what an unbroken run computes.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from oelm.audit import audit
from oelm.config import RunConfig
from oelm.data import Epoch, Plan, Store
from oelm.data.trivial_baselines import compute_in_background
from oelm.errors import Interrupted, RunError
from oelm.models.build import build_model
from oelm.system.messages import Notice, notice
from oelm.system.progress import figure
from oelm.training import parallel, results
from oelm.training.checkpoint import Checkpoint
from oelm.training.evaluate import evaluate
from oelm.training.failure import explain_failure
from oelm.training.folder import RunFolder
from oelm.training.predictions import write_predictions
from oelm.training.resolve import objective_of, resolve_run
from oelm.training.run import Run, fall_back, start_run
from oelm.training.schedule import learning_rate
from oelm.training.shards import first_not_finite, full_state, rows_of
from oelm.training.step_clock import StepClock
from oelm.training.stopping import stopping

SAVE_AFTER = 60.0  # seconds between checkpoints, if `training.save_every` is not given
MOST_IN_MEMORY = 4 << 30  # bytes of a checkpoint that may be kept in memory instead of on disk
UNTIMED = 5  # first steps of a process, left out of the timings as caches and memory fill up


def train(
    config: RunConfig,
    store: Store,
    out: str | Path,
    *,
    overwrite: bool = False,
    stop_after: float | None = None,
    show: bool = True,
    on_entry: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> dict[str, Any]:
    """Train, evaluate and record one run in the folder `out`; return the values of its results.json.
    `on_entry` is called with every entry of metrics.jsonl, in the first process.

    An unfinished run of the same configuration in that folder is resumed. Raises `Interrupted` after a
    signal or `stop_after` seconds (the run is saved and can be resumed), `RunError` if the run failed,
    `UserError` if it cannot start.
    """
    state, folder = parallel.process_state(), RunFolder(Path(out))
    with (
        stopping(stop_after) as stop,
        parallel.deterministic_mode(config.training.deterministic, state.device),
    ):
        objective = objective_of(config, store)
        # Checked and built before the folder is touched, so that a refused config leaves nothing behind.
        resolved = resolve_run(config, objective, state.device, state.num_processes)
        if not overwrite and (longer := folder.extended(resolved.config, resolved.total_steps)):
            resolved = resolve_run(longer, objective, state.device, state.num_processes)
        results.check_trackers(config.training.trackers)
        if state.is_main_process and state.device.type == "cuda":  # the CPU is idle while the GPU trains
            compute_in_background(store)
        with state.main_process_first():
            raw, report = build_model(resolved.config, store)
        run = None
        try:
            if state.is_main_process:
                folder.open(resolved.config, overwrite, store.fingerprint)
            state.wait_for_everyone()
            run = start_run(resolved, objective, folder, state, raw, report, show, stop)
            run.on_entry = on_entry
            stop.patient = True
            _run(run, resolved.plan)
            stop.patient = False
            if parallel.any_process(stop.reason is not None, state):  # a signal during the last evaluation
                if _kept_in_memory(run):
                    _save(run)
                raise Interrupted(stop.reason or notice("stop.other_process"))
            return _finish(run)
        except BaseException as error:
            failure = explain_failure(run, folder, error)
            _record(run, folder, failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            if run is not None:
                run.close()
            folder.close()


@dataclass(frozen=True)
class TakenStep:
    """A step whose results were not read yet, as reading them waits for the GPU."""

    loss: Tensor
    norm: Tensor
    items: np.ndarray
    tokens: int


class NotFinite(Exception):
    """Raised at a loss or gradient that is not finite. `untouched`: the weights are those before the step."""

    def __init__(self, what: Notice, items: list[int], untouched: bool) -> None:
        super().__init__(what)
        self.what, self.items, self.untouched = what, items, untouched


def _run(run: Run, plan: Plan) -> None:
    """Take all remaining steps; by the plain path from the first step on at which the fast path fails."""
    if run.progress.due is not None:
        _evaluate(run, run.progress.due)
        _save(run)
    while True:
        try:
            return _steps(run, plan)
        except NotFinite as bad:
            step = run.progress.step + 1
            one_process = run.state.num_processes == 1  # several would have to fall back together
            if run.config.training.fallback and not run.step.plain and one_process and bad.untouched:
                fall_back(run, step)
                continue
            run.progress.step = step  # the record names the failed step
            code = "run.not_finite" if run.progress.plain_from is None else "run.not_finite_twice"
            known = {"what": bad.what, "items": bad.items, "checkpoint": run.checkpoints.last()}
            reason = notice(code, step=step, **known)
            raise RunError(reason, "diverged", notice("advice.lower_lr")) from None


def _steps(run: Run, plan: Plan) -> None:
    training, progress = run.config.training, run.progress
    run.step.model.train()
    recent: list[TakenStep] = []
    started, clock = time.perf_counter(), StepClock(run.state.device)
    timed_from = progress.step + UNTIMED
    for epoch, k, batches in plan.schedule(progress.step):
        if progress.step >= run.resolved.total_steps or progress.stopped_early:
            break
        recent.append(_step(run, batches, k))
        norm, tokens = recent[-1].norm, recent[-1].tokens
        last = progress.step == run.resolved.total_steps
        every = run.resolved.eval_every
        end = progress.step % every == 0 if every else k == len(batches) - 1
        due = last or end or progress.step in training.extended_from
        logs = progress.step % training.log_every == 0 or last
        saves = _saves(run, logs)
        stops = run.stop.reason is not None
        if run.state.num_processes > 1:
            stops = logs and parallel.any_process(stops, run.state)
        if due or saves or stops:
            run.step.sync()  # here, so that its time counts as training
        clock.step_done()
        if logs or due or saves or stops:
            steps = len(recent)
            value = _check_finite(run, recent)
            elapsed = time.perf_counter() - started
            progress.train_time_s += elapsed
            seconds = clock.read()
            if progress.step - steps >= timed_from:
                run.step_times += seconds
        if logs:
            _log_step(run, epoch + (k + 1) / len(batches), value, norm)
        improved = _evaluate(run, epoch + (k + 1) / len(batches)) if due else False
        if saves or stops or ((improved or last or progress.stopped_early) and not _kept_in_memory(run)):
            _save(run)
        elif improved:
            run.unsaved_best = _capture(run)
        run.display.advance(progress.step, tokens)
        if stops and progress.step < run.resolved.total_steps and not progress.stopped_early:
            raise Interrupted(run.stop.reason or notice("stop.other_process"))
        if not recent:
            started = time.perf_counter()
            clock.start()


def _saves(run: Run, logs: bool) -> bool:
    every = run.config.training.save_every
    if every is not None:
        return every > 0 and run.progress.step % every == 0
    return logs and parallel.any_process(time.monotonic() - run.saved_at > SAVE_AFTER, run.state)


def _kept_in_memory(run: Run) -> bool:
    """Whether a new best state is kept in memory until the next checkpoint is due, so that a run of a minute
    writes none. A run that is killed resumes from the checkpoint before and reaches the same best again."""
    bytes_of = (p.numel() * (12 if p.requires_grad else 4) for p in run.step.raw.parameters())
    one_process = run.state.num_processes == 1
    return run.config.training.save_every is None and one_process and sum(bytes_of) <= MOST_IN_MEMORY


def _step(run: Run, batches: Epoch, k: int) -> TakenStep:
    """Take one optimizer step and count it in the progress."""
    progress, items = run.progress, batches.batch(k)
    checks, began = progress.watch.checks, time.perf_counter()
    loss, norm, tokens = run.step.take(progress.step, batches, k)
    if progress.watch.checks > checks:
        progress.watch_time_s += time.perf_counter() - began
    progress.step += 1
    progress.samples += len(items)
    progress.tokens += tokens
    return TakenStep(loss, norm, items, tokens)


def _check_finite(run: Run, recent: list[TakenStep]) -> float:
    """The newest loss, summed over all processes. Raises NotFinite at the first loss or gradient that is not
    finite, with the progress set back to the step before it. Infinite gradients are allowed only with a loss
    scaler (fp16), which skips the step."""
    progress, value = run.progress, 0.0
    for n, step in enumerate(recent):
        value, norm = float(step.loss), 0.0 if run.step.scaler.is_enabled() else float(step.norm)
        values = {"loss": value, "gradient": norm}
        bad = next(((name, str(x)) for name, x in values.items() if not math.isfinite(x)), None)
        if parallel.any_process(bad is not None, run.state):
            undone = recent[n:]
            progress.step -= len(undone)
            progress.samples -= sum(len(taken.items) for taken in undone)
            progress.tokens -= sum(taken.tokens for taken in undone)
            ids = run.objective.ids("train", step.items)
            what = notice("run.value", what=bad[0], value=bad[1]) if bad else notice("run.other_not_finite")
            raise NotFinite(what, ids.tolist(), untouched=not math.isfinite(norm))
    recent.clear()
    return parallel.total(value, run.state)


def _log_step(run: Run, epoch: float, loss: float, norm: Tensor) -> None:
    progress = run.progress
    lr = learning_rate(run.resolved, progress.step - 1)
    run.display.note(loss=loss)
    if run.log is not None:
        entry = run.log.add(
            kind="train", step=progress.step, of=run.resolved.total_steps, epoch=round(epoch, 4), loss=loss,
            lr=lr, grad_norm=float(norm), samples=progress.samples,
            train_time_s=round(progress.train_time_s, 3),
        )  # fmt: skip
        results.track(run, {"loss": loss, "lr": lr, "grad_norm": float(norm)})
        run.on_entry(entry)


def _evaluate(run: Run, epoch: float) -> bool:
    """Evaluate on the split that choices are made on; returns whether this is the best so far."""
    progress, training = run.progress, run.config.training
    split = "test" if training.choose_on == "test" else "validation"
    began = time.perf_counter()

    def on_batch(done: int, total: int) -> None:
        run.display.show_evaluation(split, done, total)
        # Several processes would have to agree on stopping, so they finish the evaluation first.
        if run.stop.reason is not None and run.state.num_processes == 1:
            progress.due = epoch
            _save(run)
            raise Interrupted(run.stop.reason)

    measured = evaluate(run.step.model, run.objective, split, run.step.autocast, run.step.layout, on_batch)
    progress.due = None
    progress.eval_time_s += time.perf_counter() - began
    metric = run.objective.metric
    brief = {k: v for k, v in measured.metrics.items() if isinstance(v, int | float)}
    evaluation = {"step": progress.step, "epoch": round(epoch, 4), "split": split, "metrics": brief}
    value = measured.metrics[metric]
    better = progress.best is None or run.objective.better(value, progress.best["metrics"][metric])
    improved = better or training.choose_on == "last"
    progress.final = evaluation
    progress.stale = 0 if improved else progress.stale + 1
    if improved:
        progress.best = evaluation
    if training.early_stopping and progress.stale >= training.early_stopping:
        progress.stopped_early = True
    run.display.note(**{metric: value})
    numbers = ", ".join(f"{k} {figure(v)}" for k, v in brief.items())
    run.display.say(f"step {progress.step}/{run.resolved.total_steps}: {split} {numbers}")
    if run.log is not None:
        entry = run.log.add(kind="eval", **evaluation)
        results.track(run, {f"{split}/{k}": v for k, v in brief.items()})
        run.on_entry(entry)
    _check_chance_level(run, split, len(run.store[split]))
    return improved


def _check_chance_level(run: Run, split: str, n: int) -> None:
    """Flag a run, after a set share of its steps, that is no better than the majority class; it is ended
    here if `training.stop_at_chance` is set."""
    progress, training = run.progress, run.config.training
    majority, first_step = run.objective.majority(split), training.chance_after * run.resolved.total_steps
    if majority is None or progress.best is None or progress.step < first_step:
        return
    level = majority + 2 * math.sqrt(majority * (1 - majority) / n)
    if level >= 1:  # too few items, or too large a majority, for any model to be above chance level
        return
    progress.at_chance = progress.best["metrics"]["accuracy"] <= level
    if progress.at_chance and training.stop_at_chance:
        accuracy = progress.best["metrics"]["accuracy"]
        values = {"step": progress.step, "split": split, "accuracy": accuracy, "majority": majority}
        raise RunError(notice("run.at_chance", **values), "at_chance")


def _capture(run: Run) -> Checkpoint:
    """Audit the frozen weights, then copy the contents of a checkpoint; of a sharded model, this process's
    part. Every process must call this."""
    audit(run.step.raw, run.before)
    model, moments = run.step.copy_state()
    # The last step may have overflowed the weights although its gradient was finite.
    own = first_not_finite(run.step.raw)
    bad_weight = next(filter(None, parallel.gather_values(own, run.state)), None)
    if bad_weight is not None:
        values = {"name": bad_weight, "step": run.progress.step, "checkpoint": run.checkpoints.last()}
        raise RunError(notice("run.weight_not_finite", **values), "diverged", notice("advice.lower_lr"))
    if run.log is not None:
        run.log.sync()
        run.progress.logged = run.log.lines
    state = asdict(run.progress) | {"scaler": run.step.scaler.state_dict()}
    if record := run.step.freezing.record:
        state["freezing"] = record
    return Checkpoint(model, moments, state, rows_of(run.step.raw))


def _save(run: Run) -> None:
    """Write a checkpoint, and before it the best one if that is in memory only."""
    checkpoint = _capture(run)
    if run.unsaved_best is not None and run.unsaved_best.state["step"] < run.progress.step:
        run.checkpoints.save(run.unsaved_best)
    if run.main or checkpoint.rows:
        run.checkpoints.save(checkpoint)
    run.unsaved_best, run.saved_at = None, time.monotonic()
    run.state.wait_for_everyone()


def _finish(run: Run) -> dict[str, Any]:
    """Test the best model once, and write all results."""
    if run.progress.best is None:  # no step was left, or there was no evaluation
        raise RunError(notice("run.no_evaluation"))
    best = run.progress.best["step"]
    run.step.restore(run.unsaved_best or run.checkpoints.load(best), moments=False)
    training = run.config.training
    run.step.finish(best)
    checked = audit(run.step.raw, run.before)
    tested, began = None, time.perf_counter()
    if training.test:
        show = functools.partial(run.display.show_evaluation, "test")
        tested = evaluate(run.step.model, run.objective, "test", run.step.autocast, run.step.layout, show)
    test_time = time.perf_counter() - began
    weights = full_state(run.step.raw, keep=run.main) if training.test else {}
    if not run.main:
        return {}
    folder = run.folder
    folder.write("freeze_audit.json", checked.to_dict() | {"fingerprint": run.before.to_dict()})
    timing = results.timing(run.step_times, run.progress.eval_time_s, test_time)
    folder.write("timing_stats.json", timing)
    final = results.completed(run, tested.metrics if tested else None, timing)
    if tested:
        write_predictions(folder.path, tested.arrays)
        results.save_model(run, final, weights)
    run.stop.patient = True  # the run is complete: a signal must not interrupt writing its results
    folder.write("results.json", final)
    return final


def _record(run: Run | None, folder: RunFolder, error: BaseException) -> None:
    """Record how the run ended; the folder of one that never started is deleted."""
    if run is None:
        folder.discard()
    elif run.main:
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError):  # the disk may be full: the reason is still raised
            folder.write("results.json", results.unfinished(run, status, error))
