"""Checks of a record when it is read, so that everything computed from it can rely on its keys and types."""

import math
from collections.abc import Mapping
from typing import Any

from oelm.system.messages import Notice, notice

LARGEST = 1e18  # of any number in a record
STATUSES = ("completed", "interrupted", "failed")
# The type of each key, where a record has it.
RESULTS = {
    "text": ("status", "task", "metric", "model", "precision", "architecture", "ended", "experiment"),
    "number": ("train_items", "samples", "train_time_s", "eval_time_s", "total_time_s", "peak_memory_bytes"),
    "list": ("warnings",),
    "object": ("references", "parameters", "arithmetic"),
}
PARAMETERS = {"number": ("total", "trainable", "frozen")}
ARITHMETIC = {"text": ("path", "device", "precision"), "number": ("numerics", "plain_from")}
ENVIRONMENT = {
    "object": ("packages",),
    "text": ("data", "commit", "oelm", "python", "platform", "gpu", "cpu", "device"),
    "number": ("numerics",),
}


def is_number(value: Any) -> bool:
    """Whether the value is a finite number of usable size, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_measure(value: Any) -> bool:
    """Whether the value is a number, infinities and NaN of a diverged run included."""
    return is_number(value) or (isinstance(value, float) and not math.isfinite(value))


def _are_metrics(metrics: Any) -> bool:
    """Whether these are numbers by name, perhaps with lists and tables such as a confusion matrix."""
    return isinstance(metrics, Mapping) and all(
        value is None or _is_measure(value) or isinstance(value, list | dict) for value in metrics.values()
    )


def type_problem(values: Any, types: Mapping[str, tuple[str, ...]], place: str = "") -> Notice | None:
    """The first of these keys whose value has another type; null counts as missing. None if all are right."""
    if not isinstance(values, dict):
        return notice("value.not_object")
    right = {"text": str, "list": list, "object": dict}
    for kind, names in types.items():
        for name in names:
            value = values.get(name)
            fits = is_number(value) if kind == "number" else isinstance(value, right[kind])
            if value is not None and not fits:
                return notice("value.wrong_type", key=f"{place}{name}", type=kind)
    return None


def results_problem(results: Any, tested: bool) -> Notice | None:
    """What is wrong with the contents of results.json; `tested`: whether the run was to be tested."""
    if problem := type_problem(results, RESULTS):
        return problem
    counts, completed = results.get("parameters") or {}, results.get("status") == "completed"
    for place, types in (("parameters", PARAMETERS), ("arithmetic", ARITHMETIC)):
        if problem := type_problem(results.get(place) or {}, types, f"{place}."):
            return problem
    needed = ["status", "task", "metric", "model"]
    if completed:
        needed += ["total_time_s", "parameters", "best", *(["test"] if tested else [])]
    missing = [name for name in needed if results.get(name) is None]
    if counts or completed:
        missing += [f"parameters.{name}" for name in PARAMETERS["number"] if counts.get(name) is None]
    if missing:
        return notice("value.missing", key=missing[0])
    if results["status"] not in STATUSES:
        return notice("value.unknown", key="status", value=results["status"][:40])
    if counts and (counts["total"] <= 0 or counts["trainable"] < 0):
        return notice("value.too_small", key="parameters")
    for name, splits in (results.get("references") or {}).items():
        if not isinstance(splits, dict) or not all(map(_are_metrics, splits.values())):
            return notice("value.no_metrics", key=f"references.{name}")
    for name, measured in {name: results.get(name) for name in ("best", "test")}.items():
        if measured is None:
            continue
        if not isinstance(measured, dict) or not _are_metrics(measured.get("metrics")):
            return notice("value.no_metrics", key=name)
        if not _is_measure(measured["metrics"].get(results["metric"])):
            return notice("value.no_metric", key=name, metric=results["metric"])
        if not isinstance(measured.get("split", ""), str) or not is_number(measured.get("step", 0)):
            return notice("value.not_placed", key=name)
    return None
