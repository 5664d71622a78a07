"""A finished run that is told to go on: exactly the run whose config says so from the beginning."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import UserError
from oelm.training import loop
from oelm.training.folder import read_config
from oelm.training.schedule import learning_rate
from tests.training.runs import Machine, outcome
from tests.training.test_resolve import resolved


def _numbers(folder: Path) -> dict[str, Any]:
    """The outcome of a run; what was logged before it was extended names fewer steps."""
    left = outcome(folder)
    left["metrics"] = [{key: value for key, value in line.items() if key != "of"} for line in left["metrics"]]
    del left["best"]["state"]["warnings"]
    return left


def test_a_finished_run_goes_on_with_a_new_schedule(
    machine: Machine,
    train_here: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, planned = tmp_path / "run", tmp_path / "planned"
    short, long = machine.config(steps=6), machine.config(steps=12)
    assert train_here(short, out)["steps"] == 6
    with pytest.raises(UserError, match=r"training\.lr is 0.002 there"):
        train_here(machine.config(steps=12, lr=1e-3), out)
    with pytest.raises(UserError, match=r"training\.steps is 6 there, 4 here"):
        train_here(machine.config(steps=4), out)
    step = loop._step

    def broken_off(run: Any, *arguments: Any) -> Any:
        if run.progress.step == 10:
            raise KeyboardInterrupt
        return step(run, *arguments)

    monkeypatch.setattr(loop, "_step", broken_off)
    with pytest.raises(KeyboardInterrupt):
        train_here(long, out)
    monkeypatch.setattr(loop, "_step", step)
    train_here(long, out)  # goes on as any run does
    assert read_config(out).training.extended_from == (6,)
    told = {w["code"]: w["values"] for w in json.loads((out / "results.json").read_text())["warnings"]}
    assert told["training.extended"] == {"ends": [6], "steps": 12}
    train_here(machine.config(steps=12, extended_from=[6]), planned)
    assert _numbers(out) == _numbers(planned)
    with pytest.raises(UserError, match="holds a finished run"):
        train_here(long, out)


def test_what_is_frozen_by_shares_of_a_run_cannot_be_extended() -> None:
    method = {"name": "oelm-unfreeze"}
    assert resolved({"steps": 12}, method=method).total_steps == 12
    with pytest.raises(UserError, match="freeze_schedule cannot go on"):
        resolved({"steps": 12, "extended_from": [6]}, method=method)


def test_every_part_has_the_schedule_of_a_run_of_its_length() -> None:
    whole = resolved({"steps": 90, "warmup": 0.1, "extended_from": [30, 50]})
    rates = [learning_rate(whole, step) for step in range(90)]
    parts = [resolved({"steps": steps, "warmup": 0.1}) for steps in (30, 20, 40)]
    assert rates == [learning_rate(part, step) for part in parts for step in range(part.total_steps)]
    with pytest.raises(UserError, match="growing numbers of steps below 90"):
        resolved({"steps": 90, "extended_from": [90]})
