"""The published experiments: the TOML files of `oelm/experiments` with the figures that were reported."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from oelm.config import RunConfig, make_config
from oelm.errors import UserError


@dataclass(frozen=True)
class Experiment:
    """One published experiment."""

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
