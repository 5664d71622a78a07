"""The results of a run: an estimate before it, timings, results.json, trackers, the trained model and its
card."""

import resource
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oelm.audit import method_of
from oelm.data.tasks import task_kind
from oelm.data.tokenizer import JOINER, Encoder, load_tokenizer
from oelm.data.trivial_baselines import trivial_baselines
from oelm.errors import UserError
from oelm.models.folder import model_card, write_model
from oelm.models.frozen_state import unfreezing_groups
from oelm.models.gpt_sizes import numerics_of
from oelm.system.library_errors import first_line
from oelm.system.messages import notice
from oelm.system.private_accelerate import RUN_NAMES, lacks_package, tracker_classes
from oelm.training.failure import failure_kind, reason_of
from oelm.training.folder import flat
from oelm.training.resolve import ResolvedRun

if TYPE_CHECKING:
    from oelm.training.run import Run

# The schema of a run's record. 2: `failure` has the kind of a failure; 3: test items have groups, and
# `arithmetic` has what pairs must share; 4: warnings and reasons are codes with values, `architecture` is the
# model's family.
SCHEMA = 4


def estimate(model: Any, kind: str, run: ResolvedRun) -> dict[str, float]:
    """Estimate the memory of a process, the time and the checkpoint size, to a factor of two. Time: 6
    operations per parameter and token, at a third of the speed of a large matrix product on this device."""
    per_step = run.plan.mean_tokens
    on_device = per_step / (run.processes * run.config.training.accumulate)
    scheduled = unfreezing_groups(model, method) if (method := method_of(model)).schedule else {}
    trainable = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad or n in scheduled)
    in_products = parameters = sum(p.numel() for p in model.parameters())
    text_config = model.config.get_text_config()
    activations = on_device * text_config.hidden_size * text_config.num_hidden_layers * 40 * 4
    if task_kind(kind).predicts_tokens:
        activations += on_device * text_config.vocab_size * 3 * 4
    else:
        in_products -= model.get_input_embeddings().weight.numel()
    shards = run.processes if run.config.training.fsdp else 1
    return {
        "memory_bytes": (4 * parameters + 12 * trainable) / shards + activations,
        "time_s": 6 * in_products * per_step * run.total_steps / (0.33 * _speed(run.device) * run.processes),
        "checkpoint_bytes": 4 * parameters + 8 * trainable,
    }


def _speed(device: torch.device) -> float:
    """Operations a second of a large matrix product on this device."""
    size, dtype = (512, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = 1e9
    for _ in range(4):
        began = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def timing(step_times: list[float], eval_time_s: float, test_time_s: float) -> dict[str, Any]:
    """timing_stats.json: seconds per step, without the first steps, evaluations and saves. `every_step`: each
    step was timed; older records have means over the steps between two log lines."""
    stats: dict[str, Any] = {"steps_measured": len(step_times), "every_step": True}
    if step_times:
        stats |= {"mean_s": statistics.fmean(step_times), "median_s": statistics.median(step_times)}
    return stats | {"validation_time_s": round(eval_time_s, 3), "test_time_s": round(test_time_s, 3)}


# A name in the published reports' files -> its key in results.json (docs/reports.md).
REPORTS_KEYS = {
    "model_type": "method", "dataset": "task", "max_lr": "lr", "best_epoch": "best.epoch",
    "best_accuracy": "best.metrics.accuracy", "final_val_accuracy": "final.metrics.accuracy",
    "best_val_loss": "best.metrics.loss", "final_val_loss": "final.metrics.loss",
    "final_perplexity": "best.metrics.perplexity", "total_time": "total_time_s",
    "total_params": "parameters.total", "trainable_params": "parameters.trainable",
    "frozen_params": "parameters.frozen",
}  # fmt: skip
# The same for their timings -> the key in results.json or timing_stats.json.
REPORTS_TIMING = {
    "mean_step_time": "mean_s", "median_step_time": "median_s", "num_steps_measured": "steps_measured",
    "total_wall_time": "total_time_s", "pure_training_time": "train_time_s",
    "total_validation_time": "validation_time_s",
}  # fmt: skip


def under_reports_names(results: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    """The results under the names of the published reports, whose accuracies are in per cent."""
    values = flat(results) | timing
    named = {name: values[key] for name, key in REPORTS_KEYS.items() if key in values}
    named |= {name: 100 * value for name, value in named.items() if name.endswith("accuracy")}
    times = {name: values[key] for name, key in REPORTS_TIMING.items() if key in values}
    return named | {"timing_stats": times}


def completed(run: "Run", test_metrics: dict[str, Any] | None, timing: dict[str, Any]) -> dict[str, Any]:
    """results.json of a finished run; `test_metrics` is None for a run that is not tested, such as a
    trial."""
    progress, metric, best = run.progress, run.objective.metric, run.progress.best or {}
    split = best["split"] if test_metrics is None else "test"
    references = trivial_baselines(run.store, (split,) if test_metrics is None else ())
    measured = best["metrics"] if test_metrics is None else test_metrics
    for name, splits in references.items():
        baseline = splits.get(split, {}).get(metric)
        if baseline is not None and run.objective.better(baseline, measured[metric]):
            values = {"split": split, "metric": metric, "value": measured[metric]}
            progress.warn(notice("training.behind_baseline", **values, name=name, baseline=baseline))
    if progress.at_chance:
        progress.warn(notice("training.at_chance"))
    results = {
        **_common(run, "completed"),
        "best": best,
        "final": progress.final,
        "test": test_metrics and {"split": "test", "step": best.get("step"), "metrics": test_metrics},
        "references": references,
        "warnings": [warning.to_dict() for warning in progress.warnings],
    }
    return results | {"reports": under_reports_names(results, timing)}


def unfinished(run: "Run", status: str, error: BaseException) -> dict[str, Any]:
    """results.json of a run that this error interrupted or failed."""
    progress, advice = run.progress, getattr(error, "advice", None)
    return {
        **_common(run, status),
        "reason": reason_of(error).to_dict(),
        **({"advice": advice.to_dict()} if advice else {}),
        **({"failure": {"kind": failure_kind(error)}} if status == "failed" else {}),
        "best": progress.best,
        "final": progress.final,
        "warnings": [warning.to_dict() for warning in progress.warnings],
    }


def _common(run: "Run", status: str) -> dict[str, Any]:
    config, progress, report = run.config, run.progress, run.conversion
    texts = progress.samples / progress.train_time_s if progress.train_time_s else 0.0
    settings = flat(asdict(config))
    return {
        "schema": SCHEMA,
        "status": status,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "experiment": config.experiment,
        "task": run.store.task,
        "method": report.method,
        "model": config.model.name,
        "architecture": run.step.raw.config.model_type,
        "seed": config.training.seed,
        "lr": config.training.lr,
        "metric": run.objective.metric,
        "precision": run.step.precision,
        "parameters": {"total": report.total, "trainable": report.trainable, "frozen": report.frozen}
        | run.step.freezing.stages(),
        "chosen_on": config.training.choose_on,
        "steps": progress.step,
        "steps_planned": run.resolved.total_steps,
        "stopped_early": progress.stopped_early,
        "at_chance": progress.at_chance,
        "train_items": len(run.store["train"]),
        "samples": progress.samples,
        "tokens": progress.tokens * run.state.num_processes,
        "train_time_s": round(progress.train_time_s, 3),
        "eval_time_s": round(progress.eval_time_s, 3),
        "watch_time_s": round(progress.watch_time_s, 3),
        "total_time_s": round(progress.train_time_s + progress.eval_time_s, 3),
        "texts_per_s": round(texts, 2),
        "peak_memory_bytes": peak_memory(run.state.device),
        "data_fingerprint": run.store.fingerprint,
        "arm": config.arm.name or report.method,
        "differs_in": {key: settings[key] for key in config.arm.differs_in},
        "arithmetic": arithmetic(run),
        "watch": {
            "checks": progress.watch.checks,
            "skipped": progress.watch.skipped,
            "why_not": run.step.why_unwatched(),
            "largest_deviation": progress.watch.largest,
        },
        "paths": run.step.paths(),
    }


def arithmetic(run: "Run") -> dict[str, Any]:
    """The values that two runs must share to be a pair: numerics version, path, determinism, device,
    precision."""
    device = run.state.device
    return {
        "numerics": numerics_of(str(run.config.model.name)),
        "path": "plain" if run.step.plain and run.progress.plain_from is None else "fast",
        "plain_from": run.progress.plain_from,
        "deterministic": run.config.training.deterministic,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": run.step.precision,
    }


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PROJECT = "oelm"  # the project or experiment of all runs, for trackers that have one


def track(run: "Run", values: dict[str, float]) -> None:
    for tracker in run.trackers:
        tracker.log(values, step=run.progress.step)


def check_trackers(names: Iterable[str]) -> None:
    """Refuse an unknown tracker, or one that is not installed, before anything is written."""
    for name in names:
        if name not in (known := tracker_classes()):
            raise UserError(f"unknown tracker {name!r}; known: {', '.join(known)}")
        if lacks_package(name):
            raise UserError(f"tracker {name!r} is not installed: pip install {name}")


def start_trackers(run: "Run") -> list[Any]:
    """Start all trackers of a run; if one cannot be started, the others are closed."""
    started: list[Any] = []
    folder = run.folder.path.resolve()  # "." has no name
    for name in run.config.training.trackers:
        kind = tracker_classes()[name]
        where = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        names = {RUN_NAMES[name]: folder.name} if name in RUN_NAMES else {}
        settings = flat(run.config.to_dict())
        try:
            tracker = kind(PROJECT if names else folder.name, **where, **names)
            tracker.start()
            started.append(tracker)
            tracker.store_init_configuration({key: str(value) for key, value in settings.items()})
        except Exception as error:  # no server, no key: trackers have no common error class
            finish_trackers(started)
            raise UserError(f"tracker {name!r} cannot be started: {first_line(error)}") from error
    return started


def finish_trackers(trackers: Iterable[Any]) -> list[str]:
    """Close trackers, and return messages on those that failed, as a run's record does not depend on them."""
    failed = []
    for tracker in trackers:
        try:
            tracker.finish()
        except Exception as error:
            failed.append(f"tracker {tracker.name!r} was not closed: {first_line(error)}")
    return failed


def save_model(run: "Run", results: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write model/, complete or not at all: the best model with its tokenizer and a card."""
    run.step.raw.config.task_kind = run.store.kind  # read by `oelm predict`
    run.step.raw.config.text_pairs = bool(run.store.meta.get("pairs"))
    tokenizer = load_tokenizer(str(run.store.folder / "tokenizer"))
    tokenizer.model_max_length = run.config.task.max_length  # the model was not trained on longer texts
    card = trained_card(run, results)
    write_model(run.folder.path / "model", run.step.raw, tokenizer, card, weights)


def trained_card(run: "Run", results: dict[str, Any]) -> str:
    """The card of a trained model: how it was made, its data, and its scores on them."""
    store, best = run.store, results["best"]
    sizes = ", ".join(f"{len(split):,} {name}" for name, split in store.splits.items())
    table = ""
    for metric, value in results["test"]["metrics"].items():
        if isinstance(value, int | float):
            trivial = {name: on.get("test", {}).get(metric) for name, on in results["references"].items()}
            beside = ", ".join(f"{name} {score:.4f}" for name, score in trivial.items() if score is not None)
            table += f"\n| {metric} | {value:.4f} | {beside} |"
    longest = run.config.task.max_length
    stream = run.objective.kind.stream
    cut = f"Windows of {longest} tokens." if stream else f"Texts were cut at {longest} tokens."
    if store.meta.get("pairs") and not Encoder(store.tokenizer(), store.max_length).has_pairs:
        cut += f" The texts of a pair are one: the first, `{JOINER}`, a space, the second."
    body = [
        f"## Data\n\n{store.task}: {sizes} items; fingerprint `{store.fingerprint}`. {cut}",
        f"## Results\n\nLearning rate {results['lr']:g}, {results['steps']:,} steps; chosen at step "
        f"{best['step']} on the {best['split']} split. On the test split:\n\n"
        f"| metric | value | trivial baselines |\n|---|---|---|{table}",
    ]
    if run.progress.warnings:
        body.append("## Notes\n\n" + "\n".join(f"- {warning}" for warning in run.progress.warnings))
    return model_card(
        f"{type(run.step.raw).__name__} on {store.task}", run.step.raw, run.conversion, results["model"], body
    )
