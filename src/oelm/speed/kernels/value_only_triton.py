"""Value-only attention for GPUs, in Triton: its backward pass is for v alone (`speed/value_only.py`). The
forward pass is that of `attention_triton`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import (
    Tiles,
    arguments,
    empty_like,
    first_of_head,
    grid,
    head_of,
    launch_forward,
    launch_options,
    load,
    product,
    rows_of_tile,
    store,
)

VALUE_ONLY = Tiles(32, 64)


@triton.jit
def _gather(
    sums, k_tile, q, grad, lse, first_key, low, high, length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIAGONAL: tl.constexpr, NEAR_END: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds P^T dO over queries low..high: with the scores, two matrix products, where the gradients of q, k
    and v together take five. DIAGONAL: some of them come before some of the keys. Keys and
    queries after the text's end weigh nothing."""
    keys = first_key + tl.arange(0, BLOCK_N)
    exist = (keys < length)[:, None]
    for first in range(low, high, BLOCK_M):
        queries = first + tl.arange(0, BLOCK_M)
        q_tile = load(q, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, NEAR_END)
        scores = product(k_tile, tl.trans(q_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if NEAR_END:  # exp2(-inf): a query that does not exist gives nothing
            normaliser = tl.load(lse + queries, mask=queries < length, other=float("inf"))
        else:
            normaliser = tl.load(lse + queries)
        seen = exist & (keys[:, None] <= queries[None, :]) if DIAGONAL else exist
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) * scale - normaliser[None, :])
        grad_tile = load(grad, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, NEAR_END)
        sums = product(weights.to(grad_tile.dtype), grad_tile, sums)
    return sums


@triton.jit(do_not_specialize=["num_texts"])
def _value_kernel(
    q, k, lse, grad, grad_v, q_strides, k_strides, grad_strides, grad_v_strides,
    cu_seqlens, num_texts, rows, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start, length, first, is_text = rows_of_tile(cu_seqlens, num_texts, rows, tile, BLOCK_N, VARLEN)
    if first >= length:
        return
    grad_v = head_of(grad_v, grad_v_strides, start)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if not is_text:
        store(grad_v, sums, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)
        return
    q, k = head_of(q, q_strides, start), head_of(k, k_strides, start)
    grad = head_of(grad, grad_strides, start)
    lse += first_of_head(rows, start)
    k_tile = load(k, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, True)

    low = 0
    if CAUSAL:  # earlier queries do not see these keys, the next ones see some of them, later ones all
        low = first + tl.cdiv(BLOCK_N, BLOCK_M) * BLOCK_M
        sums = _gather(sums, k_tile, q, grad, lse, first, first, tl.minimum(low, length), length, scale,
                       HEAD_DIM, BLOCK_D, True, True, BLOCK_M, BLOCK_N)  # fmt: skip
    ragged = low + tl.maximum(length - low, 0) // BLOCK_M * BLOCK_M
    sums = _gather(sums, k_tile, q, grad, lse, first, low, ragged, length, scale,
                   HEAD_DIM, BLOCK_D, False, False, BLOCK_M, BLOCK_N)  # fmt: skip
    sums = _gather(sums, k_tile, q, grad, lse, first, ragged, length, length, scale,
                   HEAD_DIM, BLOCK_D, False, True, BLOCK_M, BLOCK_N)  # fmt: skip
    store(grad_v, sums, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)


# Opaque to torch.compile: it calls the kernels as they are, strides and all, and captures them in its graphs.
@torch.library.custom_op("oelm::value_only_forward", mutates_args=())
def value_only(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As `launch_forward`. Neither v nor the output is kept for the backward pass."""
    return launch_forward(q, k, v, cu_seqlens, causal, scale)


@torch.library.custom_op("oelm::value_only_backward", mutates_args=())
def value_only_backward(
    q: Tensor, k: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float
) -> Tensor:
    grad_v = empty_like(grad)
    with torch.cuda.device_of(grad):
        _value_kernel[grid(grad, cu_seqlens, "BLOCK_N")](
            q, k, lse, grad, grad_v, q.stride(), k.stride(), grad.stride(), grad_v.stride(),
            **arguments(grad, cu_seqlens, causal, scale), **launch_options(VALUE_ONLY, grad),
        )  # fmt: skip
    return grad_v


@value_only.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like(v), v.new_empty(v.shape[:3], dtype=torch.float32)


@value_only_backward.register_fake
def _(q: Tensor, k: Tensor, lse: Tensor, grad: Tensor, *rest: Any) -> Tensor:
    return empty_like(grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, _, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(q, k, output[1], cu_seqlens)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which nobody differentiates


def _autograd(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, lse, cu_seqlens = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2] and grad is not None
    grad_v = value_only_backward(q, k, lse, grad, cu_seqlens, *ctx.settings) if wanted else None
    return None, None, grad_v, None, None, None


value_only.register_autograd(_autograd, setup_context=_setup_context)
