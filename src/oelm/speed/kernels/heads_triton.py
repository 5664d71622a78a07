"""Attention of q, k and v in three tensors, with dropout and windows, in Triton: for models of other
families, whose modules make the three one by one. The kernels are those of `joint_triton`.

Shapes: q, k and v are (B, H, T, D); texts end to end are one batch entry (B = 1) with `cu_seqlens`.
"""

from typing import Any

import torch
from torch import Tensor

from oelm.speed.kernels.attention_triton import Hidden, empty_like, launch_forward
from oelm.speed.kernels.joint_triton import launch_backward


@torch.library.custom_op("oelm::heads_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    chance: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """The output, (B, H, T, D), and the base-2 log-sum-exp of each query's scores, (B, H, T). With a `chance`
    of dropout, the integer `seed` on the device decides what is dropped."""
    return launch_forward(q, k, v, cu_seqlens, causal, scale, Hidden(seed, chance, window))


@torch.library.custom_op("oelm::heads_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    chance: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = empty_like(q), empty_like(q), empty_like(q)
    parts = q, _laid_as(q, k), _laid_as(q, v)
    hidden = Hidden(seed, chance, window)
    launch_backward(parts, gradients, out, lse, grad, cu_seqlens, causal, scale, hidden)
    return gradients


def _laid_as(q: Tensor, other: Tensor) -> Tensor:
    """The other tensor with the strides of q, as the kernels want it; copied where it has others."""
    if other.stride() == q.stride():
        return other
    return torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device).copy_(other)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like(v), v.new_empty(v.shape[:3], dtype=torch.float32)


@backward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(q), empty_like(q)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, seed, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, seed)
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which nobody differentiates


def _autograd(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens, seed = ctx.saved_tensors
    nothing = (None,) * 6
    if grad is None:
        return None, None, None, *nothing
    return *backward(q, k, v, out, lse, grad, cu_seqlens, seed, *ctx.settings), *nothing


forward.register_autograd(_autograd, setup_context=_setup_context)
