"""The fast paths compute what the plain ones do. Graphs need a GPU; all that surrounds them does not."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import make_config
from oelm.data import IGNORE, open_store, packed_batch
from oelm.data.assemble import Layout, fill_to_round_sizes, round_up, round_width
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.speed import FastStep
from oelm.speed import cuda_graphs as fast
from oelm.speed.adamw import RecordableAdamW, clip_in_step
from oelm.speed.bf16_copies import Bf16Copies
from oelm.speed.capabilities import capabilities
from oelm.speed.forward import FastForward
from oelm.speed.live_rows import set_aside
from oelm.training import parallel
from oelm.training.parallel import process_state
from oelm.training.resolve import resolve_run
from oelm.training.schedule import make_optimizer
from oelm.training.step import PlainStep, make_step
from tests.speed.test_capabilities import MACHINES
from tests.tiny import disturb
from tests.training.runs import make_store

GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(make_store(tmp_path_factory.mktemp("fast")))


def config(**values):
    model = {"name": "gpt-tiny", **values.pop("model", {})}
    tables = {"method": {"name": values.pop("method", "baseline")}, "model": model, "training": values}
    return make_config({"task": {"data": "x", "max_length": 32}, **tables})


def objective(store):
    return make_objective(store, 32, 0.0, "none")


def made(kind, settings, task, model):
    """A step of this kind (or `make_step`'s) for a model."""
    state = process_state()
    return kind(resolve_run(settings, task, state.device), task, model, state)


def recorded_step(settings, task, model):
    """A step as it is recorded, without a GPU to record it."""
    step = made(FastStep, settings, task, model)
    step.optimizer = make_optimizer(model, settings.training, RecordableAdamW)
    step.graphed = step._make_graphed()
    return step


@given(st.integers(1, 1 << 20))
def test_round_sizes_are_few_and_near(n):
    assert n <= round_up(n) < n + max(128, n // 16 + 1)
    assert round_up(round_up(n)) == round_up(n)


@given(items=st.lists(st.integers(0, 319), min_size=1, max_size=64, unique=True))
def test_a_filled_batch_holds_the_texts_and_texts_nobody_asked_for(store, items):
    split = store["train"]
    plain = packed_batch(split, np.array(items))
    batch = fill_to_round_sizes(plain, store.max_length, store.pad_id)
    n, texts = plain.tokens, len(items)
    ids, positions, bounds = (batch.inputs[name] for name in ("input_ids", "position_ids", "bounds"))
    labels = batch.targets["labels"]
    assert ids.shape == positions.shape == (1, round_up(n)) and bounds[-1] == round_up(n)
    assert torch.equal(ids[:, :n], plain.inputs["input_ids"]) and (ids[:, n:] == store.pad_id).all()
    assert torch.equal(bounds[: texts + 1], plain.inputs["bounds"])
    assert torch.equal(labels[:texts], plain.targets["labels"]) and (labels[texts:] == IGNORE).all()
    lengths = bounds.diff()
    assert (lengths >= 0).all() and lengths.max() <= batch.longest == store.max_length
    expected = torch.cat([torch.arange(length) for length in lengths.tolist()])
    assert torch.equal(positions[0], expected)
    assert len(labels) == len(lengths)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_packed_batches_have_the_losses_and_gradients_of_padded_ones(store, pooling):
    settings = config(model={"pooling": pooling})
    model, _ = build_model(settings, store)
    items = np.array([3, 50, 7, 200, 121])
    FastForward(model, kernels=False).install()
    found, task = [], objective(store)
    for layout in ({}, {"round_widths": True}, {"packed": True}, {"packed": True, "round_widths": True}):
        loss = task.loss(model, task.batch("train", items, Layout(**layout)))
        loss.backward()
        found.append((loss.item(), model.transformer.wte.weight.grad.clone()))
        model.zero_grad()
    for loss, grad in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-4, atol=1e-6)


def test_evaluation_of_packed_texts(store):
    from oelm.training.evaluate import evaluate
    from oelm.training.parallel import autocast_of

    model, _ = build_model(config(), store)
    plain = autocast_of("fp32", torch.device("cpu"))
    padded = evaluate(model, objective(store), "test", plain)
    FastForward(model, kernels=False).install()
    layout = Layout(packed=True, round_widths=True)
    packed = evaluate(model, objective(store), "test", plain, layout=layout)
    assert padded.metrics["loss"] == pytest.approx(packed.metrics["loss"], rel=1e-5)
    assert np.array_equal(padded.arrays["ids"], packed.arrays["ids"])
    np.testing.assert_allclose(padded.arrays["scores"], packed.arrays["scores"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only", "oelm-lora"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_graph_records_is_a_step(store, monkeypatch, method, accumulate):
    """Run as it stands: the weights of plain steps, with half-precision copies, clipping inside the
    optimizer and gradients written in place of added ones."""
    monkeypatch.setattr(fast, "MOST_GRAPHS", 0)
    settings = config(
        clip=0.1, precision="bf16", accumulate=accumulate, batch_size=16, epochs=1, method=method
    )
    weights, losses = [], []
    for graphed in (False, True):
        task = objective(store)
        model, _ = build_model(settings, store)
        step = made(PlainStep, settings, task, model)
        if graphed:
            step = recorded_step(settings, task, model)
        batches = task.plan("train", 16, None, 1).epoch(0)
        model.train()
        losses.append([step.take(k, batches, k)[:2] for k in range(6)])
        weights.append(step.capture()[0])
        assert not graphed or not step.forward.joint
        step.close()
    for (loss, norm), (other_loss, other_norm) in zip(*losses, strict=True):
        assert float(loss) == pytest.approx(float(other_loss), rel=2e-3)
        assert float(norm) == pytest.approx(float(other_norm), rel=2e-2)
    moved = 0.0
    fresh, _ = build_model(settings, store)
    for name, value in fresh.named_parameters():
        way = (weights[0][name] - value.detach()).norm()
        # Adam's first steps turn the rounding of tiny gradients into whole steps: few, so by the norm.
        assert (weights[1][name] - weights[0][name]).norm() <= 0.1 * way, name
        moved += float(way)
    assert moved > 1


@pytest.mark.parametrize("method", ["baseline", "oelm-temperature", "oelm-lora"])
def test_half_precision_copies_hold_what_autocast_makes(store, method):
    model, _ = build_model(config(method=method), store)
    disturb(model)
    forward = FastForward(model, kernels=False)
    forward.install()
    half = Bf16Copies(model, torch.bfloat16, forward)
    task = objective(store)
    batch = task.batch("train", np.arange(16))
    with torch.autocast("cpu", torch.bfloat16):
        task.loss(model, batch).backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    half.refresh()
    with half.installed(), torch.autocast("cpu", torch.bfloat16):
        task.loss(model, batch).backward()
    half.collect()
    for name, parameter in model.named_parameters():
        assert parameter.grad is plain[name] is None or torch.equal(parameter.grad, plain[name]), name
    half_loss = 2 * plain["classifier.weight"]
    with half.installed(), torch.autocast("cpu", torch.bfloat16):
        task.loss(model, batch).backward()
    half.collect()  # a second time: added
    assert torch.equal(model.classifier.weight.grad, half_loss)


@pytest.mark.parametrize("which", ["all", "frozen", "trained"])
def test_a_step_sees_weights_that_someone_else_changed(store, monkeypatch, which):
    """As a step that is made of those weights does."""
    monkeypatch.setattr(fast, "MOST_GRAPHS", 0)
    settings = config(precision="bf16", batch_size=16, epochs=1, method="oelm")
    task = objective(store)
    batches = task.plan("train", 16, None, 1).epoch(0)

    def trained(model):
        model.train()
        return recorded_step(settings, task, model)

    model, _ = build_model(settings, store)
    step = trained(model)
    before = [float(step.take(k, batches, k)[0]) for k in range(2)]
    with torch.no_grad():
        for parameter in model.parameters():
            if which == "all" or parameter.requires_grad == (which == "trained"):
                parameter.mul_(1.5)
    step.close()
    other = copy.deepcopy(model)
    step.forward.install()
    loss = step.take(2, batches, 0)[0]
    assert torch.equal(loss, trained(other).take(2, batches, 0)[0])
    assert float(loss) != before[0]


def test_clipping_inside_the_optimizer_is_clipping():
    generator = torch.Generator().manual_seed(0)
    values, grads = (
        [torch.randn(4, n, generator=generator) for n in (3, 5)],
        [torch.randn(4, n, generator=generator) for n in (3, 5)],
    )
    for clip in (0.5, 100.0, 0.0):
        found = []
        for inside in (False, True):
            parameters = [torch.nn.Parameter(value.clone()) for value in values]
            optimizer = torch.optim.AdamW(parameters, lr=0.1, eps=0.1, fused=True)  # a large eps: scale shows
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.clone()
            norm = clip_in_step(optimizer, parameters, clip) if inside else parallel.norm_of(parameters, clip)
            optimizer.step()
            found.append((float(norm), parameters))
        assert found[0][0] == pytest.approx(found[1][0])
        for one, other in zip(found[0][1], found[1][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_padded_batches_have_round_widths(store):
    task, lengths, layout = objective(store), store["train"].lengths, Layout(round_widths=True)
    shortest = np.argsort(lengths)[:4]
    for items in (shortest, np.arange(8)):
        width = task.batch("train", items, layout).inputs["input_ids"].shape[1]
        assert width == min(round_width(int(lengths[items].max())), store.max_length)
    assert task.batch("validation", np.arange(2), layout).inputs["input_ids"].shape[1] <= store.max_length


def test_why_a_run_is_not_fast_is_said(store):
    task = objective(store)
    model, _ = build_model(config(), store)
    step = made(FastStep, config(), task, model)
    assert "GPU" in step._why_padded() and "GPU" in step._why_eager() and "no CUDA graphs" in str(step)
    step.state, step.precision = SimpleNamespace(device=GPU, num_processes=1), "bf16"
    for name, lacks in (("Hopper (9.0: H100, H200)", ""), ("Ampere (8.6: A5000, RTX 30)", "attention, norm")):
        step.can = capabilities(MACHINES[name])
        assert step._why_padded() is None and step._why_eager() is None
        assert (f"PyTorch's {lacks} (not measured on compute capability 8.6" in str(step)) == bool(lacks)
    model.config.attention_dropout = 0.1
    assert "0.1" in step._why_padded()
    step.state.num_processes = 2
    assert "processes" in step._why_eager()
    step.state.num_processes, step.precision = 1, "fp16"
    assert "fp16" in step._why_eager()
    step.precision, step.config = "bf16", config(gradient_checkpointing=True)
    assert "checkpointing" in step._why_eager()
    step.config, model.layerdrop = config(), 0.1
    assert "dropped" in step._why_eager()


def test_filled_batches_use_no_row_of_the_embedding_that_was_set_aside(store):
    """What fills a batch may be no token of the data, and must have a row all the same."""
    task, layout = objective(store), Layout(packed=True, round_widths=True)
    there = np.bincount(store["train"].tokens, minlength=store.vocab_size) > 0
    before, store.pad_id = store.pad_id, int(np.flatnonzero(~there)[0])
    try:
        there[store.pad_id] = True
        assert store.used_tokens()[store.pad_id]
        model, _ = build_model(config(), store)
        assert set_aside(model, there) is not None
        FastForward(model, kernels=False).install()
        batch = task.batch("train", np.array([1, 2, 3]), layout)
        assert (batch.inputs["input_ids"] == store.pad_id).any()
        assert task.loss(model, batch).isfinite()
    finally:
        store.pad_id = before


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_cannot_be_recorded_is_taken_as_usual(store, accumulate, monkeypatch):
    weights = []
    for recorded in (False, True):
        task = objective(store)
        settings = config(batch_size=8, accumulate=accumulate, steps=8, lr=1e-3)
        model, _ = build_model(settings, store)
        step = recorded_step(settings, task, model) if recorded else made(make_step, settings, task, model)
        if recorded:
            graphed = step.graphed

            def fails(graphed=graphed):
                for parameter in graphed.parameters:  # a recording leaves gradients that were never computed
                    parameter.grad = torch.full_like(parameter, 7.0)
                raise RuntimeError("operation not permitted when stream is capturing\nand more")

            monkeypatch.setattr(torch.cuda, "CUDAGraph", fails)
        batches = task.plan("train", 8, None, 1).epoch(0)
        for k in range(4):
            step.take(k, batches, 0)
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert step.graphed.failed == "operation not permitted when stream is capturing"
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, msg=name)


def test_an_optimizer_that_is_not_fused_is_clipped_before(store):
    """As on Apple's GPUs."""
    weights = []
    for fused in (True, False):
        task, settings = objective(store), config(batch_size=8, steps=8, lr=1e-3)
        model, _ = build_model(settings, store)
        step = made(make_step, settings, task, model)
        for group in (step.optimizer.defaults, *step.optimizer.param_groups):
            group["fused"] = fused
        batches = task.plan("train", 8, None, 1).epoch(0)
        for k in range(3):
            step.take(k, batches, k)
        weights.append(model.classifier.weight.detach().clone())
    torch.testing.assert_close(*weights)
