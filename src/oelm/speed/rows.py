"""Rows of a matrix by number, with a backward pass that adds them where they belong, in one order.

Indexing and `F.embedding` sort the numbers first, or walk all of them for every column: for the few thousand
tokens of a step that takes longer than the additions themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.speed.packed import Packing
from oelm.speed.plain import kernels_allowed

try:
    from oelm.speed.kernels.positions_triton import position_gradient
    from oelm.speed.kernels.rows_triton import row_sums
except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
    position_gradient = row_sums = None  # type: ignore[assignment]


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of (B, T, C), counted through all texts, as (B, rows / B, C)."""
    return x.flatten(0, 1).index_select(0, rows).view(x.shape[0], -1, x.shape[2])


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The embedding of every id."""
    return Lookup.apply(weight, ids) if _is_for(weight) else F.embedding(ids, weight)


def look_up_positions(weight: Tensor, ids: Tensor, packing: Packing) -> Tensor:
    """The embedding of every token's position in its text, for texts that lie end to end."""
    if _is_for(weight):
        return PositionLookup.apply(weight, ids, packing.bounds)
    return look_up(weight, ids)


def _is_for(weight: Tensor) -> bool:
    trains = weight.requires_grad and torch.is_grad_enabled()
    return trains and weight.is_cuda and row_sums is not None and kernels_allowed()


class PositionLookup(torch.autograd.Function):
    """Thousands of tokens share a position: what is added there is gathered instead."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(bounds)
        ctx.positions = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (bounds,) = ctx.saved_tensors
        return position_gradient(grad.flatten(0, -2), bounds, ctx.positions), None, None


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return row_sums(grad.flatten(0, -2), ids.flatten(), ctx.rows), None
