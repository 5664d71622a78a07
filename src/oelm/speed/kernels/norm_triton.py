"""A sum and its LayerNorm, in Triton: one pass over memory forward, one backward.

The backward pass has a fixed number of programs, each of which walks over its rows and keeps what it finds of
the weight's and the bias's gradients; another kernel adds these up, in the same order every time.

Shapes: N rows, C columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

MAX_WIDTH = 4096  # a program holds whole rows
TILE = 2048  # numbers at a time
SMALL_TILE, FEW_ROWS = 1024, 16384  # the same of the backward pass, up to so many rows
WALKERS = 4 if INTERPRETED else 528  # programs of the backward pass: four for each multiprocessor of an H200
SUMS = {"ROWS": 512, "WIDTH": 8, "num_warps": 8}


@triton.jit
def tile_of(first, rows, column, width, ROWS: tl.constexpr):
    """The numbers of `ROWS` rows from `first` on, where their columns are, and which of these exist."""
    row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return row, row[:, None] * width + column[None, :], inside


@triton.jit
def _norm_forward_kernel(
    x, late, weight, bias, total, out, means, scales, rows, width, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    row, at, inside = tile_of(tl.program_id(0) * ROWS, rows, column, width, ROWS)
    sums = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    sums += tl.load(late + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, sums.to(total.dtype.element_ty), mask=inside)
    mean = tl.sum(sums, 1) / width
    centred = tl.where(column[None, :] < width, sums - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0)
    b = tl.load(bias + column, mask=column < width, other=0.0)
    result = centred * scale[:, None] * w[None, :] + b[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    total, weight, means, scales, straight, places, grad_out, grad_x, grad_late, partial,
    rows, width, num_places,
    STRAIGHT: tl.constexpr, PICKED: tl.constexpr, NARROW: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`STRAIGHT`: the sum itself has a gradient, too; `PICKED`: at some rows only, and `places` has a row's
    place among them. `NARROW`: what was added wants its gradient in another dtype, written to `grad_late`."""
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0)
    weight_sums = tl.zeros((ROWS, WIDTH), tl.float32)
    bias_sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, at, inside = tile_of(first, rows, column, width, ROWS)
        grad = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
        sums = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        if STRAIGHT:
            there, exist = at, inside
            if PICKED:
                place = tl.load(places + row, mask=row < rows, other=num_places).to(tl.int64)
                there = place[:, None] * width + column[None, :]
                exist &= (place < num_places)[:, None]
            more = tl.load(straight + there, mask=exist, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = tl.where(column[None, :] < width, (sums - mean[:, None]) * scale[:, None], 0.0)
        weight_sums += grad * normal
        bias_sums += grad
        slope = grad * w[None, :]
        along, level = tl.sum(slope * normal, 1) / width, tl.sum(slope, 1) / width
        result = (slope - level[:, None] - normal * along[:, None]) * scale[:, None]
        if STRAIGHT:
            result += more
        tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
        if NARROW:
            tl.store(grad_late + at, result.to(grad_late.dtype.element_ty), mask=inside)
    here = partial + tl.program_id(0).to(tl.int64) * 2 * width + column
    tl.store(here, tl.sum(weight_sums, 0), mask=column < width)
    tl.store(here + width, tl.sum(bias_sums, 0), mask=column < width)


@triton.jit
def _places_kernel(rows, grads, sums, places, count, width, WIDTH: tl.constexpr):
    """Of rows in ascending order, the place of the first of equal ones; and there their gradients' sum."""
    place, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row = tl.load(rows + place)
    if tl.load(rows + place - 1, mask=place > 0, other=-1) == row:
        return
    total = tl.load(grads + place * width + column, mask=column < width, other=0.0).to(tl.float32)
    other = place + 1
    same = tl.load(rows + other, mask=other < count, other=-1) == row
    while same:
        total += tl.load(grads + other * width + column, mask=column < width, other=0.0)
        other += 1
        same = tl.load(rows + other, mask=other < count, other=-1) == row
    tl.store(sums + place * width + column, total.to(sums.dtype.element_ty), mask=column < width)
    tl.store(places + row, place.to(tl.int32))


@triton.jit
def _column_sums_kernel(partial, sums, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    found = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < width)[None, :]
        found += tl.load(partial + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(found, 0), mask=column < width)


def column_sums(partial: Tensor) -> Tensor:
    """The sums over the first dimension, in the same order every time."""
    sums = partial.new_empty(partial.shape[1:])
    _column_sums_kernel[(triton.cdiv(sums.numel(), SUMS["WIDTH"]),)](
        partial, sums, len(partial), sums.numel(), **SUMS
    )
    return sums


def _tile(x: Tensor, size: int = TILE) -> dict[str, Any]:
    width = triton.next_power_of_2(x.shape[-1])
    return {"ROWS": max(1, size // width), "WIDTH": width, "num_warps": max(size, width) // 512}


def launch(
    x: Tensor, late: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x + late; its LayerNorm, in `dtype`; the mean and the scale (1 / deviation) of each row; and the sum's
    `rows`, counted through all texts and in ascending order. Where rows are asked for, nothing flows back to
    the sum but what flows back to them."""
    x, late = x.contiguous(), late.contiguous()
    total, out, mean, scale, picked = _outputs(x, late, weight, bias, eps, dtype, rows)
    tile = _tile(x)
    with torch.cuda.device_of(x):
        _norm_forward_kernel[(triton.cdiv(mean.numel(), tile["ROWS"]),)](
            x, late, weight, bias, total, out, mean, scale, mean.numel(), x.shape[-1], eps, **tile
        )
    if rows is not None:
        torch.index_select(total.flatten(0, -2), 0, rows, out=picked)
    return total, out, mean, scale, picked


def _outputs(
    x: Tensor, late: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, late.dtype)
    return (
        x.new_empty(x.shape, dtype=wide),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty(0 if rows is None else len(rows), x.shape[-1], dtype=wide),
    )


add_norm = torch.library.custom_op("oelm::add_norm", launch, mutates_args=())
add_norm.register_fake(_outputs)


@torch.library.custom_op("oelm::add_norm_backward", mutates_args=())
def add_norm_backward(
    total: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, grad_total: Tensor | None, grad_out: Tensor,
    dtype: torch.dtype, rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of both terms; the same in `dtype` if that is another one, else nothing; and the weight's
    and the bias's, (2, C). `grad_total` is that of all rows of the sum, or of those picked."""
    grad_total, grad_out = None if grad_total is None else grad_total.contiguous(), grad_out.contiguous()
    grad, late, _ = _gradients(total, weight, mean, scale, grad_total, grad_out, dtype, rows)
    places, tile = None, _tile(total, SMALL_TILE if mean.numel() <= FEW_ROWS else TILE)
    if grad_total is None:
        rows = None
    elif rows is not None:
        grads, grad_total = grad_total, grad_total.new_empty(grad_total.shape)
        places = rows.new_full((mean.numel(),), len(rows), dtype=torch.int32)
        with torch.cuda.device_of(total):
            _places_kernel[(len(rows),)](
                rows, grads, grad_total, places, len(rows), total.shape[-1], WIDTH=tile["WIDTH"]
            )
    walkers = min(WALKERS, triton.cdiv(mean.numel(), tile["ROWS"]))
    partial = total.new_empty(walkers, 2, total.shape[-1], dtype=torch.float32)
    with torch.cuda.device_of(total):
        _norm_backward_kernel[(walkers,)](
            total, weight, mean, scale, grad_total, places, grad_out, grad, late, partial,
            mean.numel(), total.shape[-1], 0 if rows is None else len(rows),
            STRAIGHT=grad_total is not None, PICKED=rows is not None, NARROW=late.numel() > 0, **tile,
        )  # fmt: skip
        return grad, late, column_sums(partial)


@add_norm_backward.register_fake
def _gradients(
    total: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, grad_total: Tensor | None, grad_out: Tensor,
    dtype: torch.dtype, rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        total.new_empty(total.shape),
        total.new_empty(total.shape if dtype != total.dtype else (0,), dtype=dtype),
        total.new_empty(2, total.shape[-1], dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, late, weight, *_, rows = inputs
    total, _, mean, scale, _ = output
    ctx.save_for_backward(total, weight, mean, scale, rows)
    ctx.dtypes = x.dtype, late.dtype
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None, _: Any, __: Any, grad_picked: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight, mean, scale, rows = ctx.saved_tensors
    grad_out = torch.zeros_like(total) if grad_out is None else grad_out
    straight, (wide, dtype) = grad_total if rows is None else grad_picked, ctx.dtypes
    grad, late, sums = add_norm_backward(total, weight, mean, scale, straight, grad_out, dtype, rows)
    return grad.to(wide), late if dtype != total.dtype else grad, sums[0], sums[1], None, None, None


add_norm.register_autograd(_autograd, setup_context=_setup_context)
