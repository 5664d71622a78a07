"""Our own kernels for attention and norms on a CPU. Run with TRITON_INTERPRET=1 by test_interpreted.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import error, honest_interpreter, tiles  # noqa: F401  fixtures
from torch import Tensor

import oelm
from oelm.bench.load import made_texts
from oelm.config import make_config
from oelm.data.assemble import Packing
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.speed import FastStep, cuda_graphs
from oelm.speed import adamw as fast_adamw
from oelm.speed.adamw import RecordableAdamW, clip_in_step, fault_of
from oelm.speed.bf16_copies import Bf16Copies
from oelm.speed.forward import FastForward
from oelm.speed.kernels import adamw_triton, joint_triton, norm_triton, rotary_triton
from oelm.speed.operations import Lookup, add_norm, joint_attention, pick_rows, portable
from oelm.training.parallel import process_state
from oelm.training.resolve import resolve_run
from oelm.training.schedule import make_optimizer

RAGGED = [1, 37, 0, 50, 5, 32, 0, 0]


def packing_of(lengths: list[int]) -> Packing:
    return Packing(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))


def expected(qkv: Tensor, causal: bool, packing: Packing | None) -> Tensor:
    if packing is not None:
        return portable(*qkv[0].unbind(1), packing)[None]
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def trained(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def errors(call: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> list[float]:
    shape = call(*inputs).shape
    grad = torch.randn(shape).to(inputs[0].dtype)
    found, exact = trained(call, inputs, grad), trained(twin, [x.double() for x in inputs], grad.double())
    return [error(a, b) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_float32_is_exact_whatever_the_tiles(causal: bool) -> None:
    found = errors(
        lambda x: joint_attention(x, causal, None),
        lambda x: expected(x, causal, None),
        [torch.randn(2, 50, 3, 2, 64)],
    )
    assert all(e < 1e-6 for e in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "head_dim"), [(64, 32), (33, 128), (1, 16), (21, 20)])
def test_float32_is_exact_whatever_the_shape(rows: int, head_dim: int, causal: bool) -> None:
    found = errors(
        lambda x: joint_attention(x, causal, None),
        lambda x: expected(x, causal, None),
        [torch.randn(1, rows, 3, 3, head_dim)],
    )
    assert all(e < 1e-6 for e in found)


@pytest.mark.usefixtures("tiles")
def test_texts_end_to_end() -> None:
    packing = packing_of(RAGGED)
    found = errors(
        lambda x: joint_attention(x, False, packing),
        lambda x: expected(x, False, packing),
        [torch.randn(1, sum(RAGGED), 3, 2, 32)],
    )
    assert all(e < 1e-6 for e in found)


def test_rows_of_no_text_give_and_get_nothing() -> None:
    qkv = torch.randn(1, 40, 3, 2, 16, requires_grad=True)
    out = joint_attention(qkv, False, packing_of([5, 18]))
    out.sum().backward()
    assert not out[0, 23:].any() and not qkv.grad[0, 23:].any() and qkv.grad[0, :23].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_half_precision_is_as_good_as_attention_elsewhere(dtype: torch.dtype, kind: str) -> None:
    packing = packing_of(RAGGED)
    rows = sum(RAGGED)
    inputs = [torch.randn(1, rows, 3, 2, 64).to(dtype)]
    ours: Callable[..., Tensor] = lambda x: joint_attention(x, kind == "causal", None)  # noqa: E731
    twin: Callable[..., Tensor] = lambda x: expected(x, kind == "causal", None)  # noqa: E731
    if kind == "packed":
        ours, twin = lambda x: joint_attention(x, False, packing), lambda x: expected(x, False, packing)
    for found, theirs in zip(errors(ours, twin, inputs), errors(twin, twin, inputs), strict=True):
        assert found <= 2 * theirs


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_hundreds(dtype: torch.dtype, causal: bool, sign: int) -> None:
    qkv = torch.randn(1, 45, 3, 2, 32)
    qkv[:, :, 1] = qkv[:, :, 0] * sign * 6 * 32**0.5  # every query meets its own key at about 200, or at -200
    qkv = qkv.to(dtype)
    grad = torch.randn(1, 45, 2, 32).to(dtype)
    found = trained(lambda x: joint_attention(x, causal, None), [qkv], grad)
    exact = trained(lambda x: expected(x, causal, None), [qkv.double()], grad.double())
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.isfinite().all() and error(ours, wanted) < (1e-4 if dtype == torch.float32 else 2e-2)


def test_the_same_inputs_give_the_same_bits_and_gradients_may_have_any_stride() -> None:
    qkv = torch.randn(1, 20, 3, 2, 16, requires_grad=True)
    out = joint_attention(qkv, True, None)
    (expanded,) = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    (dense,) = torch.autograd.grad(out, qkv, torch.ones(out.shape), retain_graph=True)
    assert torch.equal(expanded, dense)


@pytest.mark.parametrize("size", [1, 64, 1000])
def test_steps_of_adamw_without_a_gradient(size: int) -> None:
    """Against the twin, which is PyTorch's optimizer; a weight that never had a gradient is among them."""
    group = {"betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    tables = [torch.randn(size), torch.randn(size) * 1e-3, torch.rand(size) * 1e-6]
    tables[1][:5] = tables[2][:5] = 0
    rates = [1e-3 * (n + 1) for n in range(16)]
    mine, twin = ([table.clone() for table in tables] for _ in range(2))
    steps = fast_adamw.coefficients(rates, 7, group)
    counter = torch.tensor(7.0 + len(rates) - 1)  # the last of them met a fault
    adamw_triton.coast_(mine[0], mine[1], mine[2], steps, counter, 7, 0.9, 0.999, 1e-8)
    fast_adamw.step_without_gradients(twin[0], twin[1], twin[2], rates, 7, counter, group)
    for a, b, before in zip(mine, twin, tables, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)
        assert not before.any() or not torch.equal(a, before)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_steps_of_adamw_on_all_weights_at_once(clip: float) -> None:
    """Against PyTorch's, in two groups of their own rates: sizes that fill no piece, a weight that has taken
    steps before, a step in which one has no gradient, and what is kept of them moved and set anew."""
    shapes, found = [(3,), (70, 64), (64,), (5, 7), (9, 33)], []
    for own in (False, True):
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        groups = [
            {"params": weights[:2], "weight_decay": 0.1, "lr": torch.tensor(1e-2)},
            {"params": weights[2:], "weight_decay": 0.0, "lr": torch.tensor(1e-3)},
        ]
        optimizer = RecordableAdamW(groups, eps=1e-4, fused=True)
        weights[0].grad = torch.randn(shapes[0])
        optimizer.step()
        copy, norms = torch.empty(shapes[1], dtype=torch.bfloat16), []
        optimizer.clip, optimizer.copies = clip, {id(weights[1]): copy}
        for step in range(5):
            for weight in weights:
                weight.grad = torch.randn(weight.shape) * 3
            if step == 2:
                weights[3].grad = None
            if step == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 4:
                optimizer.param_groups[1]["weight_decay"] = 0.5
                for state in optimizer.state.values():
                    state |= {name: value.clone() for name, value in state.items()}
            if own:
                optimizer.gather()
                assert optimizer.gathered == (step != 2)
            if optimizer.gathered:
                optimizer.step()
                norms.append(optimizer.norm)
                assert torch.equal(copy, weights[1].bfloat16())
            else:
                norms.append(clip_in_step(optimizer, weights, clip))
                optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[weight] for weight in weights]
        found.append((torch.stack(norms), weights, [list(state.values()) for state in states]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("own", [True, False])
def test_a_gradient_that_is_not_finite_stops_all_later_steps(own: bool, bad: float) -> None:
    """Weights, copies, moments and counts stay, even under good gradients, until someone has looked."""
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((70, 64), (5,))]
    copy = torch.empty(weights[0].shape, dtype=torch.bfloat16)
    optimizer = RecordableAdamW(weights, lr=torch.tensor(1e-2), fused=True)
    optimizer.clip, optimizer.copies = 1.0, {id(weights[0]): copy}
    seen = []
    for step in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        if step == 2:
            weights[0].grad[69, 63] = bad
        if own:
            optimizer.gather()
        if not optimizer.gathered:
            clip_in_step(optimizer, weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        states = [value.clone() for w in weights for value in optimizer.state[w].values()]
        seen.append([*(w.detach().clone() for w in weights), *states, *([copy.clone()] if own else [])])
    assert optimizer.gathered == own and float(fault_of(optimizer)) == 1
    assert not torch.equal(seen[0][0], seen[1][0])
    for before, after in ((seen[1], seen[2]), (seen[1], seen[3])):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_of_steps_with_our_own_adamw(accumulate: int) -> None:
    """Steps as they are recorded, with copies of the weights, against the same by PyTorch's optimizer.

    How far rounding alone leads, PyTorch's own steps say, from weights that differ in their last bits.
    """
    found = []
    for own, nudge in ((False, 0.0), (False, 2.0**-22), (True, 0.0)):
        store = made_texts("some", [9, 20, 7, 12] * 8, 300, 32)
        settings = make_config(
            {
                "task": {"data": "x", "max_length": 32},
                "model": {"name": "gpt-tiny"},
                "method": {
                    "name": "oelm",
                    "freeze_schedule": {"unfreeze_at": 2},
                },  # the kernel takes over more
                "training": {
                    "batch_size": 8,
                    "accumulate": accumulate,
                    "steps": 8,
                    "precision": "bf16",
                    "eps": 1e-4,  # so that the rounding of tiny gradients does not become whole steps
                },
            }
        )
        task = make_objective(store, 32, 0.0, "none")
        model, _ = build_model(settings, store)
        for parameter in model.parameters():
            parameter.data.mul_(1 + nudge)
        before = [p.detach().clone() for p in model.parameters()]
        state = process_state()
        made = FastStep(resolve_run(settings, task, state.device), task, model, state)
        made.optimizer = make_optimizer(model, settings.training, RecordableAdamW)
        made.graphed = made._make_graphed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_graphs, "MOST_GRAPHS", 0)
            if not own:
                patch.setattr(fast_adamw, "adamw_triton", None)
            batches = task.plan("train", 8, None, 1).epoch(0)
            model.train()
            losses = [made.take(k, batches, k)[:2] for k in range(4)]
        assert isinstance(made.optimizer, RecordableAdamW) and made.optimizer.gathered == own
        # The array of gradients is memory held for nothing after a step, unless the next is added there.
        assert (made.optimizer.array is None) == (accumulate == 1 or not own)
        ways = [p.detach() - start for p, start in zip(model.parameters(), before, strict=True)]
        found.append((torch.tensor(losses), ways))
    (losses, ways), (rounded, _), (others, other_ways) = found
    assert error(others, losses.double()) < max(1e-4, 3 * error(rounded, losses.double()))
    for way, other in zip(ways, other_ways, strict=True):
        assert way.norm() > 0 and error(other, way.double()) < 0.02


def test_looking_up_is_embedding() -> None:
    weight, ids = torch.randn(11, 3, requires_grad=True), torch.randint(0, 11, (4, 9))
    slope = torch.randn(4, 9, 3)
    found = [torch.autograd.grad(out, weight, slope)[0] for out in (Lookup.apply(weight, ids), weight[ids])]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("late", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 32), (50, 48), (1, 130, 2048)], ids=str)
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
def test_the_norm_of_a_sum(shape: tuple[int, ...], late: torch.dtype, used: str) -> None:
    norm = torch.nn.LayerNorm(shape[-1])
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    inputs = [torch.randn(shape, requires_grad=True), torch.randn(shape).to(late).requires_grad_()]
    grads = {"both": (1.0, 1.0), "norm": (0.0, 1.0), "sum": (1.0, 0.0)}[used]
    slopes = [factor * torch.randn(shape) for factor in grads]
    results = []
    for own in (False, True):
        total = inputs[0] + inputs[1]
        found = add_norm(*inputs, norm, None) if own else (total, norm(total))
        leaves = [*inputs, norm.weight, norm.bias]
        pairs = [(out, slope) for out, slope, factor in zip(found, slopes, grads, strict=True) if factor]
        outs, given = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outs, leaves, given, materialize_grads=True)
        results.append([*found, *gradients])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 if late == torch.float32 else 0.02)


@pytest.mark.parametrize("rows", [[4, 9, 9, 39], [0, 0, 0, 1], [39], [3, 3, 3, 3]])
def test_the_norm_of_a_sum_of_which_some_rows_go_on(rows: list[int]) -> None:
    """An empty text has the row of the one before it, or of the first."""
    norm, at = torch.nn.LayerNorm(32), torch.tensor(rows)
    inputs = [torch.randn(1, 40, 32, requires_grad=True) for _ in range(2)]
    slopes = [torch.randn(1, len(rows), 32), torch.randn(1, 40, 32)]
    results = []
    for own in (False, True):
        total = inputs[0] + inputs[1]
        found = add_norm(*inputs, norm, at) if own else (pick_rows(total, at), norm(total))
        leaves = [*inputs, norm.weight, norm.bias]
        results.append([*found, *torch.autograd.grad(found, leaves, slopes)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_the_norm_of_a_sum_under_autocast_is_narrow() -> None:
    norm, x = torch.nn.LayerNorm(16), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        total, out = add_norm(x, x.bfloat16(), norm, None)
    assert total.dtype == torch.float32 and torch.equal(out, norm(total).bfloat16())


def test_without_gradients_the_bits_are_the_same() -> None:
    """There the kernels are called past PyTorch's dispatcher."""
    norm, rows, qkv = torch.nn.LayerNorm(32), torch.tensor([3, 8]), torch.randn(1, 20, 3, 2, 16)
    x, late = torch.randn(1, 9, 32), torch.randn(1, 9, 32).bfloat16()
    packing = Packing(torch.tensor([0, 5, 20], dtype=torch.int32), 15)
    found = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found.append([*add_norm(x, late, norm, rows), joint_attention(qkv, False, packing)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("varlen", [False, True])
def test_registered_as_torch_wants_it(varlen: bool) -> None:
    cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
    qkv = torch.randn(1, 20, 3, 2, 16, requires_grad=True)
    torch.library.opcheck(joint_triton.forward, (qkv, cu_seqlens if varlen else None, True, 0.25))
    x, late = torch.randn(9, 32, requires_grad=True), torch.randn(9, 32).bfloat16().requires_grad_()
    weight, bias = torch.ones(32, requires_grad=True), torch.zeros(32, requires_grad=True)
    rows = torch.tensor([3, 8]) if varlen else None
    torch.library.opcheck(norm_triton.add_norm, (x, late, weight, bias, 1e-5, torch.bfloat16, rows))


@pytest.mark.parametrize(
    ("lengths", "labels"), [([0, 1, 5], [-100, 1, 2]), ([3, 5, 0], [0, 1, 2]), ([0, 0, 2], [0, 1, 2])]
)
def test_empty_texts_anywhere(lengths: list[int], labels: list[int]) -> None:
    model, _ = made("classifier", "baseline")
    batch = {
        "input_ids": torch.randint(0, 50, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "packing": packing_of(lengths),
        "labels": torch.tensor(labels),
    }
    results = []
    for own in (False, True):
        switch(model, own)
        model.zero_grad()
        model(**batch).loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def made(head: str, method: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A small model and a batch for it."""
    sizes = {"num_layers": 2, "num_heads": 2, "d_model": 32, "d_ff": 64, "vocab_size": 50, "num_labels": 3}
    config = oelm.OelmGPTConfig(**sizes, **options)
    kind = oelm.OelmGPTForCausalLM if head == "causal" else oelm.OelmGPTForSequenceClassification
    model = kind(config)
    oelm.convert(model, method, seed=0)
    for name, parameter in model.named_parameters():
        if ".learned_" in name:  # away from their start, where they change nothing
            parameter.data += 0.1 * torch.randn(parameter.shape)
    if head == "causal":
        ids = torch.randint(0, 50, (2, 19))
        return model, {"input_ids": ids, "labels": ids, "use_cache": False}
    lengths = [3, 20, 1, 9]
    return model, {
        "input_ids": torch.randint(0, 50, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "packing": packing_of(lengths),
        "labels": torch.tensor([0, 2, 1, 0]),
    }


def switch(model: Any, kernels: bool) -> FastForward:
    forward = FastForward(model, kernels)
    forward.install()
    return forward


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only", "oelm-lora"])
@pytest.mark.parametrize("head", ["causal", "classifier"])
def test_a_step_as_a_gpu_takes_it(head: str, method: str) -> None:
    """With half-precision copies of the weights, q, k and v in one: against float32 without any of it."""
    model, inputs = made(head, method)
    switch(model, False)
    model(**inputs).loss.backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    spread = []
    for own in (False, True):
        model.zero_grad()
        half = Bf16Copies(model, torch.bfloat16, switch(model, own))
        half.refresh()
        with half.installed(), torch.autocast("cpu", torch.bfloat16):
            model(**inputs).loss.backward()
        half.collect()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == exact.keys()
        spread.append({name: error(found[name], exact[name].double()) for name in found})
    for name, theirs in spread[0].items():
        assert spread[1][name] <= 2 * theirs + 1e-3, name


@pytest.mark.parametrize("method", ["baseline", "oelm-scale"])
@pytest.mark.parametrize("head", ["causal", "classifier"])
def test_rotary_positions_by_the_kernel_have_the_same_bits(
    head: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = made(head, method, positions="rotary")
    turned, launch = [], rotary_triton.launch

    def counted(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        turned.append(x.shape)
        return launch(x, *rest, **options)

    monkeypatch.setattr(rotary_triton, "launch", counted)
    results = []
    for dtypes in (rotary_triton.DTYPES, ()):
        monkeypatch.setattr(rotary_triton, "DTYPES", dtypes)
        model.zero_grad()
        half = Bf16Copies(model, torch.bfloat16, switch(model, True))
        half.refresh()
        with half.installed(), torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
            loss.backward()
        half.collect()
        results.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(turned) == 8  # q and k of two layers, forward and backward
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("method", ["baseline", "oelm", "oelm-value-only", "oelm-lora"])
@pytest.mark.parametrize("head", ["causal", "classifier"])
def test_a_model_learns_the_same_with_them(head: str, method: str) -> None:
    model, inputs = made(head, method)
    results = []
    for own in (False, True):
        switch(model, own)
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[0][1].keys() == results[1][1].keys()
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_trial_of_each_kernel_runs_it() -> None:
    """All it needs is there, so that on a GPU it can only fail for the GPU's sake."""
    from oelm.speed.capabilities import KERNELS, Machine, capabilities, without_failing
    from oelm.speed.trial import trials

    made, found = trials(torch.device("cpu")), capabilities(Machine("cpu", interpreted=True))
    assert set(made) == set(KERNELS)
    with torch.inference_mode():
        assert without_failing(found, made, everything=True) == found
