"""The fast paths compute what the plain ones do. Graphs need a GPU; all that surrounds them does not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import make_config
from oelm.data import IGNORE, open_store, packed_batch
from oelm.data.assemble import filled, round_up
from oelm.training import fast
from oelm.training.build import build_model
from oelm.training.objective import make_objective
from oelm.training.schedule import make_optimizer, set_rate
from tests.training.runs import make_store

GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(make_store(tmp_path_factory.mktemp("fast")))


def config(**values):
    model = {"name": "gpt-tiny", **values.pop("model", {})}
    return make_config({"task": {"data": "x", "max_length": 32}, "model": model, "training": values})


def objective(store, **attributes):
    found = make_objective(store, 32, 0.0, "none")
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@given(st.integers(1, 1 << 20))
def test_round_sizes_are_few_and_near(n):
    assert n <= round_up(n) < n + max(256, n // 8 + 1)
    assert round_up(round_up(n)) == round_up(n)


@given(items=st.lists(st.integers(0, 319), min_size=1, max_size=64, unique=True))
def test_a_filled_batch_holds_the_texts_and_texts_nobody_asked_for(store, items):
    split = store["train"]
    plain = packed_batch(split, np.array(items))
    batch = filled(plain, store.max_length)
    n, texts = len(plain.input_ids), len(items)
    assert len(batch.input_ids) == len(batch.position_ids) == round_up(n) == batch.cu_seqlens[-1]
    assert torch.equal(batch.input_ids[:n], plain.input_ids)
    assert torch.equal(batch.cu_seqlens[: texts + 1], plain.cu_seqlens)
    assert torch.equal(batch.labels[:texts], plain.labels) and (batch.labels[texts:] == IGNORE).all()
    lengths = batch.cu_seqlens.diff()
    assert (lengths >= 0).all() and lengths.max() <= batch.longest == store.max_length
    expected = torch.cat([torch.arange(length) for length in lengths.tolist()])
    assert torch.equal(batch.position_ids, expected)
    assert len(batch.labels) == len(lengths)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_packed_batches_have_the_losses_and_gradients_of_padded_ones(store, pooling):
    settings = config(model={"pooling": pooling})
    model, _ = build_model(settings, store, "AutoModelForSequenceClassification")
    items = np.array([3, 50, 7, 200, 121])
    found = []
    for attributes in ({}, {"packed": True}, {"packed": True, "static": True}):
        loss = objective(store, **attributes).loss(
            model, objective(store, **attributes).batch("train", items)
        )
        loss.backward()
        found.append((loss.item(), model.transformer.wte.weight.grad.clone()))
        model.zero_grad()
    for loss, grad in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-4, atol=1e-6)


def test_evaluation_of_packed_texts(store):
    from oelm.training.evaluate import evaluate
    from oelm.training.parallel import autocast_of

    model, _ = build_model(config(), store, "AutoModelForSequenceClassification")
    plain = autocast_of("fp32", torch.device("cpu"))
    padded = evaluate(model, objective(store), "test", plain)
    packed = evaluate(model, objective(store, packed=True, static=True), "test", plain)
    assert padded.metrics["loss"] == pytest.approx(packed.metrics["loss"], rel=1e-5)
    assert np.array_equal(padded.arrays["ids"], packed.arrays["ids"])
    np.testing.assert_allclose(padded.arrays["scores"], packed.arrays["scores"], rtol=1e-4, atol=1e-6)


def test_the_two_halves_of_a_graphed_step_make_a_step(store, monkeypatch):
    """What a graph would record, run as it stands: the same weights as plain steps."""
    monkeypatch.setattr(fast, "MOST_GRAPHS", 0)
    settings = config(clip=0.1)
    weights = []
    for graphed in (False, True):
        model, _ = build_model(settings, store, "AutoModelForSequenceClassification")
        optimizer = make_optimizer(model, settings.training)
        task = objective(store, packed=graphed, static=graphed)
        parameters = list(model.parameters())

        def finish(optimizer=optimizer, parameters=parameters):
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.training.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return norm

        step = fast.GraphedStep(lambda b, t=task, m=model: t.loss(m, b), finish, torch.zeros(()))
        for k in range(4):
            items = np.arange(8 * k, 8 * k + 8)
            set_rate(optimizer, 1e-3 * (k + 1))
            if graphed:
                step.backward(task.batch("train", items), 1 / 8)
                step.ended = False  # there is no graph to record on a CPU
                step.step()
            else:
                (task.loss(model, task.batch("train", items)) / 8).backward()
                finish()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_why_a_run_is_not_fast_is_said(store):
    task = objective(store)
    model, _ = build_model(config(), store, task.auto_class)
    assert fast.why_padded(config(), task, model, GPU) is None
    assert "GPU" in fast.why_padded(config(), task, model, torch.device("cpu"))
    assert "off" in fast.why_padded(config(fast=False), task, model, GPU)
    dropped, _ = build_model(config(model={"attention_dropout": 0.1}), store, task.auto_class)
    assert "0.1" in fast.why_padded(config(), task, dropped, GPU)
    assert fast.why_eager(config(), 1, GPU, "bf16") is None
    assert "processes" in fast.why_eager(config(), 2, GPU, "bf16")
    assert "fp16" in fast.why_eager(config(), 1, GPU, "fp16")
    assert "checkpointing" in fast.why_eager(config(gradient_checkpointing=True), 1, GPU, "bf16")
