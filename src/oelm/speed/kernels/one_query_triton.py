"""Attention of one query for every text, in Triton: what a classifier's last block computes.

There is nothing to multiply, only keys and values to be read once: a program per text and head walks them
with an online softmax; backward another walks them again and writes their gradients as it goes. Kernels for
many queries fill a tile of 64 or 128 of them with this one.

Texts lie end to end and hold every row: kv is (N, 2, H, D), q is (texts, H, D). The last stride is 1, the
others may be any.
"""
# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments are what Triton makes of them; Python's types do not describe them.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

BLOCK = 16 if INTERPRETED else 64  # keys at a time


@triton.jit
def _text(cu_seqlens):
    """(the program's text, its first row, the row after its last)"""
    text = tl.program_id(0)
    return text.to(tl.int64), tl.load(cu_seqlens + text), tl.load(cu_seqlens + text + 1)


@triton.jit
def _row(tensor, strides, row, BLOCK_D: tl.constexpr):
    """Pointers to the program's head of one row."""
    return tensor + row * strides[0] + tl.program_id(1).to(tl.int64) * strides[1] + tl.arange(0, BLOCK_D)


@triton.jit
def _load_row(tensor, strides, row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    exists = tl.arange(0, BLOCK_D) < HEAD_DIM
    return tl.load(_row(tensor, strides, row, BLOCK_D), mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _store_row(tensor, strides, row, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    exists = tl.arange(0, BLOCK_D) < HEAD_DIM
    tl.store(_row(tensor, strides, row, BLOCK_D), values.to(tensor.dtype.element_ty), mask=exists)


@triton.jit
def _rows(tensor, strides, rows, BLOCK_D: tl.constexpr):
    """Pointers to the program's head of several rows."""
    origin = tensor + tl.program_id(1).to(tl.int64) * strides[1]
    return origin + rows.to(tl.int64)[:, None] * strides[0] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load_rows(tensor, strides, rows, end, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    exist = (rows < end)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return tl.load(_rows(tensor, strides, rows, BLOCK_D), mask=exist, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(tensor, strides, rows, end, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    exist = (rows < end)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(_rows(tensor, strides, rows, BLOCK_D), values.to(tensor.dtype.element_ty), mask=exist)


@triton.jit
def _one_query_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, cu_seqlens, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    text, begin, end = _text(cu_seqlens)
    query = _load_row(q, q_strides, text, HEAD_DIM, BLOCK_D) * scale
    sums = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    peak = tl.full((), float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        keys = _load_rows(k, k_strides, rows, end, HEAD_DIM, BLOCK_D)
        values = _load_rows(v, v_strides, rows, end, HEAD_DIM, BLOCK_D)
        scores = tl.where(rows < end, tl.sum(keys * query[None, :], 1), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp2(scores - new_peak)
        shrink = tl.exp2(peak - new_peak)
        peak = new_peak
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * values, 0)
    if end <= begin:  # a text without tokens gives zeros
        total += 1.0
    _store_row(out, out_strides, text, sums / total, HEAD_DIM, BLOCK_D)
    tl.store(lse + text * tl.num_programs(1) + tl.program_id(1), peak + tl.log2(total))


@triton.jit
def _one_query_backward_kernel(
    q, k, v, out, lse, grad, grad_q, grad_k, grad_v,
    q_strides, k_strides, v_strides, out_strides, grad_strides, q_grad_strides, kv_grad_strides,
    cu_seqlens, scale, to_score,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    text, begin, end = _text(cu_seqlens)
    query = _load_row(q, q_strides, text, HEAD_DIM, BLOCK_D)
    result = _load_row(out, out_strides, text, HEAD_DIM, BLOCK_D)
    slope = _load_row(grad, grad_strides, text, HEAD_DIM, BLOCK_D)
    normaliser = tl.load(lse + text * tl.num_programs(1) + tl.program_id(1))
    delta = tl.sum(slope * result, 0)
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(begin, end, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        keys = _load_rows(k, k_strides, rows, end, HEAD_DIM, BLOCK_D)
        values = _load_rows(v, v_strides, rows, end, HEAD_DIM, BLOCK_D)
        # As the forward pass computes them, so that weights add up to 1 whatever the size of the scores.
        scores = tl.where(rows < end, tl.sum(keys * (query * scale)[None, :], 1), float("-inf"))
        weights = tl.exp2(scores - normaliser)
        slopes = weights * (tl.sum(values * slope[None, :], 1) - delta) * to_score
        sums += tl.sum(slopes[:, None] * keys, 0)
        _store_rows(grad_k, kv_grad_strides, rows, end, slopes[:, None] * query[None, :], HEAD_DIM, BLOCK_D)
        _store_rows(grad_v, kv_grad_strides, rows, end, weights[:, None] * slope[None, :], HEAD_DIM, BLOCK_D)
    _store_row(grad_q, q_grad_strides, text, sums, HEAD_DIM, BLOCK_D)


def _sizes(q: Tensor) -> dict[str, int]:
    head_dim = q.shape[-1]
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK": BLOCK}


# Opaque to torch.compile: it calls the kernels as they are, strides and all, and captures them in its graphs.
@torch.library.custom_op("oelm::one_query_forward", mutates_args=())
def forward(q: Tensor, kv: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, (texts, H, D), and the base-2 log-sum-exp of each query's scores, (texts, H)."""
    (out, lse), (k, v) = _outputs(q, kv, cu_seqlens, scale), kv.unbind(1)
    with torch.cuda.device_of(q):
        _one_query_kernel[q.shape[:2]](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(), cu_seqlens,
            scale * math.log2(math.e), **_sizes(q),
        )  # fmt: skip
    return out, lse


@forward.register_fake
def _outputs(q: Tensor, kv: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("oelm::one_query_backward", mutates_args=())
def backward(
    q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()  # a few rows; the gradient of a sum has a stride of 0
    grad_q, grad_kv = _gradients(q, kv, out, lse, grad, cu_seqlens, scale)
    (k, v), (grad_k, grad_v) = kv.unbind(1), grad_kv.unbind(1)
    with torch.cuda.device_of(q):
        _one_query_backward_kernel[q.shape[:2]](
            q, k, v, out, lse, grad, grad_q, grad_k, grad_v,
            q.stride(), k.stride(), v.stride(), out.stride(), grad.stride(), grad_q.stride(), grad_k.stride(),
            cu_seqlens, scale * math.log2(math.e), scale, **_sizes(q),
        )  # fmt: skip
    return grad_q, grad_kv


@backward.register_fake
def _gradients(
    q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, kv, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which nobody differentiates


def _autograd(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    q, kv, out, lse, cu_seqlens = ctx.saved_tensors
    return *backward(q, kv, out, lse, grad, cu_seqlens, ctx.scale), None, None


forward.register_autograd(_autograd, setup_context=_setup_context)
