"""The published experiments: the TOML files of `oelm/experiments` with the figures that were reported."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from oelm.config import RunConfig, make_config
from oelm.errors import UserError
from oelm.study.record_checks import is_number
from oelm.training.folder import flat


@dataclass(frozen=True)
class Experiment:
    id: str
    title: str
    published: dict[str, Any]  # the reported figures (accuracies 0 to 1, seconds), their split, notes
    habits: tuple[str, ...]  # what was done there and is against our rules
    config: dict[str, Any]  # the run that repeats it, as nested keys of a RunConfig
    sources: dict[str, tuple[str, ...]]  # report, scripts or ours: the recipe's keys that come from there
    variant_of: str | None = None  # the experiment this is another reading of; None for a published one


def list_experiments() -> list[Experiment]:
    """All experiments, by ID."""
    experiments = []
    for file in (files("oelm") / "experiments").iterdir():
        values = tomllib.loads(file.read_text(encoding="utf-8")) if file.name.endswith(".toml") else {}
        if "published" in values:  # the other files are our own studies
            about = {key: values.pop(key, None) for key in ("title", "published", "variant_of")}
            about |= {"id": file.name.removesuffix(".toml"), "habits": tuple(values.pop("habits"))}
            about["sources"] = {source: tuple(keys) for source, keys in values.pop("sources").items()}
            experiments.append(Experiment(**about, config=values))
    return sorted(experiments, key=lambda experiment: experiment.id)


def get_experiment(id: str) -> Experiment:
    """The experiment of that ID, upper or lower case; the error for an unknown ID lists those that exist."""
    known = {experiment.id.lower(): experiment for experiment in list_experiments()}
    if id.lower() not in known:
        names = ", ".join(experiment.id for experiment in known.values())
        raise UserError(f"there is no experiment {id!r}; known: {names}")
    return known[id.lower()]


def experiment_config(id: str) -> RunConfig:
    """The run that repeats an experiment, checked."""
    experiment = get_experiment(id)
    return make_config({"experiment": experiment.id, **experiment.config}, f"experiment {experiment.id}")


def clock(seconds: float | None) -> str:
    """4h32m, 22m or 45s."""
    if seconds is None:
        return ""
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m" if minutes else f"{seconds:.0f}s"


def differences(experiment: Experiment, config: RunConfig, results: Mapping[str, Any]) -> list[str]:
    """The keys in which a run differs from the published recipe; empty for an exact repeat."""
    recipe, used = (flat(c.identity(files=False)) for c in (experiment_config(experiment.id), config))
    keys = dict.fromkeys([*recipe, *used])
    differing = [key for key in keys if key != "experiment" and recipe.get(key) != used.get(key)]
    precision = results.get("precision")
    if precision not in (None, recipe["training.precision"]) and "training.precision" not in differing:
        differing.append("training.precision")
    items, final = experiment.published.get("train_items"), results.get("final")
    count, samples = results.get("train_items"), results.get("samples")
    epoch = final.get("epoch") if isinstance(final, Mapping) else None
    if count is None and samples and is_number(epoch) and epoch:  # older records do not have it
        count = samples / epoch
    if items and count is not None and abs(count / items - 1) > 0.002:
        differing.append(f"training items ({count:,.0f} of {items:,})")
    tokens, here = experiment.published.get("train_tokens"), (count or 0) * config.task.max_length
    if tokens and here and abs(here / tokens - 1) > 0.1:  # the published count is that of a file's megabytes
        differing.append(f"training tokens ({here / 1e6:,.1f}M of {tokens / 1e6:,.0f}M)")
    return differing


# A published figure -> the keys, from outside in, of the same figure in a run's results.
FIGURES: dict[str, tuple[str, ...]] = {
    "perplexity": ("best", "metrics", "perplexity"),
    "best_accuracy": ("best", "metrics", "accuracy"),
    "final_accuracy": ("final", "metrics", "accuracy"),
    "loss": ("best", "metrics", "loss"),
    "time_s": ("total_time_s",),
    "validation_time_s": ("eval_time_s",),
    "seconds_per_step": ("reports", "timing_stats", "mean_step_time"),
    "mean_seconds_per_step": ("reports", "timing_stats", "mean_step_time"),
    "median_seconds_per_step": ("reports", "timing_stats", "median_step_time"),
    "parameters": ("parameters", "total"),
    "trained parameters": ("parameters", "trainable"),
    "frozen parameters": ("parameters", "frozen"),
}


def shared_figures(experiment: Experiment, results: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """The figures that both the publication and a run have: (name, published, here).

    A score is compared on the split it was published for: the best evaluation where the run chose on that
    split, the final test where the run was only tested on it.
    """
    counts = experiment.published.get("parameters", {})
    names = {"total": "parameters", "trainable": "trained parameters", "frozen": "frozen parameters"}
    published = {k: v for k, v in experiment.published.items() if k != "parameters"}
    published |= {names[key]: value for key, value in counts.items()}
    scores = {name: results.get(name) or {} for name in ("best", "final", "test")}
    scores = {name: score for name, score in scores.items() if score.get("split") == published.get("split")}
    scores.setdefault("best", scores.get("test", {}))
    rows = []
    for name, path in FIGURES.items():
        value: Any = {**results, "final": None, **scores}
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if name in published and value is not None:
            rows.append((name, float(published[name]), float(value)))
    return rows


def compare_with_published(config: RunConfig, results: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in which a run of an experiment differs from it, and the figures of both."""
    experiment = get_experiment(str(config.experiment))
    rows = shared_figures(experiment, results)
    return {
        "experiment": experiment.id,
        "differs_in": differences(experiment, config, results),
        "beside": {name: {"published": published, "here": here} for name, published, here in rows},
    }
