"""Attention on queries, keys and values that lie in one tensor, in Triton: one gradient for all three.

The product before attention makes q, k and v in one matrix, and its backward pass wants their gradients in
one matrix. Other kernels return three, which then have to be joined; these write where the result belongs.

Backward, with S the scores, P their softmax and dP = dO V^T, it is dS = P (dP - delta), where delta is the
sum of dO O over a row. One kernel has a program per tile of queries, which leaves delta behind for the other,
with a program per tile of keys. The scores are computed in both. For that, no two programs add to one place:
the result does not depend on which comes first, and the same step gives the same bits.

Shapes: qkv is (B, T, 3, H, D), with any strides; texts end to end are one batch entry with `cu_seqlens`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import (
    NOTHING_HIDDEN,
    Hidden,
    Tiles,
    arguments,
    first_of_head,
    grid,
    head_of,
    keep,
    launch_forward,
    launch_options,
    load,
    near,
    product,
    random_of,
    rows_of_tile,
    store,
    within,
)

QUERIES, KEYS = Tiles(64, 32), Tiles(32, 64)
KEYS_BOTH_WAYS = KEYS._replace(registers=128)  # 5 % faster with them, where causal attention is 7 % slower


@triton.jit
def _query_gradient(
    sums, q_tile, grad_tile, lse_tile, delta, k, v, first_query, low, high, length, scale, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIAGONAL: tl.constexpr, NEAR_END: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds dS K over keys low..high. A key after the text's end is hidden before the exponential: its score
    would be 0, and where all real scores are very negative exp(0 - lse) is infinite, which times a key of
    zeros is NaN."""
    queries = first_query + tl.arange(0, BLOCK_M)
    for first in range(low, high, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k_tile = load(k, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, NEAR_END)
        v_tile = load(v, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, NEAR_END)
        scores = product(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if NEAR_END:
            scores = tl.where((keys < length)[None, :], scores, float("-inf"))
        if DIAGONAL:
            scores = tl.where(keys[None, :] <= queries[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(near(queries[:, None], keys[None, :], WINDOW), scores, float("-inf"))
        weights = tl.exp2(scores * scale - lse_tile[:, None])
        slopes = product(grad_tile, tl.trans(v_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if DROPOUT:
            slopes = keep(slopes, random, queries[:, None], keys[None, :])
        slopes = weights * (slopes - delta[:, None])
        sums = product(slopes.to(k_tile.dtype), k_tile, sums)
    return sums


@triton.jit
def _key_gradients(
    k_sums, v_sums, k_tile, v_tile, q, grad, lse, delta, first_key, low, high, length, scale, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIAGONAL: tl.constexpr, NEAR_END: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds dS^T Q and P^T dO over queries low..high. Keys and queries after the text's end weigh nothing."""
    keys = first_key + tl.arange(0, BLOCK_N)
    exist = (keys < length)[:, None]
    for first in range(low, high, BLOCK_M):
        queries = first + tl.arange(0, BLOCK_M)
        q_tile = load(q, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, NEAR_END)
        grad_tile = load(grad, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, NEAR_END)
        if NEAR_END:  # exp2(-inf): a query that does not exist gives nothing
            lse_tile = tl.load(lse + queries, mask=queries < length, other=float("inf"))
            delta_tile = tl.load(delta + queries, mask=queries < length, other=0.0)
        else:
            lse_tile, delta_tile = tl.load(lse + queries), tl.load(delta + queries)
        scores = product(k_tile, tl.trans(q_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        seen = exist & (keys[:, None] <= queries[None, :]) if DIAGONAL else exist
        if WINDOW > 0:
            seen = seen & near(queries[None, :], keys[:, None], WINDOW)
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) * scale - lse_tile[None, :])
        kept = keep(weights, random, queries[None, :], keys[:, None]) if DROPOUT else weights
        v_sums = product(kept.to(grad_tile.dtype), grad_tile, v_sums)
        slopes = product(v_tile, tl.trans(grad_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if DROPOUT:
            slopes = keep(slopes, random, queries[None, :], keys[:, None])
        slopes = weights * (slopes - delta_tile[None, :])
        k_sums = product(slopes.to(q_tile.dtype), q_tile, k_sums)
    return k_sums, v_sums


@triton.jit(do_not_specialize=["num_texts"])
def _query_kernel(
    q, k, v, out, grad, lse, delta, grad_q, strides, out_strides, grad_strides, joint_strides,
    seed, chance, cu_seqlens, num_texts, rows, scale, to_score,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    start, length, first, is_text = rows_of_tile(
        cu_seqlens, num_texts, rows, tl.program_id(0), BLOCK_M, VARLEN
    )
    if first >= length:
        return
    grad_q = head_of(grad_q, joint_strides, start)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if not is_text:
        store(grad_q, sums, first, length, BLOCK_M, HEAD_DIM, BLOCK_D)
        return
    row = first_of_head(rows, start)
    q, k, v = head_of(q, strides, start), head_of(k, strides, start), head_of(v, strides, start)
    out, grad = head_of(out, out_strides, start), head_of(grad, grad_strides, start)
    queries = first + tl.arange(0, BLOCK_M)
    grad_tile = load(grad, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    out_tile = load(out, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    delta_tile = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + row + queries, delta_tile, mask=queries < length)
    lse_tile = tl.load(lse + row + queries, mask=queries < length, other=float("inf"))
    q_tile = load(q, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    high = tl.minimum(first + BLOCK_M, length) if CAUSAL else length
    plain = (first if CAUSAL else length) // BLOCK_N * BLOCK_N
    random = random_of(seed, chance, start, DROPOUT)
    if WINDOW > 0:
        plain, high = within(first, length, BLOCK_M, BLOCK_N, WINDOW)
    else:
        sums = _query_gradient(
            sums, q_tile, grad_tile, lse_tile, delta_tile, k, v, first, 0, plain, length, scale, random,
            HEAD_DIM, BLOCK_D, False, False, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    sums = _query_gradient(
        sums, q_tile, grad_tile, lse_tile, delta_tile, k, v, first, plain, high, length, scale, random,
        HEAD_DIM, BLOCK_D, CAUSAL, True, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    store(grad_q, sums * to_score, first, length, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_texts"])
def _key_kernel(
    q, k, v, grad, lse, delta, grad_k, grad_v, strides, grad_strides, joint_strides,
    seed, chance, cu_seqlens, num_texts, rows, scale, to_score,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    start, length, first, is_text = rows_of_tile(
        cu_seqlens, num_texts, rows, tl.program_id(0), BLOCK_N, VARLEN
    )
    if first >= length:
        return
    grad_k, grad_v = head_of(grad_k, joint_strides, start), head_of(grad_v, joint_strides, start)
    k_sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    v_sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if not is_text:
        store(grad_k, k_sums, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)
        store(grad_v, v_sums, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)
        return
    lse += first_of_head(rows, start)
    delta += first_of_head(rows, start)
    q, k, v = head_of(q, strides, start), head_of(k, strides, start), head_of(v, strides, start)
    grad = head_of(grad, grad_strides, start)
    k_tile = load(k, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load(v, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    random = random_of(seed, chance, start, DROPOUT)
    low, high = 0, length
    if CAUSAL:  # earlier queries do not see these keys, the next ones see some of them, later ones all
        low = first + tl.cdiv(BLOCK_N, BLOCK_M) * BLOCK_M
        k_sums, v_sums = _key_gradients(
            k_sums, v_sums, k_tile, v_tile, q, grad, lse, delta, first, first, tl.minimum(low, length),
            length, scale, random,
            HEAD_DIM, BLOCK_D, True, True, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    ragged = low + tl.maximum(length - low, 0) // BLOCK_M * BLOCK_M
    if WINDOW > 0:
        ragged, high = within(first, length, BLOCK_N, BLOCK_M, WINDOW)
    else:
        k_sums, v_sums = _key_gradients(
            k_sums, v_sums, k_tile, v_tile, q, grad, lse, delta, first, low, ragged, length, scale, random,
            HEAD_DIM, BLOCK_D, False, False, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    k_sums, v_sums = _key_gradients(
        k_sums, v_sums, k_tile, v_tile, q, grad, lse, delta, first, ragged, high, length, scale, random,
        HEAD_DIM, BLOCK_D, False, True, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    store(grad_k, k_sums * to_score, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)
    store(grad_v, v_sums, first, length, BLOCK_N, HEAD_DIM, BLOCK_D)


def _parts(joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of (B, T, 3, H, D), each (B, H, T, D)."""
    q, k, v = joint.transpose(1, 3).unbind(2)
    return q, k, v


def launch(qkv: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, (B, T, H, D), and the base-2 log-sum-exp of each query's scores, (B, H, T)."""
    out, lse = launch_forward(*_parts(qkv), cu_seqlens, causal, scale)
    return out.transpose(1, 2), lse


# Opaque to torch.compile: it calls the kernels as they are, strides and all, and captures them in its graphs.
forward = torch.library.custom_op("oelm::joint_forward", launch, mutates_args=())


def launch_backward(
    parts: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
    hidden: Hidden = NOTHING_HIDDEN,
) -> None:
    """Write the gradients of q, k and v, (B, H, T, D) as these. All three `parts` have the same strides, and
    so have all `gradients`."""
    (q, k, v), (grad_q, grad_k, grad_v), delta = parts, gradients, torch.empty_like(lse)
    rest = arguments(q, cu_seqlens, causal, scale) | hidden.arguments() | {"to_score": scale}
    with torch.cuda.device_of(q):
        _query_kernel[grid(q, cu_seqlens, "BLOCK_M")](
            q, k, v, out, grad, lse, delta, grad_q, q.stride(), out.stride(), grad.stride(), grad_q.stride(),
            **rest, **launch_options(QUERIES, q),
        )  # fmt: skip
        _key_kernel[grid(q, cu_seqlens, "BLOCK_N")](
            q, k, v, grad, lse, delta, grad_k, grad_v, q.stride(), grad.stride(), grad_k.stride(),
            **rest, **launch_options(KEYS if causal else KEYS_BOTH_WAYS, q),
        )  # fmt: skip


@torch.library.custom_op("oelm::joint_backward", mutates_args=())
def backward(
    qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float
) -> Tensor:
    joint = qkv.new_empty(qkv.shape)
    whole = out.transpose(1, 2), lse, grad.transpose(1, 2)
    launch_backward(_parts(qkv), _parts(joint), *whole, cu_seqlens, causal, scale)
    return joint


@forward.register_fake
def _(qkv: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, rows, _, heads, head_dim = qkv.shape
    lse = qkv.new_empty(batch, heads, rows, dtype=torch.float32)
    return qkv.new_empty(batch, rows, heads, head_dim), lse


@backward.register_fake
def _(qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which nobody differentiates


def _autograd(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    qkv, out, lse, cu_seqlens = ctx.saved_tensors
    joint = None if grad is None else backward(qkv, out, lse, grad, cu_seqlens, *ctx.settings)
    return joint, None, None, None


forward.register_autograd(_autograd, setup_context=_setup_context)
