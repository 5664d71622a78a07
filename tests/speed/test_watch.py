"""The fast path is watched, and given up where it fails: what fails here is the fast path alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oelm.errors import Interrupted, RunError
from oelm.speed import watch
from oelm.speed.plain import kernels_allowed
from oelm.training import loop, stepper
from tests.training.runs import Machine, outcome

Train = Callable[..., dict[str, Any]]
Unbroken = Callable[..., tuple[Path, Path]]


def break_fast_path(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[Any], object] = id) -> None:
    """From this step on a gradient is NaN, unless the plain path computes it. Each step calls `then`."""
    take = loop._step

    def broken(session: Any, *arguments: Any) -> Any:
        if session.progress.step == step - 1 and not session.plain:
            session.raw.classifier.weight.register_hook(lambda grad: grad.clone().fill_(float("nan")))
        then(session)
        return take(session, *arguments)

    monkeypatch.setattr(loop, "_step", broken)


def same_run(one: Path, other: Path) -> None:
    """Two outcomes are the same, less what says which path was taken.

    Rows of words that no text uses shrink step by step or all at once: there the last digits differ.
    """
    both = [outcome(folder) for folder in (one, other)]
    for found in both:
        for key in ("last", "best", "model", "audit"):
            del found[key]
        for key in ("arithmetic", "paths", "warnings", "watch"):
            del found["results"][key]
    assert both[0] == both[1]
    weights = [load_file(folder / "model/model.safetensors") for folder in (one, other)]
    for name, weight in weights[0].items():
        same = torch.equal(weight, weights[1][name])
        assert same or ("wte" in name and torch.allclose(weight, weights[1][name], rtol=1e-5, atol=0)), name


def test_a_run_goes_on_by_the_plain_path_where_the_fast_one_fails(
    unbroken: Unbroken, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the two paths have the same bits, so the run must be what it would have been. It is looked at
    some steps after the failure, which must not count."""
    config, reference = unbroken(log_every=5, save_every=0)
    break_fast_path(monkeypatch, 12)
    results = train_here(config, tmp_path / "run")
    assert results["arithmetic"]["path"] == "fast" and results["arithmetic"]["plain_from"] == 12
    assert {"code": "training.left_fast_path", "values": {"step": 12}} in results["warnings"]
    same_run(tmp_path / "run", reference)


def test_a_run_that_fell_back_and_was_stopped_goes_on_by_the_plain_path(
    unbroken: Unbroken, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reference = unbroken()

    def stop(session: Any) -> None:
        if session.progress.step == 14:
            session.stop.reason = "enough"

    break_fast_path(monkeypatch, 12, stop)
    with pytest.raises(Interrupted):
        train_here(config, tmp_path / "run")
    monkeypatch.undo()
    paths: list[bool] = []
    break_fast_path(monkeypatch, 0, lambda session: paths.append(session.plain))
    results = train_here(config, tmp_path / "run")
    assert paths and all(paths) and results["arithmetic"]["plain_from"] == 12
    same_run(tmp_path / "run", reference)


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
    assert all(value <= 1e-5 for value in found["largest_deviation"].values())
    state = tmp_path / "run/checkpoints/step-00000030/state.json"
    assert json.loads(state.read_text())["watch"]["checks"] == 4  # so that resuming counts on


def test_a_run_does_not_fail_for_want_of_memory_to_be_watched(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for the plain path")

    monkeypatch.setattr(stepper, "yardstick", no_memory)
    found = train_here(machine.config(steps=6), tmp_path / "run")["watch"]
    assert found == {"checks": 0, "skipped": 1, "why_not": None, "largest_deviation": {}}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_fast_path_that_computes_something_else_ends_the_run(
    machine: Machine, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    """Its logits are a hundredth too large."""
    step = loop._step

    def wrong(session: Any, *arguments: Any) -> Any:
        if session.progress.step == 0:
            enlarge = lambda *found: found[2] * 1.01 if kernels_allowed() else None  # noqa: E731
            session.raw.classifier.register_forward_hook(enlarge)
        return step(session, *arguments)

    monkeypatch.setattr(loop, "_step", wrong)
    config = machine.config(lr=1e-2)
    config.write_text(config.read_text().replace("dropout = 0.1", f"dropout = {dropout}"))
    with pytest.raises(RunError, match=r"step 1: the .* is .* by the fast path, .* by the plain path and"):
        train_here(config, tmp_path / "run")


def test_a_run_that_is_not_watched_says_why(machine: Machine, train_here: Train, tmp_path: Path) -> None:
    found = train_here(machine.config(steps=6, fast=False), tmp_path / "run")["watch"]
    assert found["checks"] == 0 and found["why_not"] == "the run takes the plain path"


def test_other_hardware_or_software_is_compared_anew() -> None:
    seen = watch.Watch()
    assert seen.due(7)  # the first step of a run, or of one that goes on
    seen.add({"loss": 0.0})
    assert not seen.due(8) and seen.due(watch.EARLY[0]) and seen.due(2 * watch.EVERY)
    seen.again = True
    assert seen.due(8)


def test_where_rounding_is_to_blame_float32_decides() -> None:
    """In half precision, a plain path that is as far from float32 as the fast one proves nothing."""
    right = watch.Yardstick({"loss": 1.0, "grad_norm": 30.0}, {"loss": 1.0, "grad_norm": 20.0})
    found = watch.compare({"loss": 1.0, "grad_norm": 18.0}, right, "bf16", 1)
    assert found["grad_norm"] == pytest.approx(0.4)
    with pytest.raises(RunError, match="gradient norm is 70"):
        watch.compare({"loss": 1.0, "grad_norm": 70.0}, right, "bf16", 1)
    exact = watch.Yardstick({"loss": 1.0, "grad_norm": 20.0}, {"loss": 1.0, "grad_norm": 20.0})
    with pytest.raises(RunError, match="in float32"):
        watch.compare({"loss": 1.0, "grad_norm": 26.0}, exact, "bf16", 1)


def test_steps_after_a_fault_change_nothing_of_an_embedding_that_trains_in_windows() -> None:
    """`coast` takes as many steps as were counted."""
    from oelm.speed.adamw import coast

    group = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    tables = [torch.randn(40), torch.randn(40), torch.rand(40)]
    some, all_but_two = ([t.clone() for t in tables] for _ in range(2))
    coast(*some, [1e-3] * 5, 7, torch.tensor(10.0), group)
    coast(*all_but_two, [1e-3] * 3, 7, torch.tensor(10.0), group)
    assert all(torch.equal(a, b) for a, b in zip(some, all_but_two, strict=True))
