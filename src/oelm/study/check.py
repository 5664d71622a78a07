"""Check that the published experiments run here as published, and estimate how long each takes here.

Every experiment trains for a few steps at its published batch size, length, precision and learning rates, and
is evaluated, saved, loaded again and audited. `StandIns` replaces data and weights that are not on this
machine.
"""

import gc
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.errors import Interrupted, RunError, UserError
from oelm.study.catalogue import Experiment, clock, experiment_config, list_experiments
from oelm.system.files import read_object, write_json
from oelm.system.messages import read_notice
from oelm.training.folder import environment

if TYPE_CHECKING:
    import torch

    from oelm.study.stand_ins import StandIns
    from oelm.training.resolve import ResolvedRun

SCHEMA = 1  # of the record
STEPS = {"cpu": 3, "cuda": 200}
HEADER = (
    "ID", "published, A5000", "here", "ratio", "s/step", "peak memory", "parameters", "data and weights",
)  # fmt: skip


def check_experiments(
    experiments: Iterable[Experiment],
    *,
    steps: int | None = None,
    data_dir: str | None = None,
    shrink: bool = False,
    say: Callable[[str], None] = lambda text: None,
    file: Path | None = None,
) -> dict[str, Any]:
    """Run the first steps of each experiment and return the record; one that fails does not stop the others.

    `shrink`: small models and short texts. `say` gets a line after each experiment, `file` the record so far.
    """
    import torch

    from oelm.data.sources import find_data_dir
    from oelm.study.stand_ins import StandIns
    from oelm.training.failure import reason_of
    from oelm.training.parallel import process_state

    state, experiments, cache = process_state(), list(experiments), os.environ.get("OELM_CACHE_DIR")
    if state.num_processes > 1:
        raise UserError("--check runs in one process: start it without torchrun")
    steps = steps or STEPS.get(state.device.type, STEPS["cpu"])
    ids = [experiment.id for experiment in experiments]
    all_of_them = ids == [experiment.id for experiment in list_experiments()]
    words = ["oelm", "experiments", "--check", *([] if all_of_them else ids)]
    words += ["--steps", str(steps), *(["--data-dir", data_dir] if data_dir else []), *["--shrink"] * shrink]
    about = {"command": shlex.join(words), "environment": environment(state.device, 1), "steps": steps}
    record: dict[str, Any] = {"schema": SCHEMA, **about, "shrunk": shrink, "experiments": []}
    with tempfile.TemporaryDirectory(prefix="oelm-check-") as folder:
        stand_ins = StandIns(Path(folder), find_data_dir(data_dir), steps, shrink)
        os.environ["OELM_CACHE_DIR"] = f"{folder}/cache"
        try:
            for experiment in experiments:
                entry: dict[str, Any] = {"id": experiment.id, "status": "ok", "problem": None}
                record["experiments"].append(entry)
                try:
                    _check(experiment, entry, stand_ins, state.device, steps)
                except Interrupted as error:
                    raise RunError(error.notice, "process") from None  # there is nothing to resume
                except Exception as error:  # recorded, so that the other experiments still run
                    entry |= {"status": "failed", "problem": reason_of(error).to_dict()}
                shutil.rmtree(f"{folder}/run", ignore_errors=True)
                gc.collect()
                torch.cuda.empty_cache()  # does nothing without a GPU
                if file is not None:
                    write_json(file, record)
                say(line(entry))
        finally:
            del os.environ["OELM_CACHE_DIR"]
            if cache is not None:
                os.environ["OELM_CACHE_DIR"] = cache
    return record


def _check(
    experiment: Experiment, entry: dict[str, Any], stand_ins: "StandIns", device: "torch.device", steps: int
) -> None:
    """Run an experiment's first steps and fill its entry of the record."""
    import torch

    from oelm.inference.trained import Trained
    from oelm.training.loop import train
    from oelm.training.resolve import objective_of, prepare_data, resolve_run
    from oelm.training.schedule import learning_rate

    published, total, run = experiment.published, published_steps(experiment), stand_ins.folder / "run"
    entry |= {"steps_published": total, "time_s_published": published.get("time_s")}
    config, entry["stand_ins"] = stand_ins.fit(experiment_config(experiment.id))
    config, store = prepare_data(config, device, show=False)
    objective = objective_of(config, store)

    def resolve(**changes: Any) -> "ResolvedRun":
        changed = replace(config, training=replace(config.training, **changes))
        return resolve_run(changed, objective, device)

    entry["differences"] = differences(experiment.config, resolve(), entry["stand_ins"])
    # A run that stops early is not complete, so a short one is resolved. With the whole run's warm-up in
    # steps, it has the same learning rates during the warm-up, and after it where the rate is constant.
    whole = resolve(steps=total, epochs=None)
    overrides = {"steps": steps, "epochs": None, "warmup": whole.warmup_steps}
    short = resolve(**overrides)
    entry["overrides"] = overrides
    entry["same_learning_rates"] = all(
        learning_rate(whole, step) == learning_rate(short, step) for step in range(steps)
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    results = train(short.config, store, run, show=False)
    timing = read_object(run / "timing_stats.json")
    seconds = timing.get("median_s") or _seconds_per_step(results)
    off = {key: results["parameters"][key] - count for key, count in published["parameters"].items()}
    entry |= {
        key: results[key] for key in ("parameters", "precision", "arithmetic", "best", "test", "warnings")
    }
    entry |= {
        "parameters_off": None if stand_ins.shrink else {key: by for key, by in off.items() if by},
        "timing": timing,
        "seconds_per_step": seconds,
        "time_s": None if stand_ins.shrink else seconds * total,  # a shrunk model's time is of no use
        "peak_memory_bytes": results["peak_memory_bytes"] if device.type == "cuda" else None,
        "audit": Trained(run).audit().to_dict(),
    }


def _seconds_per_step(results: dict[str, Any]) -> float:
    """Mean seconds of a step, for a run with too few steps for timing statistics: only the steps in which the
    fast path was not compared with the plain one."""
    if steps := results["steps"] - results["watch"]["checks"]:
        return float((results["train_time_s"] - results["watch_time_s"]) / steps)
    return float(results["train_time_s"] / results["steps"])


def published_steps(experiment: Experiment) -> int:
    """Optimizer steps of the whole published run."""
    training = experiment.config["training"]
    if "steps" in training:
        return int(training["steps"])
    return int(training["epochs"] * math.ceil(experiment.published["train_items"] / training["batch_size"]))


def differences(
    recipe: dict[str, Any], run: "ResolvedRun", replaced: Container[str] = ()
) -> dict[str, dict[str, Any]]:
    """The keys of a recipe that have another value in the resolved run, without the `replaced` ones."""
    here = run.config.to_dict()
    here["training"]["precision"] = run.precision  # what the device can do
    differing = {}
    for section, values in recipe.items():
        for key, value in values.items():
            used = here.get(section, {}).get(key)
            used = list(used) if isinstance(used, tuple) else used
            if used != value and f"{section}.{key}" not in replaced:
                differing[f"{section}.{key}"] = {"published": value, "here": used}
    return differing


def line(entry: dict[str, Any]) -> str:
    """An experiment's entry of the record on one line."""
    if entry["status"] != "ok":
        return f"{entry['id']:<18}FAILED: {read_notice(entry['problem'])}"
    parts = [f"parameters {_parameters(entry)}", f"{entry['seconds_per_step']:.4g} s/step"]
    for name, seconds in (("published", entry["time_s_published"]), ("here", entry["time_s"])):
        parts += [f"{name} {clock(seconds)}"] if seconds else []
    parts += [_memory(entry)] if entry["peak_memory_bytes"] else []
    parts.append(_origin(entry))
    parts += [] if entry["same_learning_rates"] else ["learning rates of a short run"]
    for key, values in entry["differences"].items():
        parts.append(f"{key} is {values['here']}, published {values['published']}")
    return f"{entry['id']:<18}ok: {'; '.join(parts)}"


def _parameters(entry: dict[str, Any]) -> str:
    off = entry["parameters_off"]
    if off is None:
        return "not compared"
    return ", ".join(f"{key} {by:+,}" for key, by in off.items()) or "exact"


def _origin(entry: dict[str, Any]) -> str:
    names = {"task.data_dir": "{} data", "task.tokenizer": "{} tokenizer", "model.name": "{}"}
    replaced = entry["stand_ins"]
    return ", ".join(text.format(replaced[key]) for key, text in names.items() if key in replaced)


def _memory(entry: dict[str, Any]) -> str:
    return f"{entry['peak_memory_bytes'] / 1e9:.2f} GB" if entry["peak_memory_bytes"] else ""


def render_table(record: dict[str, Any], file: Path) -> str:
    """The record of a file as Markdown."""
    if record.get("schema") != SCHEMA or not isinstance(record.get("experiments"), list):
        raise UserError(f"{file} is not a record of `oelm experiments --check`; --record writes one")
    where = record["environment"].get("gpu") or record["environment"]["cpu"]
    rows = [HEADER, ("---",) * len(HEADER)]
    for entry in record["experiments"]:
        id, published = entry["id"], entry.get("time_s_published")
        if entry["status"] != "ok":
            rows.append((id, clock(published), *[""] * 5, f"failed: {read_notice(entry['problem'])}"))
            continue
        ratio = f"{entry['time_s'] / published:.3g}" if entry["time_s"] and published else ""
        step = f"{entry['seconds_per_step']:.4g}"
        rows.append((id, clock(published), clock(entry["time_s"]), ratio, step, _memory(entry),
                     _parameters(entry), _origin(entry)))  # fmt: skip
    about = (
        f"{where}, {record['steps']} steps of each: `{record['command']}`. The time here is that of the "
        "whole run's training steps; published times include evaluations.\n"
    )
    return "\n".join([about, *(f"| {' | '.join(row)} |" for row in rows)])
