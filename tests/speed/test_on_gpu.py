"""Our kernels on a GPU, at sizes of training. Elsewhere they are interpreted: see test_interpreted.py."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = [300, 77, 512, 1, 0, 130, 4, 0]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def packing():
    from oelm.data.assemble import Packing

    return Packing(torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda(), 512)


def drawn(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def errors(call, inputs, exact):
    """Of the output and the gradients, against float64."""
    found = []
    for function, dtype in ((call, torch.bfloat16), (exact, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        torch.manual_seed(1)
        grad = torch.randn(out.shape, device="cuda").bfloat16().to(dtype)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]


def dense(causal):
    def call(qkv):
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_joint_attention_errs_no_more_than_twice_as_much_as_pytorchs(causal, head_dim):
    from oelm.speed.operations import joint_attention

    inputs = [drawn(2, 300, 3, 4, head_dim)]
    ours = errors(lambda x: joint_attention(x, causal, None), inputs, dense(causal))
    theirs = errors(dense(causal), inputs, dense(causal))
    assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True))


def test_packed_attention_errs_no_more_than_twice_as_much_as_padded():
    from oelm.speed.operations import joint_attention, packed_attention, portable

    texts, rows = packing(), sum(LENGTHS)
    joint = lambda x: portable(*x[0].unbind(1), texts)[None]  # noqa: E731
    single = lambda *x: portable(*x, texts, one_query=True)  # noqa: E731
    for call, twin, inputs in (
        (lambda x: joint_attention(x, False, texts), joint, [drawn(1, rows, 3, 8, 64)]),
        (
            lambda *qkv: packed_attention(*qkv, texts, one_query=True),
            single,
            [drawn(n, 8, 64) for n in (len(LENGTHS), rows, rows)],
        ),
    ):
        ours, theirs = errors(call, inputs, twin), errors(twin, inputs, twin)
        assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale", [20.0, 200.0])
def test_large_scores_are_no_trouble(scale):
    from oelm.speed.operations import joint_attention

    qkv = drawn(1, 512, 3, 4, 64)
    qkv[:, :, 0] *= scale
    assert all(e < 0.02 for e in errors(lambda x: joint_attention(x, True, None), [qkv], dense(True)))


def test_the_same_bits_every_time():
    from oelm.speed.operations import joint_attention

    qkv = drawn(4, 512, 3, 8, 64).requires_grad_()
    grads = []
    for _ in range(3):
        out = joint_attention(qkv, True, None)
        grads.append(torch.autograd.grad(out, qkv, torch.ones_like(out))[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("causal", [False, True])
def test_value_only_attention(causal):
    from oelm.speed.value_only import value_only_attention

    q, k, v = (drawn(2, 4, 300, 64) for _ in range(3))

    def exact(v):
        return F.scaled_dot_product_attention(q.double(), k.double(), v, is_causal=causal)

    ours = errors(lambda v: value_only_attention(q, k, v, causal=causal), [v], exact)
    theirs = errors(lambda v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), [v], exact)
    assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("far", [0.0, 40.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_in_place_of_the_logits(smoothing, far):
    """A target in every block; the largest logit near the first block's or far above; the same bits."""
    from oelm.speed.kernels.cross_entropy_triton import BLOCK, cross_entropy_

    vocab, width = 50257, 50304
    targets = torch.arange(0, vocab, BLOCK // 4, device="cuda").repeat(40)
    targets[::9] = -100
    logits = drawn(len(targets), width)
    logits[::3, 30000] += far
    exact = logits[:, :vocab].double().requires_grad_()
    losses = F.cross_entropy(exact, targets, label_smoothing=smoothing, reduction="none")
    losses.sum().backward()
    first = None
    for _ in range(20):
        grads = logits.clone()
        found = cross_entropy_(grads, targets, vocab, smoothing, 1.0, -100, True)
        first = (found, grads) if first is None else first
        assert torch.equal(found, first[0]) and torch.equal(grads, first[1])
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    assert not grads[:, vocab:].any()
    at = targets.clamp(min=0)[:, None]  # where p - 1 stands
    for ours, theirs in ((grads[:, :vocab], exact.grad), (grads.gather(1, at), exact.grad.gather(1, at))):
        assert ((ours.double() - theirs).norm() / theirs.norm()) < 0.004


@pytest.mark.parametrize("rows", [None, [4, 70, 70, 299]])
def test_the_norm_of_a_sum(rows):
    from oelm.speed.operations import add_norm, pick_rows

    norm = torch.nn.LayerNorm(512).cuda()
    torch.nn.init.normal_(norm.weight)
    at = None if rows is None else torch.tensor(rows).cuda()
    inputs = [torch.randn(1, 300, 512, device="cuda"), drawn(1, 300, 512)]
    slopes = [torch.randn(1, 300 if rows is None else 4, 512, device="cuda"), drawn(1, 300, 512)]
    found = []
    for own in (False, True):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.autocast("cuda", torch.bfloat16):
            total = leaves[0] + leaves[1]
            plain = total if at is None else pick_rows(total, at), norm(total).bfloat16()
            outs = add_norm(*leaves, norm, at) if own else plain
        found.append([*outs, *torch.autograd.grad(outs, [*leaves, norm.weight, norm.bias], slopes)])
    for ours, theirs in zip(*found[::-1], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def step_of(method="oelm", steps=10**9, vocab=500, used=500, schedule=None, **training):
    """A step of training on some texts, and the batches to take it on."""
    from oelm.bench.load import made_texts
    from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
    from oelm.data.tasks import make_objective
    from oelm.models.build import build_model
    from oelm.training.parallel import process_state
    from oelm.training.resolve import resolve_run
    from oelm.training.step import make_step

    store = made_texts("some", [40, 100, 7, 64] * 40, vocab, 128)
    store["train"].tokens[:] %= used
    store.used_tokens = lambda: np.arange(vocab) < used
    config = RunConfig(
        task=TaskConfig(max_length=128),
        model=ModelConfig(name="gpt-tiny"),
        method=MethodConfig(name=method, freeze_schedule=schedule),
        training=TrainingConfig(
            steps=steps, batch_size=8, warmup=0, schedule="constant", lr=1e-4, **training
        ),
    )
    objective = make_objective(store, 128, 0.0, "none")
    model, _ = build_model(config, store)
    state = process_state()
    step = make_step(resolve_run(config, objective, state.device), objective, model, state)
    step.model.train()
    return step, objective.plan("train", 8, None, 1).epoch(0)


def trained(step, batches, steps, first=0):
    return torch.stack([step.take(n, batches, n % len(batches))[0] for n in range(first, steps)]).cpu()


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only", "oelm-scale", "oelm-lora"])
def test_a_step_of_training_is_the_same_recorded(method):
    """The fast step against the plain one: losses differ as little as bf16 lets them."""
    losses = []
    for fast in (False, True):
        step, batches = step_of(method, fast=fast)
        losses.append(trained(step, batches, 12))
        assert step.plain != fast and (not fast or step.graphed.graphs)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.01)


@pytest.fixture
def deterministic():
    """Rows of words, too, are added in one order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_recorded_step_has_the_bits_of_one_that_is_not(monkeypatch, deterministic):
    """Many steps of each: losses and weights."""
    from oelm.speed import cuda_graphs as fast

    found = []
    for graphs in (fast.MOST_GRAPHS, 0):
        monkeypatch.setattr(fast, "MOST_GRAPHS", graphs)
        step, batches = step_of(steps=1000)
        found.append((trained(step, batches, 40), step.capture()[0]))
        assert bool(step.graphed.graphs) == (graphs > 0)
        assert not graphs or len(step.graphed.graphs) >= len(step.graphed.met) - 1  # at their first meeting
    (losses, weights), (others, other_weights) = found
    assert torch.equal(losses, others)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_every_stage_of_a_schedule_is_recorded_anew(monkeypatch, deterministic):
    """The bits of the same steps without graphs: a graph of a stage that is over would train what is frozen
    and leave what was unfrozen."""
    import oelm
    from oelm.speed import cuda_graphs as fast

    turns = {"unfreeze_at": [12, 24], "order": "top-down", "refreeze_at": 36, "polar": True, "warmup": 4}
    found = []
    for graphs in (fast.MOST_GRAPHS, 0):
        monkeypatch.setattr(fast, "MOST_GRAPHS", graphs)
        step, batches = step_of(steps=48, schedule=turns)
        before, losses, stages = oelm.fingerprint(step.raw), [], []
        for first in (0, 12, 24, 36):
            losses.append(trained(step, batches, first + 12, first))
            assert bool(step.graphed.graphs) == (graphs > 0) and not step.graphed.failed
            stages.append(step.graphed)
            oelm.audit(step.raw, before)
        assert len({id(stage) for stage in stages}) == 4
        found.append((torch.cat(losses), step.capture()[0]))
    (losses, weights), (others, other_weights) = found
    assert torch.equal(losses, others)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_step_that_cannot_be_recorded_leaves_nothing_behind():
    """Dropout draws as it would have, and what is met later is recorded."""
    from oelm.data.assemble import Batch
    from oelm.speed.cuda_graphs import GraphedStep

    scale, waits = torch.ones((), device="cuda"), 0

    def compute(batch):
        nonlocal waits
        drawn = F.dropout(batch.inputs["x"], 0.5)
        if drawn.numel() == 2048 and waits < 2:  # a model that waits for the device, as no graph can
            waits += 1
            drawn.sum().item()
        return drawn.sum() * scale

    def finish():
        return torch.zeros((), device="cuda")

    step = GraphedStep(compute, finish, lambda: None, scale, True, [])
    losses = []
    for number, size in enumerate([1024, 512, 512, 2048, 512, 2048, 512, 2048, 256, 256]):
        torch.cuda.manual_seed(number)
        loss = float(step.backward(Batch(None, {"x": torch.ones(size)}, {}, size), 1.0))
        torch.cuda.manual_seed(number)
        losses.append((loss, float(F.dropout(torch.ones(size, device="cuda"), 0.5).sum())))
    assert [ours for ours, _ in losses] == [right for _, right in losses]
    assert waits == 2 and not step.failed
    assert {key[0][1] for key in step.graphs} == {(512,), (2048,), (256,)}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # the allocator takes part in other recordings, too
        torch.ones(4096, device="cuda").mul_(2)


def test_gradients_of_the_fast_step_err_no_more_than_those_of_the_plain_one():
    """Both are bf16; the right ones are those of float32."""
    found = []
    for settings in ({"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "fast": True}):
        step, batches = step_of(steps=1000, **({"fast": False} | settings))
        batch = step.objective.batch("train", batches.batch(0), step.layout).to(step.state.device)
        if not step.plain:
            step.scale.fill_(1.0)
            step._compute(batch)
        else:
            with step.autocast():
                step.objective.loss(step.model, batch).backward()
        found.append({n: p.grad for n, p in step.raw.named_parameters() if p.grad is not None})
    right, plain, fast = found
    assert right.keys() == plain.keys() == fast.keys()
    used = [n for n in right if not n.endswith("wte.weight")]  # of words the fast step has the rows in use
    errors = [sum((arm[n] - right[n]).square().sum() for n in used).sqrt() for arm in (plain, fast)]
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.filterwarnings("ignore:Memory Efficient attention defaults to a non-deterministic")  # of fp32
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_embedding_trains_the_same_through_windows(monkeypatch, deterministic, graphs, precision):
    from oelm.speed import cuda_graphs as fast
    from oelm.speed import step as fast_step

    if not graphs:
        monkeypatch.setattr(fast, "MOST_GRAPHS", 0)
    found = []
    for windows in (True, False):
        if not windows:
            monkeypatch.setattr(fast_step, "make_windows", lambda *_: None)
        made, batches = step_of(
            "baseline", steps=1000, vocab=16000, used=13000, precision=precision, eps=1e-4
        )
        assert (made.windows is not None) == windows
        weight = made.raw.get_input_embeddings().weight
        before = weight.detach().clone()
        losses = trained(made, batches, 50)
        made.model.eval()  # folds
        found.append((losses, weight.detach() - before, made.optimizer.state[weight]))
    (losses, way, state), (others, other_way, other_state) = found
    torch.testing.assert_close(losses, others, rtol=5e-3, atol=1e-3)
    spread = (way - other_way).norm() / way.norm()
    assert way.norm() > 0 and spread <= (0.002 if precision == "fp32" else 0.02), float(spread)
    assert state["step"] == other_state["step"] == 50


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_our_own_adamw_takes_pytorchs_steps(clip):
    from oelm.speed.adamw import RecordableAdamW, clip_in_step

    shapes, found = [(3,), (700, 512), (4097,), (5, 7), (2048, 3)], []
    grads = [[torch.randn(shape, device="cuda") for shape in shapes] for _ in range(3)]
    values = [torch.randn(shape, device="cuda") for shape in shapes]
    for own in (True, False):
        weights = [torch.nn.Parameter(value.clone()) for value in values]
        copy = torch.empty(shapes[1], device="cuda", dtype=torch.bfloat16)
        optimizer = (RecordableAdamW if own else torch.optim.AdamW)(
            weights, lr=torch.tensor(1e-2, device="cuda"), eps=1e-4, fused=True, capturable=True
        )
        norms = []
        for step in grads:
            for weight, grad in zip(weights, step, strict=True):
                weight.grad = grad.clone()
            if own:
                optimizer.clip, optimizer.copies = clip, {id(weights[1]): copy}
                optimizer.gather()
                optimizer.step()
                norms.append(optimizer.norm)
                assert optimizer.gathered and torch.equal(copy, weights[1].bfloat16())
            else:
                norms.append(clip_in_step(optimizer, weights, clip))
                optimizer.step()
        found.append((weights, [list(optimizer.state[w].values()) for w in weights], norms))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_recorded_steps_with_our_own_adamw(monkeypatch, deterministic, accumulate):
    """Against PyTorch's; and weights that someone else changes in between are seen by the next step."""
    from oelm.speed import adamw as fast_adamw

    found = []
    for own in (True, False):
        if not own:
            monkeypatch.setattr(fast_adamw, "adamw_triton", None)
        made, batches = step_of(steps=1000, accumulate=accumulate, eps=1e-4)
        before = [p.detach().clone() for p in made.raw.parameters() if p.requires_grad]
        losses = trained(made, batches, 40)
        assert made.optimizer.gathered == own and made.graphed.graphs and not made.graphed.failed
        # The array of gradients is memory held for nothing after a step, unless the next is added there.
        assert (made.optimizer.array is None) == (accumulate == 1 or not own)
        weights = [p for p in made.raw.parameters() if p.requires_grad]
        found.append((losses, [p.detach() - start for p, start in zip(weights, before, strict=True)]))
    (losses, ways), (others, other_ways) = found
    torch.testing.assert_close(losses, others, rtol=5e-3, atol=1e-3)
    for way, other in zip(ways, other_ways, strict=True):
        # Weights go some 5e-4; a bias whose gradients cancel a tenth of that, of which rounding is more.
        rounding = 1e-5 * way.numel() ** 0.5
        assert way.norm() > 0 and (way - other).norm() <= 0.05 * other.norm() + rounding
    fresh, _ = step_of(steps=1000, accumulate=accumulate, eps=1e-4)
    with torch.no_grad():
        for mine, theirs in zip(fresh.raw.parameters(), made.raw.parameters(), strict=True):
            theirs.copy_(mine)
    expected = trained(fresh, batches, 1)
    torch.testing.assert_close(trained(made, batches, 1), expected, rtol=1e-3, atol=1e-4)
    assert (expected - losses[-1]).abs() > 0.01  # or it would not show


def test_the_fast_path_is_compared_on_a_gpu_and_given_up_where_it_fails(tmp_path, monkeypatch):
    """A whole run: compared at its first step and after its graphs are recorded, and from the step on where a
    gradient is NaN by the plain path."""
    from oelm.config import make_config
    from oelm.data import open_store
    from oelm.speed import watch
    from oelm.training import loop
    from tests.training.runs import make_store

    monkeypatch.setattr(watch, "EARLY", (20,))
    store = open_store(make_store(tmp_path))
    values = {"steps": 40, "batch_size": 16, "lr": 1e-3, "eval_every": 20, "save_every": 0}
    config = make_config(
        {"task": {"data": "x", "max_length": 32}, "model": {"name": "gpt-tiny"}, "training": values}
    )
    results = loop.train(config, store, tmp_path / "whole", show=False)
    assert results["watch"]["checks"] == 2 and results["paths"]["eager"] is None
    take = loop._step

    def broken(run, *arguments):
        if run.progress.step == 30 and not run.step.plain:  # in a bf16 copy: the weight itself is as it was
            run.step.copies.trained[0][1].data.fill_(float("nan"))
        return take(run, *arguments)

    monkeypatch.setattr(loop, "_step", broken)
    results = loop.train(config, store, tmp_path / "broken", show=False)
    assert results["arithmetic"]["plain_from"] == 31 and results["status"] == "completed"
    losses = []
    for name in ("whole", "broken"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"train"' in line])
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.02)
