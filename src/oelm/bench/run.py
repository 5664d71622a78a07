"""The benchmark from its settings to its record."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

from oelm.bench.cases import Maker, Settings, make_cases
from oelm.bench.measure import measure, omitted_product, square_product
from oelm.bench.record import OMITTED, PEAK, case_record, full_record
from oelm.errors import UserError
from oelm.system.files import write_json


def run_bench(
    settings: Settings,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Measure every case asked for. With `json_file` the record is written after each of them."""
    began = time.monotonic()
    torch.compiler.config.recompile_limit = 64  # arms share the code of their blocks
    # What was compiled for an earlier case is tuned for its sizes; found in a cache it would slow this one.
    torch.compiler.config.force_disable_caches = True

    def time_left() -> bool:
        return settings.stop_after is None or time.monotonic() - began < settings.stop_after

    records: list[dict[str, Any]] = []
    for case in make_cases(settings, device):
        if not case.arms:
            continue
        if records and not time_left():
            say(f"{case.work}: {case.name} and what comes after it: not run, the time was up")
            break
        say(f"{case.work}: {case.name}, {case.batch_size} texts of up to {case.length} tokens a step")
        products: dict[str, Maker] = {PEAK: lambda: square_product(device)}
        if case.work == "freezing":
            sizes = case.config.num_layers, case.config.d_model, case.tokens_per_step or 0
            products[OMITTED] = lambda sizes=sizes: omitted_product(device, *sizes)  # type: ignore[misc]
        found = measure(products | case.arms, settings.rounds, device, time_left, say)
        records.append(case_record(case, found))
        torch.compiler.reset()
        if json_file is not None:
            write_json(json_file, full_record(settings, records, device))
    if not records:
        raise UserError(
            f"nothing to measure: of --work {','.join(settings.work)} no arm is left that fits --data and is "
            "not in --leave-out"
        )
    return full_record(settings, records, device)
