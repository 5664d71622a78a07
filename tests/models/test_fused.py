import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from oelm.models.fused import PARTS, SplitQKV, packed_linear, split_linear


def parts_of(d_in=12, d_out=8, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Linear(d_in, d_out, bias=bias, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("layout", ["concat", "per-head"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "q", "qk", "k", "qkv", "v"])
def test_packed_product_equals_three_products(layout, bias, frozen):
    """Values and every gradient, against three separate layers; frozen parts get none."""
    heads = 4
    parts = parts_of(bias=bias)
    for name, part in zip(PARTS, parts, strict=True):
        part.requires_grad_(name not in frozen)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    y = packed_linear(x, parts, heads, layout)
    separate = [F.linear(x, part.weight, part.bias) for part in parts]
    if layout == "per-head":
        expected = torch.stack([s.unflatten(-1, (heads, -1)) for s in separate], -2).flatten(-3)
    else:
        expected = torch.cat(separate, -1)
    torch.testing.assert_close(y, expected)
    seed = torch.randn_like(y)
    trained = [t for part in parts for t in part.parameters() if t.requires_grad]
    ours = torch.autograd.grad(y, [x, *trained], seed)
    theirs = torch.autograd.grad(expected, [x, *trained], seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_no_weight_gradient_is_computed_for_frozen_parts():
    """Counted in the matrix products of the backward pass, not inferred from `.grad`."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens, d = 64, 16

    def backward_flops(frozen):
        parts = parts_of(d, d, bias=False, dtype=torch.float32)
        for part in parts[:frozen]:
            part.requires_grad_(False)
        x = torch.randn(tokens, d, requires_grad=True)
        y = packed_linear(x, parts, 4)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        return counter.get_total_flops()

    product = 2 * tokens * d * d
    assert backward_flops(0) == 6 * product  # three for x, three for the weights
    assert backward_flops(2) == 4 * product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    parts = parts_of(dtype=torch.float32)
    for part in parts[:2]:
        part.requires_grad_(False)
    x = torch.randn(3, 12)
    with torch.autocast("cpu", dtype=dtype):
        y = packed_linear(x, parts, 2)
        reference = torch.cat([part(x) for part in parts], -1)
    assert y.dtype == dtype
    torch.testing.assert_close(y, reference, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert parts[2].weight.grad.dtype == torch.float32
    torch.testing.assert_close(parts[2].weight.grad, x.sum(0).expand(8, 12), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("layout", ["concat", "per-head"])
def test_split_module_is_the_fused_one(kind, layout):
    torch.manual_seed(1)
    fused = nn.Linear(8, 24) if kind is nn.Linear else Conv1D(24, 8)
    nn.init.normal_(fused.bias)
    split = SplitQKV(fused, 2, layout)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(split(x), fused(x))
    saved = split.state_dict()
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in fused.state_dict().items()}
    assert all(torch.equal(saved[k], v) for k, v in fused.state_dict().items())
    fused.load_state_dict(saved)
    with torch.no_grad():
        for p in fused.parameters():
            p.mul_(2)
    split.load_state_dict(fused.state_dict())
    torch.testing.assert_close(split(x), fused(x))
    back = split.to_fused()
    assert type(back) is type(fused)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), fused.parameters(), strict=True))


@pytest.mark.compiler
def test_packed_product_compiles():
    parts = parts_of(dtype=torch.float32)
    for part in parts[:2]:
        part.requires_grad_(False)
    x = torch.randn(4, 12, requires_grad=True)
    compiled = torch.compile(lambda x: packed_linear(x, parts, 2), fullgraph=True)
    y, reference = compiled(x), packed_linear(x, parts, 2)
    torch.testing.assert_close(y, reference)
    y.square().sum().backward()
    ours = parts[2].weight.grad.clone()
    parts[2].weight.grad = None
    reference.square().sum().backward()
    torch.testing.assert_close(ours, parts[2].weight.grad)


@pytest.mark.parametrize("frozen", [(), (0, 1), (0, 1, 2), (2,)])
@pytest.mark.parametrize("silent", [(), (0, 1)])
def test_split_outputs_have_the_gradients_of_three_projections(frozen, silent):
    """`silent` outputs are used as constants: nothing flows back through them."""
    torch.manual_seed(0)
    parts = [torch.nn.Linear(6, 4, bias=False, dtype=torch.float64) for _ in range(3)]
    for index in frozen:
        parts[index].weight.requires_grad_(False)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    found = []
    constant = len(silent)
    for project in (
        lambda x: split_linear(x, parts, constant=constant),
        lambda x: [part(x) for part in parts],
    ):
        outputs = [y.detach() if i in silent else y for i, y in enumerate(project(x))]
        loss = sum((y * (i + 1)).square().sum() for i, y in enumerate(outputs))
        wanted = [x, *(part.weight for part in parts if part.weight.requires_grad)]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        found.append([*(y.detach() for y in outputs), *grads])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


def test_split_outputs_compile_and_skip_what_is_frozen():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(6, 4, bias=False) for _ in range(3)]
    for part in parts[:2]:
        part.weight.requires_grad_(False)
    x = torch.randn(5, 6, requires_grad=True)
    compiled = torch.compile(
        lambda x: split_linear(x, parts, constant=2), fullgraph=True, backend="aot_eager"
    )
    grads = []
    for project in (compiled, lambda x: split_linear(x, parts)):
        q, k, v = project(x)
        (q.detach() * k.detach() * v).sum().backward()
        grads.append((x.grad.clone(), parts[2].weight.grad.clone()))
        assert parts[0].weight.grad is None
        x.grad = parts[2].weight.grad = None
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)
