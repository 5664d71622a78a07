"""The published experiments: the TOML files of `oelm/experiments`, with what was reported for each."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from oelm.config import RunConfig, make_config
from oelm.errors import UserError


@dataclass(frozen=True)
class Experiment:
    """One published experiment.

    published   the reported figures by plain names (accuracies 0 to 1, times in seconds), the split they
                were measured on in our task catalogue's terms, and notes. Targets, never results.
    habits      what was done there and is not done by our rules.
    config      the run that repeats it, as a RunConfig's nested keys.
    variant_of  the experiment this is another reading of; None for the published ones themselves.
    """

    id: str
    title: str
    published: dict[str, Any]
    habits: tuple[str, ...]
    config: dict[str, Any]
    variant_of: str | None = None


def list_experiments() -> list[Experiment]:
    """All experiments, by ID."""
    found = []
    for file in (files("oelm") / "experiments").iterdir():
        if not file.name.endswith(".toml"):
            continue
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        # Our own studies lie in the same folder; what has published figures is an experiment.
        if "published" in values:
            found.append(_experiment(file.name.removesuffix(".toml"), values))
    return sorted(found, key=lambda experiment: experiment.id)


def _experiment(id: str, values: dict[str, Any]) -> Experiment:
    about = {key: values.pop(key) for key in ("title", "published", "habits")}
    about["habits"] = tuple(about["habits"])
    return Experiment(id=id, **about, variant_of=values.pop("variant_of", None), config=values)


def get_experiment(id: str) -> Experiment:
    """The experiment of that ID, in any case; an ID that does not exist is answered with those that do."""
    known = {experiment.id.lower(): experiment for experiment in list_experiments()}
    if id.lower() not in known:
        names = ", ".join(experiment.id for experiment in known.values())
        raise UserError(f"there is no experiment {id!r}; known: {names}")
    return known[id.lower()]


def experiment_config(id: str) -> RunConfig:
    """The run that repeats an experiment, checked."""
    experiment = get_experiment(id)
    return make_config({"experiment": experiment.id, **experiment.config}, f"experiment {experiment.id}")
