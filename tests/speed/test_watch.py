"""The fast path is watched, and given up where it fails: what fails here is the fast path alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oelm.errors import Interrupted, RunError
from oelm.speed import step as fast_step
from oelm.speed import watch
from oelm.speed.operations import kernels_allowed
from oelm.training import loop
from oelm.training.step import Watch
from tests.training.runs import Machine, outcome

Train = Callable[..., dict[str, Any]]


def break_fast_path(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[Any], object] = id) -> None:
    """From this step on a gradient is NaN, unless the plain path computes it. Each step calls `then`."""
    take = loop._step

    def broken(run: Any, *arguments: Any) -> Any:
        if run.progress.step == step - 1 and not run.step.plain:
            run.step.raw.classifier.weight.register_hook(lambda grad: grad.clone().fill_(float("nan")))
        then(run)
        return take(run, *arguments)

    monkeypatch.setattr(loop, "_step", broken)


def without_dropout(config: Path) -> Path:
    """The paths draw different numbers for it."""
    config.write_text(config.read_text().replace("dropout = 0.1", "dropout = 0.0"))
    return config


def same_run(one: Path, other: Path) -> None:
    """Two runs have the same losses and weights but for rounding: the paths add in different order."""
    lines = [
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (one, other)
    ]
    for mine, theirs in zip(*lines, strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        for key in ("loss", "grad_norm") if mine["kind"] == "train" else ():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3)
    weights = [load_file(folder / "model/model.safetensors") for folder in (one, other)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_run_goes_on_by_the_plain_path_where_the_fast_one_fails(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at some steps after the failure, which must not count."""
    config = without_dropout(machine.config(log_every=5, save_every=0))
    train_here(config, tmp_path / "unbroken")
    break_fast_path(monkeypatch, 12)
    results = train_here(config, tmp_path / "run")
    assert results["arithmetic"]["path"] == "fast" and results["arithmetic"]["plain_from"] == 12
    assert {"code": "training.left_fast_path", "values": {"step": 12}} in results["warnings"]
    same_run(tmp_path / "run", tmp_path / "unbroken")


def test_a_run_that_fell_back_and_was_stopped_goes_on_by_the_plain_path(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = machine.config()

    def stop(run: Any) -> None:
        if run.progress.step == 14:
            run.stop.reason = "enough"

    break_fast_path(monkeypatch, 12)
    train_here(config, tmp_path / "unbroken")
    monkeypatch.undo()
    break_fast_path(monkeypatch, 12, stop)
    with pytest.raises(Interrupted):
        train_here(config, tmp_path / "run")
    monkeypatch.undo()
    paths: list[bool] = []
    break_fast_path(monkeypatch, 0, lambda run: paths.append(run.step.plain))
    results = train_here(config, tmp_path / "run")
    assert paths and all(paths) and results["arithmetic"]["plain_from"] == 12
    assert outcome(tmp_path / "run") == outcome(tmp_path / "unbroken")  # the plain path resumes exactly, too


def test_fall_back_can_be_forbidden(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_fast_path(monkeypatch, 3)
    with pytest.raises(RunError, match="the gradient is nan at step 3; items"):
        train_here(machine.config(fallback=False), tmp_path / "run")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_fast_path_is_compared_at_the_first_step_and_now_and_then(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    monkeypatch.setattr(watch, "EARLY", (4,))
    monkeypatch.setattr(watch, "EVERY", 10)
    config = machine.config()
    config.write_text(config.read_text().replace("dropout = 0.1", f"dropout = {dropout}"))
    found = train_here(config, tmp_path / "run")["watch"]
    assert found["checks"] == 4 and found["largest_deviation"].keys() == {"loss", "grad_norm"}
    assert all(value <= 1e-4 for value in found["largest_deviation"].values())
    state = tmp_path / "run/checkpoints/step-00000030/state.json"
    assert json.loads(state.read_text())["watch"]["checks"] == 4  # so that resuming counts on


def test_a_run_does_not_fail_for_want_of_memory_to_be_watched(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for the plain path")

    monkeypatch.setattr(fast_step, "measure_expected", no_memory)
    found = train_here(machine.config(steps=6), tmp_path / "run")["watch"]
    assert found == {"checks": 0, "skipped": 1, "why_not": None, "largest_deviation": {}}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_fast_path_that_computes_something_else_ends_the_run(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    """Its logits are a hundredth too large."""
    step = loop._step

    def wrong(run: Any, *arguments: Any) -> Any:
        if run.progress.step == 0:
            enlarge = lambda *found: found[2] * 1.01 if kernels_allowed() else None  # noqa: E731
            run.step.raw.classifier.register_forward_hook(enlarge)
        return step(run, *arguments)

    monkeypatch.setattr(loop, "_step", wrong)
    config = machine.config(lr=1e-2)
    config.write_text(config.read_text().replace("dropout = 0.1", f"dropout = {dropout}"))
    with pytest.raises(RunError, match=r"step 1: the .* is .* by the fast path, .* by the plain path and"):
        train_here(config, tmp_path / "run")


def test_a_run_that_is_not_watched_says_why(machine: Machine, train_here: Train, tmp_path: Path) -> None:
    found = train_here(machine.config(steps=6, fast=False), tmp_path / "run")["watch"]
    assert found["checks"] == 0 and found["why_not"] == "the run takes the plain path"


def test_other_hardware_or_software_is_compared_anew() -> None:
    seen, same = Watch(), {"loss": 1.0, "grad_norm": 1.0}
    assert watch.due(seen, 7)  # the first step of a run, or of one that goes on
    watch.compare(seen, same, watch.Expected(same, same), "fp32", 8)
    assert not watch.due(seen, 8) and watch.due(seen, watch.EARLY[0]) and watch.due(seen, 2 * watch.EVERY)
    seen.again = True
    assert watch.due(seen, 8)


def test_where_rounding_is_to_blame_float32_decides() -> None:
    """In half precision, a plain path that is as far from float32 as the fast one proves nothing."""
    right = watch.Expected({"loss": 1.0, "grad_norm": 30.0}, {"loss": 1.0, "grad_norm": 20.0})
    seen = Watch()
    watch.compare(seen, {"loss": 1.0, "grad_norm": 18.0}, right, "bf16", 1)
    assert seen.largest["grad_norm"] == pytest.approx(0.4)
    with pytest.raises(RunError, match="gradient norm is 70"):
        watch.compare(seen, {"loss": 1.0, "grad_norm": 70.0}, right, "bf16", 1)
    exact = watch.Expected({"loss": 1.0, "grad_norm": 20.0}, {"loss": 1.0, "grad_norm": 20.0})
    with pytest.raises(RunError, match="in float32"):
        watch.compare(seen, {"loss": 1.0, "grad_norm": 26.0}, exact, "bf16", 1)


def test_steps_after_a_fault_change_nothing_of_an_embedding_that_trains_in_windows() -> None:
    """`step_without_gradients` takes as many steps as were counted."""
    from oelm.speed.adamw import step_without_gradients

    group = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    tables = [torch.randn(40), torch.randn(40), torch.rand(40)]
    some, all_but_two = ([t.clone() for t in tables] for _ in range(2))
    step_without_gradients(*some, [1e-3] * 5, 7, torch.tensor(10.0), group)
    step_without_gradients(*all_but_two, [1e-3] * 3, 7, torch.tensor(10.0), group)
    assert all(torch.equal(a, b) for a, b in zip(some, all_but_two, strict=True))
