"""Weights drawn while Python imports are the ones that a model draws itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.config import MethodConfig, RunConfig, make_config
from oelm.data import open_store
from oelm.models import initial_values
from oelm.models.build import build_model
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification
from oelm.models.gpt_config import gpt_config
from oelm.models.gpt_sizes import SIZES
from oelm.models.initial_values import drawing_ahead, sharing_draws
from tests.training.runs import Machine


def config_of(data: Path | str, size: str = "gpt-tiny", seed: int = 5) -> RunConfig:
    task = {"data": str(data), "max_length": 32}
    return make_config({"task": task, "model": {"name": size}, "training": {"seed": seed, "steps": 1}})


@pytest.mark.parametrize("seed", [5, 6])
def test_a_run_starts_from_the_weights_that_its_model_draws_alone(machine: Machine, seed: int) -> None:
    """Be they drawn ahead, with another seed (which nobody asks for then), or not at all."""
    store, config = open_store(machine.store), config_of(machine.store, seed=seed)
    draw, drawn = initial_values._draw, []
    with drawing_ahead(config_of(machine.store)), pytest.MonkeyPatch.context() as patch:
        ahead = [value.result() for value in initial_values._FUTURES.values()]
        patch.setattr(initial_values, "_draw", lambda *asked: drawn.append(asked[1]) or draw(*asked))
        before = torch.get_rng_state()
        model, _ = build_model(config, store)
        assert torch.equal(torch.get_rng_state(), before)  # torch draws nothing
        assert len(initial_values._FUTURES) == (0 if seed == 5 else len(ahead))
    assert len(ahead) == 2 + 6 * SIZES["gpt-tiny"][0]
    # The head's shape is the task's.
    assert drawn == ["classifier.weight"] if seed == 5 else len(drawn) == len(ahead) + 1
    alone = OelmGPTForSequenceClassification(model.config)
    weights = alone.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_is_not_known_yet_is_not_drawn_ahead(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "store.json").write_text('{"tokenizer": null}')
    known = config_of(machine.store)
    no_name = replace(known, model=replace(known.model, name=None))
    for config in (config_of(tmp_path), config_of(tmp_path / "none"), config_of("x.csv"), no_name):
        with drawing_ahead(config):
            assert not initial_values._FUTURES


def test_a_large_model_is_drawn_ahead_in_part(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "MOST_AHEAD", 10 * 128 * 128)
    with drawing_ahead(config_of(machine.store)):
        assert 0 < len(initial_values._FUTURES) <= 10
    assert not initial_values._FUTURES


@pytest.mark.parametrize("threads", [2, 7])
def test_a_large_model_is_drawn_by_several_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """The same weights; each is drawn once, few before they are asked for, and none stays behind."""
    config, waiting, drawn = gpt_config("gpt-tiny", vocab_size=300, num_layers=6), [], []
    alone = OelmGPTForCausalLM(config).state_dict()
    draw, value = initial_values._draw, initial_values.initial_value
    monkeypatch.setattr(initial_values, "_draw", lambda *asked: drawn.append(asked[1]) or draw(*asked))

    def asked_for(*asked: Any) -> Any:
        waiting.append(len(initial_values._FUTURES))
        return value(*asked)

    monkeypatch.setattr("oelm.models.gpt.initial_value", asked_for)
    monkeypatch.setattr(initial_values, "LARGE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = OelmGPTForCausalLM(config).state_dict()
    assert all(torch.equal(value, together[name]) for name, value in alone.items())
    assert len(drawn) == len(set(drawn)) == 2 + 6 * 6 + 1  # the tied head draws its own before it is tied
    assert 0 < max(waiting) <= 2 * threads
    assert not initial_values._FUTURES and not initial_values._DEFERRED


def test_what_fails_in_a_thread_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*asked: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(initial_values, "LARGE", 1)
    monkeypatch.setattr(initial_values, "_draw", fails)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(MemoryError, match="no room"):
        OelmGPTForCausalLM(gpt_config("gpt-tiny", vocab_size=300))
    assert not initial_values._FUTURES and not initial_values._DEFERRED


@pytest.mark.parametrize("most", [1 << 28, 30_000])
def test_models_that_are_built_together_share_what_is_drawn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each weight is drawn once, as far as there is room; the models are those that are built alone."""
    monkeypatch.setattr(initial_values, "MOST_AHEAD", most)
    store, draw, drawn = open_store(machine.store), initial_values._draw, []
    configs = [
        replace(config_of(machine.store), method=MethodConfig(name=name)) for name in ("baseline", "oelm")
    ]
    alone = [build_model(config, store)[0].state_dict() for config in configs]
    monkeypatch.setattr(initial_values, "_draw", lambda *asked: drawn.append(asked[1]) or draw(*asked))
    with sharing_draws():
        together = [build_model(config, store)[0].state_dict() for config in configs]
        kept = sum(value.size for value in initial_values._KEPT.values())
    for before, after in zip(alone, together, strict=True):
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    once = len({*drawn})
    assert len(drawn) == once if most > 30_000 else once < len(drawn) < 2 * once
    assert 0 < kept <= most and not initial_values._KEPT
    build_model(configs[0], store)
    assert not initial_values._KEPT
