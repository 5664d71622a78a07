"""What a run holds in memory is what a checkpoint on disk would hold."""

import pytest
import torch

from oelm.data import open_store
from oelm.models.build import build_model
from oelm.speed import FastStep
from oelm.training.checkpoint import Checkpoint, TensorCopies, capture, copy_state
from oelm.training.shards import first_not_finite
from oelm.training.step import PlainStep
from tests.speed.test_fast import config, made, objective
from tests.training.runs import make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(make_store(tmp_path_factory.mktemp("held")))


@pytest.mark.parametrize("kind", [PlainStep, FastStep])
def test_what_is_held_stays_as_it_was_and_comes_back(store, kind):
    """With rows of the embedding set aside, too."""
    task, settings = objective(store), config(batch_size=8, steps=20, lr=1e-2, method="oelm")
    model, _ = build_model(settings, store)
    step = made(kind, settings, task, model)
    batches = task.plan("train", 8, None, 1).epoch(0)
    for k in range(5):
        step.take(k, batches, k)
    held, right = step.copy_state(), step.capture()
    assert kind is PlainStep or step.rows
    wide = next(name for name in held[0] if name.endswith("wte.weight"))
    assert len(held[0][wide]) == model.config.vocab_size
    for mine, whole in zip(held, right, strict=True):
        assert mine.keys() == whole.keys() and len(mine) == len(whole)
        assert all(torch.equal(mine[name].cpu(), value) for name, value in whole.items())
        assert all(value.device.type == "cpu" for value in whole.values())
    losses = [float(step.take(k, batches, k)[0]) for k in range(5, 9)]
    assert not all(torch.equal(value, step.capture()[0][name]) for name, value in right[0].items())
    assert all(torch.equal(held[0][name].cpu(), value) for name, value in right[0].items())
    step.restore(Checkpoint(*held, {}))
    assert [float(step.take(k, batches, k)[0]) for k in range(5, 9)] == losses
    step.close()


def test_the_first_parameter_that_is_not_finite_is_named(store):
    model, _ = build_model(config(), store)
    assert first_not_finite(model) is None
    names = [name for name, _ in model.named_parameters()]
    for number, bad in ((7, torch.inf), (3, torch.nan), (5, -torch.inf)):
        dict(model.named_parameters())[names[number]].data.view(-1)[-1] = bad
        assert first_not_finite(model) == names[7 if number == 7 else 3]


def test_moments_of_weights_that_are_frozen_are_not_there(store):
    settings = config(method="oelm", batch_size=8, steps=4)
    task = objective(store)
    model, _ = build_model(settings, store)
    step = made(PlainStep, settings, task, model)
    step.take(0, task.plan("train", 8, None, 1).epoch(0), 0)
    weights, moments = copy_state(model, step.optimizer, {})
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen and frozen < set(weights)
    assert not frozen & {key.rpartition("/")[0] for key in moments}
    assert capture(model, step.optimizer, {})[1].keys() == moments.keys()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_copy_lies_in_order_and_shares_nothing(on_cpu):
    held, tensor = TensorCopies(on_cpu), torch.arange(6.0).view(2, 3).t()
    held.keep("w", tensor, None)
    before = tensor.clone()
    tensor.zero_()
    assert torch.equal(held["w"], before) and held["w"].is_contiguous()
    assert [*held] == ["w"] and held["w"].device.type == "cpu"
