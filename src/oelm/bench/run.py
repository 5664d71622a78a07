"""Runs the benchmark and makes its record: medians, ratios and savings, as plain values for JSON."""

import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

from oelm.bench.cases import SAVINGS, Maker, Settings, arms_of, make_cases
from oelm.bench.load import Case
from oelm.bench.measure import ArmMeasurement, Window, measure, omitted_product, square_product
from oelm.bench.show import SCHEMA
from oelm.errors import UserError
from oelm.system.files import write_json
from oelm.training.folder import environment

PEAK, OMITTED = "matmul", "omitted-product"  # products that are timed among the arms
RATES: dict[str, Callable[[Window], float]] = {
    "texts_per_s": lambda w: w.texts / w.seconds,
    "tokens_per_s": lambda w: w.tokens / w.seconds,
    "step_s": lambda w: w.seconds / w.steps,
    "operations_per_s": lambda w: w.operations / w.seconds,
}
# The quantity by which the arms of a work are compared.
QUANTITIES = {
    "classification": "texts_per_s", "pretrained": "texts_per_s", "lm": "tokens_per_s", "freezing": "step_s",
    "large": "step_s",
}  # fmt: skip


# Arms share the code of their blocks, which is compiled for each. Caches are off, as code that was tuned for
# the sizes of an earlier case would slow a later one.
@torch.compiler.config.patch(recompile_limit=64, force_disable_caches=True)  # type: ignore[attr-defined]
def run_bench(
    settings: Settings, device: torch.device, say: Callable[[str], None], json_file: Path | None
) -> dict[str, Any]:
    """Measure every requested case. With `json_file` the record is written after each of them."""
    began = time.monotonic()

    def time_left() -> bool:
        return settings.stop_after is None or time.monotonic() - began < settings.stop_after

    cases: list[dict[str, Any]] = []
    record = {
        "schema": SCHEMA,
        "command": shlex.join(["oelm", *sys.argv[1:]]),
        "settings": asdict(settings),
        "environment": environment(device, 1),
        "cases": cases,
    }
    for case in make_cases(settings, device):
        arms = arms_of(case, settings)
        if not arms:
            continue
        if cases and not time_left():
            say(f"{case.work}: {case.name} and what comes after it: not run, the time was up")
            break
        say(f"{case.work}: {case.name}, {case.batch_size} texts of up to {case.length} tokens a step")
        products: dict[str, Maker] = {PEAK: partial(square_product, device)}
        if case.work in SAVINGS:
            sizes = case.config.num_layers, case.config.d_model, case.batch_size * case.length
            pooled = case.store.kind == "classification" and case.model["architecture"] == "gpt"
            products[OMITTED] = partial(omitted_product, device, *sizes, pooled=pooled)
        measured = measure(products | arms, settings.rounds, device, time_left, say)
        cases.append(case_record(case, list(arms), measured))
        torch.compiler.reset()
        if json_file is not None:
            write_json(json_file, record)
    if not cases:
        raise UserError(
            f"nothing to measure: of --work {','.join(settings.work)} no arm is left that fits --data and is "
            "not in --leave-out"
        )
    return record


def case_record(case: Case, arms: list[str], measured: dict[str, ArmMeasurement]) -> dict[str, Any]:
    """The record of one case."""
    peak = median(measured[PEAK], "operations_per_s")
    record = {
        "work": case.work,
        "name": case.name,
        "kind": case.store.kind,
        "model": case.model,
        "batch_size": case.batch_size,
        "length": case.length,
        "checkpointing": case.checkpointing,
        "data": case.store.fingerprint,
        "matmul": {"about": measured[PEAK].about, "operations_per_s": peak},
        "arms": [_arm_record(measured[name], peak) for name in arms],
        "ratios": _ratios(QUANTITIES[case.work], arms, measured),
    }
    if case.work in SAVINGS:
        record["savings"] = _savings(arms, measured)
    return record


def median(arm: ArmMeasurement, rate: str) -> float | None:
    return statistics.median(map(RATES[rate], arm.windows)) if arm.windows else None


def _arm_record(arm: ArmMeasurement, peak: float | None) -> dict[str, Any]:
    record: dict[str, Any] = {"name": arm.name, "about": arm.about, "failed": arm.failed}
    record |= {rate: median(arm, rate) for rate in RATES}
    record["share_of_peak"] = record["operations_per_s"] / peak if arm.windows and peak else None
    record |= {"parameters": arm.parameters, "peak_memory_bytes": arm.peak_memory}
    record["gradients_bytes"], record["optimizer_bytes"] = arm.held or (None, None)
    for name in ("clock_mhz", "power_w"):
        values = [value for window in arm.windows if (value := getattr(window, name)) is not None]
        record[name] = statistics.median(values) if values else None
    return record | {"windows": [asdict(window) for window in arm.windows]}


def _ratios(quantity: str, arms: list[str], measured: dict[str, ArmMeasurement]) -> list[dict[str, Any]]:
    """The first arm's rate divided by each peer's or, for methods, each one's step time divided by the
    baseline's."""
    pairs = [(other, arms[0]) if quantity == "step_s" else (arms[0], other) for other in arms[1:]]
    return [
        {"of": of, "to": to, "quantity": quantity}
        | ratio(measured[of].windows, measured[to].windows, quantity)
        for of, to in pairs
        if measured[of].windows and measured[to].windows
    ]


def ratio(of: list[Window], to: list[Window], quantity: str) -> dict[str, Any]:
    """The ratio of the medians, and the lowest and highest ratio of a round."""
    above, below = ([RATES[quantity](window) for window in windows] for windows in (of, to))
    rounds = [a / b for a, b in zip(above, below, strict=False)]  # an arm may have failed in a late round
    value = statistics.median(above[: len(rounds)]) / statistics.median(below[: len(rounds)])
    return {"ratio": value, "low": min(rounds), "high": max(rounds)}


def _savings(arms: list[str], measured: dict[str, ArmMeasurement]) -> list[dict[str, Any]]:
    """The time and memory that each method saves of the baseline's step, and the time of the omitted product
    alone."""
    product, base = measured[OMITTED], measured.get("baseline", ArmMeasurement("baseline"))
    baseline_s, product_s = median(base, "step_s"), median(product, "step_s")
    if baseline_s is None or product_s is None:
        return []
    omitted, work = (arm.windows[0].operations / arm.windows[0].steps for arm in (product, base))
    savings = []
    for name in arms:
        step, arm = median(measured[name], "step_s"), measured[name]
        if name == "baseline" or step is None:
            continue
        assert base.held is not None and arm.held is not None
        steps = [[RATES["step_s"](window) for window in windows] for windows in (base.windows, arm.windows)]
        savings.append(
            {
                "method": name,
                "saved_s": baseline_s - step,
                "saved_s_rounds": [before - after for before, after in zip(*steps, strict=False)],
                "saved_share": (baseline_s - step) / baseline_s,
                "omitted_product_s": product_s,
                "saved_of_omitted": (baseline_s - step) / product_s,
                "omitted_share_of_operations": omitted / work,
                "held_bytes_saved": sum(base.held) - sum(arm.held),
                "peak_memory_bytes_saved": base.peak_memory - arm.peak_memory
                if base.peak_memory is not None and arm.peak_memory is not None
                else None,
            }
        )
    return savings
