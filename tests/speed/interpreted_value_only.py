"""The Triton kernel against its twin, on a CPU. Run with TRITON_INTERPRET=1 by test_interpreted.py."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from interpreter import error, honest_interpreter, tiles  # noqa: F401  fixtures
from torch import Tensor

from oelm.speed import value_only
from oelm.speed.kernels import value_only_triton
from oelm.speed.value_only import value_only_attention as attention

RAGGED = [1, 37, 0, 50, 5, 32, 0, 0, 0]


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, causal: bool) -> Tensor:
    """The kernel over texts that lie end to end in (N, H, D) tensors."""
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose(0, 1)[None] for x in (q.detach(), k.detach(), v))
    return value_only_triton.value_only(q, k, v, bounds, causal, scale)[0][0].transpose(0, 1)


def reference_varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, causal: bool) -> Tensor:
    """The definition for each text; rows of no text give zeros."""
    outputs = []
    for begin, end in pairwise(bounds.tolist()):
        text = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        outputs.append(value_only.reference(*text, causal).transpose(0, 1))
    return torch.cat([*outputs, torch.zeros_like(v[int(bounds[-1]) :])])


def packed(*shape: int, head_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v as slices of one product, (*shape, H = 2, head_dim): nothing is contiguous."""
    return [x.unflatten(-1, (2, -1)) for x in torch.randn(*shape, 6 * head_dim).to(dtype).chunk(3, -1)]


def trained(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
    """(output, gradient of v)"""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = call(q, k, v)
    out.backward(grad)
    assert q.grad is None and k.grad is None
    return out.detach(), v.grad


def errors(call: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor]) -> list[float]:
    grad = torch.randn(inputs[2].shape).to(inputs[2].dtype)
    found = trained(call, inputs, grad)
    exact = trained(twin, [x.double() for x in inputs], grad.double())
    return [error(a, b) for a, b in zip(found, exact, strict=True)]


def check_dense(rows: int, head_dim: int, causal: bool) -> None:
    found = errors(
        lambda *x: attention(*x, causal=causal),
        lambda *x: value_only.reference(*x, causal=causal),
        [x.transpose(1, 2) for x in packed(2, rows, head_dim=head_dim)],
    )
    assert all(e < 1e-6 for e in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_float32_is_exact_whatever_the_tiles(causal: bool) -> None:
    check_dense(50, 64, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "head_dim"), [(64, 32), (33, 128), (1, 16), (21, 20)])
def test_float32_is_exact_whatever_the_shape(rows: int, head_dim: int, causal: bool) -> None:
    check_dense(rows, head_dim, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("tiles")
def test_ragged_texts(causal: bool) -> None:
    cu_seqlens = torch.tensor([0, *RAGGED]).cumsum(0).int()
    found = errors(
        lambda *x: attention_varlen(*x, cu_seqlens, causal=causal),
        lambda *x: reference_varlen(*x, cu_seqlens, causal=causal),
        packed(sum(RAGGED) + 40, head_dim=32),
    )
    assert all(e < 1e-6 for e in found)  # rows of no text count too: NaN unless written


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("lengths", [[3], [1, 1, 1, 1], [0, 0, 0], [100], [31, 1, 32, 33]], ids=str)
def test_every_row_has_its_tile(lengths: list[int], slack: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = packed(sum(lengths) + slack, head_dim=16)
    out = attention_varlen(q, k, v, cu_seqlens, causal=False)
    torch.testing.assert_close(out, reference_varlen(q, k, v, cu_seqlens, causal=False))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_attention_elsewhere(dtype: torch.dtype, causal: bool) -> None:
    inputs = [x.transpose(1, 2) for x in packed(1, 50, head_dim=64, dtype=dtype)]
    twin = lambda *x: value_only.reference(*x, causal=causal)  # noqa: E731
    ours = errors(lambda *x: attention(*x, causal=causal), twin, inputs)
    theirs = errors(
        lambda q, k, v: F.scaled_dot_product_attention(q.detach(), k.detach(), v, is_causal=causal),
        twin,
        inputs,
    )
    assert ours[0] <= 2 * theirs[0] and ours[1] <= 2 * theirs[1]


# Keys after the end of a text, which nobody reads, may overflow.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2", "ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_hundreds(dtype: torch.dtype, causal: bool, sign: int) -> None:
    q, k, v = (x.transpose(1, 2) for x in packed(1, 45, head_dim=32, dtype=dtype))
    k = q * sign * 34
    assert (q * k).sum(-1).abs().mean() > 150 * 32**0.5  # scores of about 200, or -200
    grad = torch.randn(v.shape).to(dtype)
    out, grad_v = trained(lambda *x: attention(*x, causal=causal), [q, k, v], grad)
    exact = trained(
        lambda *x: value_only.reference(*x, causal=causal),
        [x.double() for x in (q, k, v)],
        grad.double(),
    )
    assert out.isfinite().all() and grad_v.isfinite().all()
    assert max(error(out, exact[0]), error(grad_v, exact[1])) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_backward_twice_and_gradients_of_any_stride() -> None:
    q, k, v = (x.transpose(1, 2) for x in packed(1, 20, head_dim=16))
    v = v.detach().requires_grad_()
    out = attention(q, k, v, causal=True)
    (expanded,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    (dense,) = torch.autograd.grad(out, v, torch.ones(out.shape), retain_graph=True)
    (again,) = torch.autograd.grad(out, v, torch.ones(out.shape))
    assert torch.equal(expanded, dense) and torch.equal(dense, again)


def test_without_a_gradient_for_v_there_is_no_backward_pass() -> None:
    q, k, v = (x.transpose(1, 2) for x in packed(1, 20, head_dim=16))
    out = attention(q.requires_grad_(), k, v, causal=True)
    assert not out.requires_grad


def test_heads_join_without_a_copy() -> None:
    q, k, v = (x.transpose(1, 2) for x in packed(2, 20, head_dim=16))
    out = attention(q, k, v, causal=True)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


def test_auto_leaves_to_torch_what_the_kernel_does_not_take() -> None:
    for kind in (torch.randn(1, 2, 5, 16, dtype=torch.float64), torch.randn(1, 2, 5, 136)):
        out = attention(kind, kind, kind, causal=False)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(kind, kind, kind))


@pytest.mark.parametrize("varlen", [False, True])
def test_registered_as_torch_wants_it(varlen: bool) -> None:
    cu_seqlens = torch.tensor([0, 5, 18], dtype=torch.int32) if varlen else None
    q, k, v = (x.transpose(1, 2) for x in packed(1, 20, head_dim=16))
    v = v.detach().requires_grad_()
    torch.library.opcheck(value_only_triton.value_only, (q, k, v, cu_seqlens, True, 0.25))


@pytest.mark.parametrize(
    ("backend", "varlen"),
    [("aot_eager", False), pytest.param("inductor", True, marks=pytest.mark.compiler)],
)
def test_compiled_in_one_graph(backend: str, varlen: bool) -> None:
    cu_seqlens = torch.tensor([0, 5, 18, 18], dtype=torch.int32)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in F.linear(x, weight).chunk(3, -1))
        if varlen:
            y = attention_varlen(q[0], k[0], v[0], cu_seqlens, causal=True)[None]
        else:
            y = attention(*(part.transpose(1, 2) for part in (q, k, v)), causal=True).transpose(1, 2)
        return x + F.gelu(y.flatten(2))

    x, weight = torch.randn(1, 20, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    expected = block(x, weight)
    wanted = torch.autograd.grad(expected.sin().sum(), (x, weight))
    found = torch.compile(block, backend=backend, fullgraph=True)(x, weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), (x, weight)), wanted)
