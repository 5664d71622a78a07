"""The time of every step, and the results under the names of the published reports."""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.training import loop
from oelm.training.results import REPORTS_KEYS, REPORTS_TIMING
from oelm.training.step_clock import StepClock
from tests.training.runs import Machine

DOCS = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
Train = Callable[..., dict[str, Any]]


def test_each_step_has_its_own_time_and_pauses_have_none() -> None:
    clock = StepClock(torch.device("cpu"))
    for seconds in (0.0, 0.4, 0.0):
        time.sleep(seconds)
        clock.step_done()
    first = clock.read()
    time.sleep(0.4)  # an evaluation
    clock.start()
    clock.step_done()
    assert len(first) == 3 and first[1] >= 0.4 > max(first[0], first[2])
    assert clock.read()[0] < 0.4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_lasts_as_long_as_its_work() -> None:
    a, clock = torch.ones(4096, 4096, device="cuda"), StepClock(torch.device("cuda"))
    for products in (1, 50, 1):
        for _ in range(products):
            b = a @ a
        clock.step_done()
    float(b[0, 0])
    first, second, third = clock.read()
    assert second > 5 * third and first > 0


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lets every fifth step take 100 s, the others 1 s; returns the seconds of the steps so far."""
    taken: list[float] = []
    numbers = itertools.count(1)

    class Clock(StepClock):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cpu"))  # what a mark is here

        def step_done(self) -> None:
            taken.append(100.0 if next(numbers) % 5 == 0 else 1.0)
            super().step_done()

        def _mark(self) -> float:
            return sum(taken)

    monkeypatch.setattr(loop, "StepClock", Clock)
    return taken


def test_a_run_records_the_true_median(
    machine: Machine, train_here: Train, slow_steps: list[float], tmp_path: Path
) -> None:
    results = train_here(machine.config(steps=30, log_every=5, eval_every=10, save_every=0), tmp_path / "run")
    timing = json.loads((tmp_path / "run" / "timing_stats.json").read_text())
    measured = slow_steps[loop.UNTIMED :]
    assert len(slow_steps) == 30 and timing["steps_measured"] == len(measured) == 25
    assert timing["median_s"] == statistics.median(measured) == 1.0
    assert timing["mean_s"] == pytest.approx(statistics.fmean(measured))
    block = results["reports"]
    assert block["timing_stats"]["median_step_time"] == 1.0
    assert block["timing_stats"]["total_validation_time"] == timing["validation_time_s"]
    assert block["timing_stats"]["pure_training_time"] == results["train_time_s"]
    assert block["best_accuracy"] == 100 * results["best"]["metrics"]["accuracy"]
    assert block["final_val_loss"] == results["final"]["metrics"]["loss"]
    assert block["total_params"] == results["parameters"]["total"]
    assert (block["model_type"], block["max_lr"]) == (results["method"], results["lr"])
    assert "final_perplexity" not in block  # a classifier has none
    assert json.loads((tmp_path / "run" / "results.json").read_text())["reports"] == block


@pytest.mark.parametrize(("theirs", "ours"), [*REPORTS_KEYS.items(), *REPORTS_TIMING.items()])
def test_the_page_on_the_reports_says_the_same(theirs: str, ours: str) -> None:
    (row,) = [line for line in DOCS.splitlines() if line.startswith("|") and f"`{theirs}`" in line]
    assert f"`{ours}`" in row or f"`.{ours.rpartition('.')[2]}`" in row or ours in row
