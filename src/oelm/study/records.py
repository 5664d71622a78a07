"""Records of runs: read from their folders, identified by what decides their result."""

import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.config import RunConfig
from oelm.data.tasks.metrics import LOWER_IS_BETTER
from oelm.errors import OUTCOMES, UserError
from oelm.method import Method
from oelm.study.record_checks import environment_problem, is_measure, is_number, results_problem
from oelm.system.files import read_file, read_json, read_object
from oelm.system.messages import Notice, notice, read_notice
from oelm.training.folder import read_config
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
    texts, splits and tokens themselves. `own` is what runs of one setting may differ in: method, rate, seed,
    the path by which a seed was computed, and the keys in which the arms of a study differ.
    """
    values = config.identity()
    training = values["training"] | {"precision": precision}
    own = {key: training.pop(key, None) for key in ("lr", "seed", "test")}
    own["method"] = Method.from_dict(config.method.overrides()).to_dict()
    if "fast" in training:
        own["fast"] = training.pop("fast")
    shared = {
        "max_length": config.task.max_length,
        "model": values["model"],
        "training": training,
        "data": data,
        "numerics": numerics,
    }
    key = _digest(shared | own)
    for name in config.arm.differs_in:
        table, _, name = name.partition(".")
        shared[table].pop(name, None)
    return Identity(_digest(shared), key)


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
        """The name of the run's arm: its method, unless a study named it otherwise."""
        return self.config.arm.name or Method.from_dict(self.config.method.overrides()).name

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What two runs must share to be a pair. Records before version 3 do not say all of it."""
        known = {
            "numerics": self.environment.get("numerics"),
            "path": "fast" if self.config.training.fast else "plain",
            "device": self.environment.get("gpu") or self.environment.get("device"),
            "precision": self.results.get("precision"),
        }
        return known | self.results.get("arithmetic", {})

    @property
    def fell_back(self) -> bool:
        """Whether the run left the fast path on its way and was completed: then it is no pair to any other.
        One that diverged by both paths has a result, whichever it was on."""
        return self.completed and self.arithmetic.get("plain_from") is not None

    def seen_by(self, differs_in: list[str]) -> "Record":
        """The record with the setting it has in a study whose arms differ in these keys: others may have
        been added since the run was made."""
        if differs_in == self.config.arm.differs_in:
            return self
        config = replace(self.config, arm=replace(self.config.arm, differs_in=differs_in))
        return replace(self, identity=_identity_of(config, self.results, self.environment))

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
    def failure_kind(self) -> str | None:
        """Why the run failed: a kind of `oelm.errors`, "unknown" in old records; None: it has not failed."""
        if self.results.get("status") != "failed":
            return None
        failure = self.results.get("failure")
        return str(failure.get("kind")) if isinstance(failure, dict) else "unknown"

    @property
    def warnings(self) -> list[Notice]:
        return [read_notice(warning) for warning in self.results.get("warnings") or []]

    @property
    def reason(self) -> Notice | None:
        """Why the run was interrupted or failed."""
        return read_notice(found) if (found := self.results.get("reason")) else None

    @property
    def evaluated(self) -> bool:
        """Whether the run says something about its method: it was completed, or its training went wrong."""
        return self.completed or self.failure_kind in OUTCOMES

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
        try:
            text = read_file(self.folder / "metrics.jsonl", most=1 << 34).decode("utf-8", "replace")
        except (FileNotFoundError, UserError):
            return []
        found = []
        for line in text.splitlines():
            if '"eval"' in line:
                with contextlib.suppress(ValueError, RecursionError):  # a line that a crash cut short
                    found.append(json.loads(line))
        return [entry for entry in found if self._is_evaluation(entry)]

    def _is_evaluation(self, entry: Any) -> bool:
        if not isinstance(entry, dict) or entry.get("kind") != "eval" or not is_number(entry.get("step")):
            return False
        metrics = entry.get("metrics")
        return (
            isinstance(metrics, dict)
            and is_measure(metrics.get(self.metric))
            and is_number(entry.get("epoch", 0))
            and isinstance(entry.get("split", ""), str)
        )

    @cached_property
    def step_time(self) -> float | None:
        """Median seconds of a step, where timing_stats.json says."""
        with contextlib.suppress(UserError):
            found = read_object(self.folder / "timing_stats.json").get("median_s")
            return float(found) if found is not None and is_number(found) else None
        return None

    @cached_property
    def parameter_roots(self) -> Counter[str]:
        """How many parameters lie below each first name ("bert", "classifier"), by freeze_audit.json: what
        records before version 4 say about the model's family."""
        with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
            audit = read_object(self.folder / "freeze_audit.json")
            if "tensors" in audit:  # a published record
                return Counter({str(name): int(count) for name, count in audit["tensors"].items()})
            seen = audit["fingerprint"]
            return Counter(str(name).partition(".")[0] for name in (*seen["frozen"], *seen["trainable"]))
        return Counter()

    def predictions(self) -> dict[str, np.ndarray] | None:
        """What was recorded of every test item, where it is there and whole."""
        arrays = read_predictions(self.folder)
        return arrays if arrays is not None and self._fit(arrays) else None

    def _fit(self, arrays: dict[str, np.ndarray]) -> bool:
        used = [name for name in ("ids", "groups", "labels", "predictions", self.metric) if name in arrays]
        if "ids" not in used or ("predictions" in used) != ("labels" in used):
            return False
        if any(arrays[name].ndim < 1 or arrays[name].dtype.kind not in "biuf" for name in used):
            return False
        if arrays["ids"].ndim != 1 or len({len(arrays[name]) for name in used}) > 1:
            return False
        return all(bool(np.isfinite(arrays[name]).all()) for name in used)


def read_record(folder: Path, follow: bool = True) -> Record | None:
    """The record in a folder; None where the run has not ended yet. UserError where it cannot be used.

    `follow=False`, for records that someone else made: regular files only, no links.
    """
    if not (folder / "results.json").exists() or not (folder / "environment.json").exists():
        return None
    config = read_config(folder, follow)
    results = read_json(folder / "results.json", follow)
    environment = read_json(folder / "environment.json", follow)
    if problem := results_problem(results, config.training.test):
        raise UserError(notice("file.not_a_record", path=folder / "results.json", problem=problem))
    if problem := environment_problem(environment):
        raise UserError(notice("file.not_a_record", path=folder / "environment.json", problem=problem))
    return Record(folder, config, results, environment, _identity_of(config, results, environment))


def _identity_of(config: RunConfig, results: dict[str, Any], environment: dict[str, Any]) -> Identity:
    return identify(
        config,
        environment.get("data") or results.get("data_fingerprint") or "",
        results.get("precision", config.training.precision),
        environment.get("numerics"),
    )


def find_records(root: Path, damaged: list[Notice] | None = None, follow: bool = True) -> Iterator[Record]:
    """Every run below a folder that has ended, sorted by folder; what is not one is passed over.

    A run whose record cannot be read is passed over too, and said in `damaged` where that is given. Links
    to folders are not followed, and with `follow=False` no others either.
    """
    for path in sorted(Path(at, "results.json") for at, _, names in os.walk(root) if "results.json" in names):
        folder = path.parent
        hidden = any(part.startswith(".") for part in folder.relative_to(root).parts)  # half copied
        if hidden or not (folder / "config.toml").exists():
            continue
        try:
            record = read_record(folder, follow)
        except UserError as error:
            if damaged is None:
                raise
            damaged.append(error.notice)
            continue
        if record is not None:
            yield record
