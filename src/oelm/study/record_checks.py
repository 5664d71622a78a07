"""What a record must hold before anything is computed from it: one that is read is one that can be used."""

from collections.abc import Mapping
from typing import Any

LARGEST = 1e18  # of any number in a record
STATUSES = ("completed", "interrupted", "failed")
NUMBERS = (
    "steps", "steps_planned", "samples", "tokens", "train_time_s", "eval_time_s", "total_time_s",
    "texts_per_s", "peak_memory_bytes",
)  # fmt: skip
COMPLETE = ("best", "test", "parameters", "total_time_s")


def results_problem(results: Any, tested: bool) -> str | None:
    """What is wrong with the contents of results.json, in words; `tested`: whether the run was to be."""
    if not isinstance(results, dict):
        return "it is not an object"
    for name in ("status", "task", "metric", "model"):
        if not isinstance(results.get(name), str):
            return f"{name} is missing or not text"
    if results["status"] not in STATUSES:
        return f"status is {results['status'][:40]!r}"
    completed = results["status"] == "completed"
    for name in COMPLETE if completed else ():
        if name not in results:
            return f"{name} is missing"
    for name in ("best", "test"):
        needed = completed and (name == "best" or (name == "test" and tested))
        if problem := _measured_problem(results.get(name), results["metric"], needed):
            return f"{name} {problem}"
    if not isinstance(results.get("precision") or "", str):
        return "precision is not text"
    for name in NUMBERS:
        if name in results and not is_number(results[name]):
            return f"{name} is not a number"
    if not is_number(results.get("schema", 1)):
        return "schema is not a number"
    if problem := _arithmetic_problem(results.get("arithmetic", {})):
        return f"arithmetic {problem}"
    for name, kind in (("references", dict), ("warnings", list), ("parameters", dict)):
        if not isinstance(results.get(name) or kind(), kind):
            return f"{name} is not of its kind"
    counts = results.get("parameters") or {}
    if counts or completed:
        if not all(is_number(counts.get(name)) for name in ("total", "trainable", "frozen")):
            return "parameters does not count them"
        if counts["total"] <= 0 or counts["trainable"] < 0:
            return "parameters counts less than none"
    for name, splits in (results.get("references") or {}).items():
        if not isinstance(splits, dict) or not all(map(_are_metrics, splits.values())):
            return f"references.{name} is not measured"
    return None


def _arithmetic_problem(found: Any) -> str | None:
    if not isinstance(found, dict):
        return "is not an object"
    for name in ("path", "device", "precision"):
        if not isinstance(found.get(name, ""), str):
            return f"does not name its {name}"
    for name in ("numerics", "plain_from"):
        if found.get(name) is not None and not is_number(found[name]):
            return f"has a {name} that is not a number"
    return None


def environment_problem(environment: Any) -> str | None:
    """What is wrong with the contents of environment.json, in words."""
    if not isinstance(environment, dict):
        return "it is not an object"
    if not isinstance(environment.get("packages", {}), dict):
        return "packages is not of its kind"
    for name in ("data", "commit", "oelm", "python", "platform", "gpu", "cpu", "device"):
        if not isinstance(environment.get(name) or "", str):
            return f"{name} is not text"
    numerics = environment.get("numerics")
    return None if numerics is None or is_number(numerics) else "numerics is not a number"


def is_number(value: Any) -> bool:
    """A number that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_measure(value: Any) -> bool:
    """A number, or one that a diverged run gave: a perplexity may be infinite."""
    return is_number(value) or (isinstance(value, float) and (value != value or abs(value) == float("inf")))


def _are_metrics(metrics: Any) -> bool:
    """Numbers by name; a confusion matrix or the like may stand among them."""
    return isinstance(metrics, Mapping) and all(
        value is None or is_measure(value) or isinstance(value, list | dict) for value in metrics.values()
    )


def _measured_problem(measured: Any, metric: str, needed: bool) -> str | None:
    if measured is None:
        return "is missing" if needed else None
    if not isinstance(measured, dict) or not _are_metrics(measured.get("metrics")):
        return "has no metrics"
    if not is_measure(measured["metrics"].get(metric)):
        return f"has no {metric}"
    if not isinstance(measured.get("split", ""), str) or not is_number(measured.get("step", 0)):
        return "does not say of which step and split"
    return None
