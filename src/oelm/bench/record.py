"""From windows to medians, ratios and savings: plain values, ready for JSON."""

import shlex
import statistics
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch

from oelm.bench.cases import Case, Settings
from oelm.bench.measure import ArmMeasurement, Window
from oelm.bench.show import SCHEMA

PEAK, OMITTED = "matmul", "omitted-product"  # products that are timed among the arms
RATES: dict[str, Callable[[Window], float]] = {
    "texts_per_s": lambda w: w.texts / w.seconds,
    "tokens_per_s": lambda w: w.tokens / w.seconds,
    "step_s": lambda w: w.seconds / w.steps,
    "operations_per_s": lambda w: w.operations / w.seconds,
}


def case_record(case: Case, found: dict[str, ArmMeasurement]) -> dict[str, Any]:
    """Everything one case has shown."""
    rates = {name: _rates(arm.windows) for name, arm in found.items() if arm.windows}
    peak = rates.get(PEAK, {}).get("operations_per_s")
    arms = [_arm_record(arm, rates.get(arm.name), peak) for name, arm in found.items() if name in case.arms]
    record = {
        "work": case.work,
        "name": case.name,
        "kind": case.kind,
        "batch_size": case.batch_size,
        "length": case.length,
        "tokens_per_step": case.tokens_per_step,
        "data": case.fingerprint,
        "matmul": {"about": found[PEAK].about, "operations_per_s": peak},
        "arms": arms,
        "ratios": _ratios(case, found),
    }
    if case.work == "freezing":
        record["savings"] = _savings(case, found, rates)
    return record


def _rates(windows: list[Window]) -> dict[str, float]:
    return {name: statistics.median(map(rate, windows)) for name, rate in RATES.items()}


def _arm_record(arm: ArmMeasurement, rates: dict[str, float] | None, peak: float | None) -> dict[str, Any]:
    record: dict[str, Any] = {"name": arm.name, "about": arm.about, "failed": arm.failed}
    record |= rates or dict.fromkeys(RATES)
    record["share_of_peak"] = rates["operations_per_s"] / peak if rates and peak else None
    record |= {"parameters": arm.parameters, "peak_memory_bytes": arm.peak_memory}
    record["peak_requested_bytes"] = arm.peak_requested
    for name in ("gradients", "optimizer", "counters"):
        record[f"{name}_bytes"] = None if arm.held is None else getattr(arm.held, name)
    for name in ("clock_mhz", "power_w"):
        seen = [value for window in arm.windows if (value := getattr(window, name)) is not None]
        record[name] = statistics.median(seen) if seen else None
    return record | {"windows": [asdict(window) for window in arm.windows]}


def quantity_of(case: Case) -> str:
    """What a case's arms are compared by."""
    if case.work == "freezing":
        return "step_s"
    return "texts_per_s" if case.work == "classification" else "tokens_per_s"


def _ratios(case: Case, found: dict[str, ArmMeasurement]) -> list[dict[str, Any]]:
    """The first arm's rate over each peer's; of methods, each one's step time over the baseline's."""
    first, *others = case.arms
    pairs = [(other, first) if case.work == "freezing" else (first, other) for other in others]
    quantity = quantity_of(case)
    return [
        {"of": of, "to": to, "quantity": quantity} | ratio(found[of].windows, found[to].windows, quantity)
        for of, to in pairs
        if found[of].windows and found[to].windows
    ]


def ratio(of: list[Window], to: list[Window], quantity: str) -> dict[str, Any]:
    """The ratio of the medians, and the ratios of the rounds, between whose ends it always lies."""
    mine, theirs = ([RATES[quantity](window) for window in windows] for windows in (of, to))
    rounds = [a / b for a, b in zip(mine, theirs, strict=False)]  # one may have failed in a late round
    value = statistics.median(mine[: len(rounds)]) / statistics.median(theirs[: len(rounds)])
    return {"ratio": value, "low": min(rounds), "high": max(rounds), "rounds": rounds}


def _savings(
    case: Case, found: dict[str, ArmMeasurement], rates: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """What each method saves of the baseline's step, beside what the product it omits takes alone."""
    if "baseline" not in rates or OMITTED not in rates:
        return []
    base, alone = found["baseline"], rates[OMITTED]["step_s"]
    per_step = {name: found[name].windows[0] for name in ("baseline", OMITTED)}
    work = {name: window.operations / window.steps for name, window in per_step.items()}
    saved = []
    for name, arm in found.items():
        if name == "baseline" or name not in case.arms or name not in rates:
            continue
        time_saved = rates["baseline"]["step_s"] - rates[name]["step_s"]
        saved.append(
            {
                "method": name,
                "saved_s": time_saved,
                "saved_s_rounds": _differences(base.windows, arm.windows),
                "saved_share": time_saved / rates["baseline"]["step_s"],
                "omitted_product_s": alone,
                "omitted_product_about": found[OMITTED].about,
                "saved_of_omitted": time_saved / alone,
                "omitted_share_of_operations": work[OMITTED] / work["baseline"],
                "held_bytes_saved": _held(base) - _held(arm),
                "peak_memory_bytes_saved": _less(base.peak_memory, arm.peak_memory),
                "peak_requested_bytes_saved": _less(base.peak_requested, arm.peak_requested),
            }
        )
    return saved


def _less(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def _differences(base: list[Window], other: list[Window]) -> list[float]:
    pairs = zip(base, other, strict=False)
    return [RATES["step_s"](before) - RATES["step_s"](after) for before, after in pairs]


def _held(arm: ArmMeasurement) -> int:
    assert arm.held is not None
    return arm.held.gradients + arm.held.optimizer


def full_record(settings: Settings, cases: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """The file that `--json` writes: what was asked, where it ran, and every case."""
    from oelm.training.folder import environment

    return {
        "schema": SCHEMA,
        "command": command_of(settings),
        "settings": asdict(settings),
        "environment": environment(device, 1),
        "cases": cases,
    }


def command_of(settings: Settings) -> str:
    """The command that asks for exactly this, every default spelled out."""
    words = ["oelm", "bench"]
    for entry in fields(settings):
        value, flag = getattr(settings, entry.name), f"--{entry.name.replace('_', '-')}"
        if entry.name == "data":
            words += [word for folder in value for word in (flag, folder)]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif entry.name == "stop_after":
            words += [flag, f"{value:g}s"] if value is not None else []
        elif isinstance(value, tuple):
            words += [flag, ",".join(map(str, value))] if value else []
        else:
            words += [flag, str(value)]
    return shlex.join(words)
