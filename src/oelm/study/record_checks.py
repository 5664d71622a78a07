"""What a record must hold before anything is computed from it: one that is read is one that can be used."""

from collections.abc import Mapping
from typing import Any

from oelm.system.messages import Notice, notice

LARGEST = 1e18  # of any number in a record
STATUSES = ("completed", "interrupted", "failed")
NUMBERS = (
    "steps", "steps_planned", "samples", "tokens", "train_time_s", "eval_time_s", "total_time_s",
    "texts_per_s", "peak_memory_bytes",
)  # fmt: skip
COMPLETE = ("best", "test", "parameters", "total_time_s")


def results_problem(results: Any, tested: bool) -> Notice | None:
    """What is wrong with the contents of results.json; `tested`: whether the run was to be."""
    if not isinstance(results, dict):
        return notice("value.not_object")
    for name in ("status", "task", "metric", "model"):
        if not isinstance(results.get(name), str):
            return notice("value.wrong_type", key=name, type="text")
    if results["status"] not in STATUSES:
        return notice("value.unknown", key="status", value=results["status"][:40])
    completed = results["status"] == "completed"
    for name in COMPLETE if completed else ():
        if name not in results:
            return notice("value.missing", key=name)
    for name in ("best", "test"):
        needed = completed and (name == "best" or (name == "test" and tested))
        if problem := _measured_problem(name, results.get(name), results["metric"], needed):
            return problem
    for name in ("precision", "architecture"):
        if not isinstance(results.get(name) or "", str):
            return notice("value.wrong_type", key=name, type="text")
    for name in NUMBERS:
        if name in results and not is_number(results[name]):
            return notice("value.wrong_type", key=name, type="number")
    if not is_number(results.get("schema", 1)):
        return notice("value.wrong_type", key="schema", type="number")
    if problem := _arithmetic_problem(results.get("arithmetic", {})):
        return problem
    if not isinstance(results.get("warnings") or [], list):
        return notice("value.wrong_type", key="warnings", type="list")
    for name in ("references", "parameters"):
        if not isinstance(results.get(name) or {}, dict):
            return notice("value.wrong_type", key=name, type="object")
    counts = results.get("parameters") or {}
    if counts or completed:
        for name in ("total", "trainable", "frozen"):
            if not is_number(counts.get(name)):
                return notice("value.wrong_type", key=f"parameters.{name}", type="number")
        if counts["total"] <= 0 or counts["trainable"] < 0:
            return notice("value.too_small", key="parameters")
    for name, splits in (results.get("references") or {}).items():
        if not isinstance(splits, dict) or not all(map(_are_metrics, splits.values())):
            return notice("value.no_metrics", key=f"references.{name}")
    return None


def _arithmetic_problem(found: Any) -> Notice | None:
    if not isinstance(found, dict):
        return notice("value.wrong_type", key="arithmetic", type="object")
    for name in ("path", "device", "precision"):
        if not isinstance(found.get(name, ""), str):
            return notice("value.wrong_type", key=f"arithmetic.{name}", type="text")
    for name in ("numerics", "plain_from"):
        if found.get(name) is not None and not is_number(found[name]):
            return notice("value.wrong_type", key=f"arithmetic.{name}", type="number")
    return None


def environment_problem(environment: Any) -> Notice | None:
    """What is wrong with the contents of environment.json."""
    if not isinstance(environment, dict):
        return notice("value.not_object")
    if not isinstance(environment.get("packages", {}), dict):
        return notice("value.wrong_type", key="packages", type="object")
    for name in ("data", "commit", "oelm", "python", "platform", "gpu", "cpu", "device"):
        if not isinstance(environment.get(name) or "", str):
            return notice("value.wrong_type", key=name, type="text")
    numerics = environment.get("numerics")
    if numerics is None or is_number(numerics):
        return None
    return notice("value.wrong_type", key="numerics", type="number")


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


def _measured_problem(name: str, measured: Any, metric: str, needed: bool) -> Notice | None:
    if measured is None:
        return notice("value.missing", key=name) if needed else None
    if not isinstance(measured, dict) or not _are_metrics(measured.get("metrics")):
        return notice("value.no_metrics", key=name)
    if not is_measure(measured["metrics"].get(metric)):
        return notice("value.no_metric", key=name, metric=metric)
    if not isinstance(measured.get("split", ""), str) or not is_number(measured.get("step", 0)):
        return notice("value.not_placed", key=name)
    return None
