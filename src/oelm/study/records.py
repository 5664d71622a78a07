"""Records of runs: read from their folders, identified by what decides their result."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.atomic import read_json
from oelm.config import RunConfig
from oelm.errors import UserError
from oelm.method import Method
from oelm.training.folder import read_config
from oelm.training.metrics import LOWER_IS_BETTER
from oelm.training.predictions import read_predictions

FILES = (
    "config.toml", "results.json", "environment.json", "metrics.jsonl", "timing_stats.json",
    "freeze_audit.json", "predictions.npz",
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """What two runs share (`setting`), and what one run is (`key`)."""

    setting: str
    key: str


def identify(config: RunConfig, data: str, precision: str, numerics: int | None) -> Identity:
    """A run's identity: its resolved configuration, the data's fingerprint and the numerics version.

    Where the data lay and under which name it was asked for does not matter: the fingerprint is of the
    texts, splits and tokens themselves.
    """
    values = config.identity()
    training = values["training"] | {"precision": precision}
    own = {key: training.pop(key, None) for key in ("lr", "seed", "test")}
    own["method"] = Method.from_dict(config.method.overrides()).to_dict()
    shared = {
        "max_length": config.task.max_length,
        "model": values["model"],
        "training": training,
        "data": data,
        "numerics": numerics,
    }
    return Identity(_digest(shared), _digest(shared | own))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """One run as its folder describes it."""

    folder: Path
    config: RunConfig
    results: dict[str, Any]
    environment: dict[str, Any]
    identity: Identity

    @property
    def task(self) -> str:
        return str(self.results["task"])

    @property
    def method(self) -> str:
        return Method.from_dict(self.config.method.overrides()).name

    @property
    def lr(self) -> float:
        return self.config.training.lr

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def metric(self) -> str:
        return str(self.results["metric"])

    @property
    def larger_is_better(self) -> bool:
        return self.metric not in LOWER_IS_BETTER

    @property
    def choosing(self) -> bool:
        """Made for the choice of a rate: the test split was left alone."""
        return not self.config.training.test

    @property
    def completed(self) -> bool:
        return self.results.get("status") == "completed"

    @property
    def validation(self) -> float | None:
        """The best evaluation on validation; None for a run that failed, or chose on another split."""
        best = self.results.get("best") or {}
        return self._score(best if best.get("split") == "validation" else None)

    @property
    def test(self) -> float | None:
        return self._score(self.results.get("test"))

    def _score(self, measured: dict[str, Any] | None) -> float | None:
        """A perplexity may be infinite: such a run has ended, but gives no number to compare."""
        if not self.completed or not measured or not math.isfinite(measured["metrics"][self.metric]):
            return None
        return float(measured["metrics"][self.metric])

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations along the way: step, epoch, split, metrics."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"eval"' in line:
                with contextlib.suppress(ValueError):  # a line that a crash cut short
                    found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict) and entry.get("kind") == "eval"]

    def predictions(self) -> dict[str, np.ndarray] | None:
        """What was recorded of every test item, where it is there and whole."""
        return read_predictions(self.folder)


def read_record(folder: Path) -> Record | None:
    """The record in a folder; None where the run has not ended yet."""
    if not (folder / "results.json").exists() or not (folder / "environment.json").exists():
        return None
    config = read_config(folder)
    results, environment = read_json(folder / "results.json"), read_json(folder / "environment.json")
    needed = ("metric", "status", "task", "model")
    if not isinstance(results, dict) or not all(name in results for name in needed):
        raise UserError(f"{folder / 'results.json'} is not the record of a run")
    if not isinstance(environment, dict):
        raise UserError(f"{folder / 'environment.json'} is not the record of a run")
    identity = identify(
        config,
        environment.get("data") or results.get("data_fingerprint") or "",
        results.get("precision", config.training.precision),
        environment.get("numerics"),
    )
    return Record(folder, config, results, environment, identity)


def find_records(root: Path, damaged: list[str] | None = None) -> Iterator[Record]:
    """Every run below a folder that has ended, sorted by folder; what is not one is passed over.

    A run whose record cannot be read is passed over too, and said in `damaged` where that is given.
    """
    for path in sorted(root.rglob("results.json")):
        folder = path.parent
        hidden = any(part.startswith(".") for part in folder.relative_to(root).parts)  # half copied
        if hidden or not (folder / "config.toml").is_file():
            continue
        try:
            record = read_record(folder)
        except UserError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        if record is not None:
            yield record
