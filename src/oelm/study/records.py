"""Records of runs, read from their folders and identified by everything that decides their result."""

import contextlib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from oelm.config import RunConfig
from oelm.errors import OUTCOMES, UserError
from oelm.method import Method
from oelm.study.matrix import Cell
from oelm.study.record_checks import ENVIRONMENT, is_number, results_problem, type_problem
from oelm.system.files import read_file, read_json, read_object
from oelm.system.messages import Notice, notice, read_notice
from oelm.training.folder import read_config
from oelm.training.predictions import larger_is_better, read_predictions

FILES = (
    "config.toml", "results.json", "environment.json", "metrics.jsonl", "timing_stats.json",
    "freeze_audit.json", "predictions.npz",
)  # fmt: skip

LAST_POINTS = 10  # of the training log: the last phase


@dataclass(frozen=True)
class Identity:
    """Digests of what runs of one setting share (`setting`) and of one run (`key`)."""

    setting: str
    key: str


def identify(config: RunConfig, data: str, precision: str, numerics: int | None) -> Identity:
    """A run's identity: its resolved configuration, the data's fingerprint and the numerics version.

    The path and name of the data do not count: the fingerprint is of its texts, splits and tokens.
    """
    setting, values = identity_values(config, data, precision, numerics)
    return Identity(setting, digest(values)[:16])


def identity_values(
    config: RunConfig, data: str, precision: str, numerics: int | None
) -> tuple[str, dict[str, Any]]:
    """The digest of a run's setting, and the values whose digest is the run's key.

    Runs of one setting may differ in the values called `own` (method, learning rate, seed, fast or plain
    path), and in the keys in which the arms of a study differ.
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
    whole = shared | own
    for name in config.arm.differs_in:
        table, _, name = name.partition(".")
        shared[table] = {key: value for key, value in shared[table].items() if key != name}
    return digest(shared)[:16], whole


def digest(values: Any) -> str:
    """The SHA-256 of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Record:
    """One run as its folder describes it."""

    folder: Path
    config: RunConfig
    results: dict[str, Any]
    environment: dict[str, Any]
    identity: Identity
    stand_in: bool = False  # it collapsed, and its test score is a trivial baseline's

    @property
    def task(self) -> str:
        return str(self.results["task"])

    @property
    def method(self) -> str:
        """The name of the run's arm: its method, unless a study named it otherwise."""
        return self.config.arm.name or Method.from_dict(self.config.method.overrides()).name

    @property
    def arithmetic(self) -> dict[str, Any]:
        """The values that two runs must share to be a pair; records before version 3 lack some of them."""
        known = {
            "numerics": self.environment.get("numerics"),
            "path": "fast" if self.config.training.fast else "plain",
            "device": self.environment.get("gpu") or self.environment.get("device"),
            "precision": self.results.get("precision"),
        }
        return known | (self.results.get("arithmetic") or {})

    @property
    def made_with(self) -> dict[str, str]:
        """Versions, hardware and precision, as far as they were recorded."""
        environment = self.environment
        values = {name: environment.get(name) for name in ("oelm", "commit", "numerics", "python")}
        values |= (environment.get("packages") or {}) | {"platform": environment.get("platform")}
        values["hardware"] = environment.get("gpu") or environment.get("cpu")
        values["precision"] = self.results.get("precision")
        return {name: str(value) for name, value in values.items() if value is not None}

    @property
    def fell_back(self) -> bool:
        """Whether the fast path failed, so that the run cannot be paired: it was completed by the plain path,
        or ended because the two paths disagreed."""
        if self.completed:
            return self.arithmetic.get("plain_from") is not None
        return self.reason is not None and self.reason.code == "run.fast_path_wrong"

    def with_differing_keys(self, differs_in: tuple[str, ...]) -> "Record":
        """The record with its identity in a study whose arms differ in these keys, which may have been added
        after the run."""
        if differs_in == self.config.arm.differs_in:
            return self
        config = replace(self.config, arm=replace(self.config.arm, differs_in=differs_in))
        return replace(self, identity=_identity_of(config, self.results, self.environment))

    def with_model_name(self, name: str) -> "Record":
        """The record with this name of its model: a published record has only the last part of its path."""
        config = replace(self.config, model=replace(self.config.model, name=name))
        results = self.results | {"model": name}
        identity = _identity_of(config, results, self.environment)
        return replace(self, config=config, results=results, identity=identity)

    def with_metric(self, metric: str | None) -> "Record":
        """The record scored by the metric that a study compares; UserError if the run did not measure it."""
        if metric in (None, self.metric):
            return self
        results = self.results | {"metric": metric}
        if results_problem(results, self.config.training.test):
            known = ", ".join((self.results.get("best") or {}).get("metrics", {}))
            raise UserError(f"study.metric: {self.folder} was not measured by {metric!r}; it has {known}")
        return replace(self, results=results)

    @property
    def lr(self) -> float:
        return self.config.training.lr

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def cell(self) -> Cell:
        """The run's place in the matrix of its study."""
        return Cell(self.method, self.lr, self.seed, self.choosing)

    @property
    def metric(self) -> str:
        return str(self.results["metric"])

    @property
    def larger_is_better(self) -> bool:
        return larger_is_better(self.metric)

    @property
    def choosing(self) -> bool:
        """Whether it is a trial, which does not use the test split."""
        return not self.config.training.test

    @property
    def completed(self) -> bool:
        return self.results.get("status") == "completed"

    @property
    def failure_kind(self) -> str | None:
        """Why the run failed: a kind of `oelm.errors`, "unknown" in old records; None if it did not fail.
        A run that was completed with a metric that is not finite diverged."""
        if self.completed:
            return "diverged" if self.score is None or self.stand_in else None
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
        if self.completed:
            return notice("run.metric_not_finite", metric=self.metric) if self.failure_kind else None
        return read_notice(reason) if (reason := self.results.get("reason")) else None

    @property
    def failed_by_method(self) -> bool:
        """Whether the run failed because of its method, or may have (old records do not say), and not because
        of a fault of the machine."""
        return self.failure_kind in (*OUTCOMES, "unknown")

    @property
    def evaluated(self) -> bool:
        """Whether the run is a result of its method: completed, diverged or at chance level."""
        return self.completed or self.failure_kind in OUTCOMES

    @property
    def validation(self) -> float | None:
        """The best score on validation; None for a run that failed, or chose on another split."""
        return self.best if (self.results.get("best") or {}).get("split") == "validation" else None

    @property
    def best(self) -> float | None:
        """The best score on the split that choices were made on."""
        return self._score(self.results.get("best"))

    @property
    def test(self) -> float | None:
        measured = self.results.get("test") or {}
        return float(measured["metrics"][self.metric]) if self.stand_in else self._score(measured)

    @property
    def score(self) -> float | None:
        """The score that counts: of a trial on validation, of a measured run on test."""
        return self.validation if self.choosing else self.test

    def _score(self, measured: dict[str, Any] | None) -> float | None:
        """The metric of an evaluation; None if it is not finite, as a perplexity may be."""
        if not self.completed or not measured or not math.isfinite(measured["metrics"][self.metric]):
            return None
        return float(measured["metrics"][self.metric])

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """The evaluations during training that have a finite score: step, split, metrics."""
        return [
            entry
            for entry in self.metric_lines(containing='"eval"')
            if entry.get("kind") == "eval"
            and isinstance(metrics := entry.get("metrics"), dict)
            and is_number(metrics.get(self.metric))
            and is_number(entry.get("step"))
            and isinstance(entry.get("split"), str)
        ]

    @cached_property
    def last_points(self) -> list[dict[str, Any]]:
        """The last lines of the training log: step, loss and lr, as far as they are numbers."""
        entries = self.metric_lines(containing='"train"', last=LAST_POINTS)
        entries = [entry for entry in entries if entry.get("kind") == "train"]
        points = [{key: entry.get(key) for key in ("step", "loss", "lr")} for entry in entries]
        return [point for point in points if is_number(point["step"]) and is_number(point["loss"])]

    def metric_lines(self, containing: str = "", last: int | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without those that a crash cut short; `containing`: only lines with
        this text, `last`: only so many at the end."""
        try:
            text = read_file(self.folder / "metrics.jsonl", most=1 << 34).decode("utf-8", "replace")
        except (FileNotFoundError, UserError):
            return []
        entries = []
        for line in [line for line in text.splitlines() if containing in line][-(last or 0) :]:
            with contextlib.suppress(ValueError, RecursionError):
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict)]

    @cached_property
    def timing(self) -> dict[str, Any]:
        """The contents of timing_stats.json; empty if it cannot be read."""
        with contextlib.suppress(UserError):
            return read_object(self.folder / "timing_stats.json")
        return {}

    @property
    def step_time(self) -> float | None:
        """Median seconds of a step, if timing_stats.json has it."""
        seconds: Any = self.timing.get("median_s")
        return float(seconds) if is_number(seconds) else None

    @cached_property
    def parameter_roots(self) -> Counter[str]:
        """First part of a parameter's name ("bert") -> number of tensors, by freeze_audit.json: all that
        records before version 4 say about the model's family."""
        with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
            audit = read_object(self.folder / "freeze_audit.json")
            if "tensors" in audit:  # a published record
                return Counter({str(name): int(count) for name, count in audit["tensors"].items()})
            tensors = (*audit["fingerprint"]["frozen"], *audit["fingerprint"]["trainable"])
            return Counter(str(name).partition(".")[0] for name in tensors)
        return Counter()

    def predictions(self) -> dict[str, np.ndarray] | None:
        """The arrays recorded for the test items; None if they are missing or damaged."""
        arrays = read_predictions(self.folder) or {}
        names = ("ids", "groups", "labels", "predictions", self.metric)
        used = {name: arrays[name] for name in names if name in arrays}
        usable = (
            "ids" in used
            and ("predictions" in used) == ("labels" in used)
            and all(array.ndim > 0 and array.dtype.kind in "biuf" for array in used.values())
            and used["ids"].ndim == 1
            and len({len(array) for array in used.values()}) == 1
            and all(np.isfinite(array).all() for array in used.values())
        )
        return arrays if usable else None


def read_record(folder: Path, follow: bool = True) -> Record | None:
    """The record in a folder; None if the run has not ended. UserError if the record cannot be used.
    `follow=False`, for records that someone else made: regular files only, no links."""
    if not (folder / "results.json").exists() or not (folder / "environment.json").exists():
        return None
    config = read_config(folder, follow)
    results = read_json(folder / "results.json", follow)
    environment = read_json(folder / "environment.json", follow)
    problem = results_problem(results, config.training.test) or _other_run(results, config)
    problems = {"results.json": problem}
    problems["environment.json"] = type_problem(environment, ENVIRONMENT)
    for name, problem in problems.items():
        if problem is not None:
            raise UserError(notice("file.not_a_record", path=folder / name, problem=problem))
    return Record(folder, config, results, environment, _identity_of(config, results, environment))


def _other_run(results: dict[str, Any], config: RunConfig) -> Notice | None:
    """What is wrong if the results are of another run than the configuration: that run would count twice."""
    for key in ("seed", "lr"):
        recorded, configured = results.get(key), getattr(config.training, key)
        if recorded is not None and recorded != configured:
            return notice("value.of_another", key=key, value=str(recorded)[:40], other=str(configured))
    return None


def _identity_of(config: RunConfig, results: dict[str, Any], environment: dict[str, Any]) -> Identity:
    return identify(
        config,
        environment.get("data") or results.get("data_fingerprint") or "",
        results.get("precision", config.training.precision),
        environment.get("numerics"),
    )


def find_records(root: Path, damaged: list[Notice] | None = None, follow: bool = True) -> Iterator[Record]:
    """The records of all runs below a folder that have ended, sorted by folder.
    A record that cannot be read is skipped and its problem added to `damaged`; without that list it raises.
    Links to folders are never followed, with `follow=False` no links to files either."""
    for path in sorted(Path(at, "results.json") for at, _, names in os.walk(root) if "results.json" in names):
        folder = path.parent
        hidden = any(part.startswith(".") for part in folder.relative_to(root).parts)  # half copied
        if hidden or not (folder / "config.toml").exists():
            continue
        try:
            if (record := read_record(folder, follow)) is not None:
                yield record
        except UserError as error:
            if damaged is None:
                raise
            damaged.append(error.notice)


def cut_path(name: str) -> str:
    """The last part of a folder's path; a name, such as a hub's `owner/model`, stays as it is."""
    path = Path(name).expanduser()
    local = path.is_absolute() or name.startswith(".") or path.exists()
    return Path(os.path.abspath(path)).name if local else name


def baselines_of(records: Iterable[Record], metric: str) -> dict[str, dict[str, Any]]:
    """The trivial baselines on the test split that have this metric: name -> metrics."""
    known: list[dict[str, Any]] = [trivial for r in records if (trivial := r.results.get("references"))]
    tested = {name: splits["test"] for name, splits in known[0].items() if "test" in splits} if known else {}
    return {name: metrics for name, metrics in tested.items() if metric in metrics}


def mean_of(records: Iterable[Record], *keys: str) -> float | None:
    """The mean of a number of results.json, given by its keys from outside in; None if no record has it."""
    values = []
    for record in records:
        value: Any = record.results
        for key in keys:
            value = (value or {}).get(key)
        values += [] if value is None else [value]
    return fmean(values) if values else None
