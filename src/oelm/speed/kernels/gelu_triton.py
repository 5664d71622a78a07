"""GELU's backward pass with the sums over its rows, in Triton. `gelu.py` defines it.

The gradient before GELU, summed over all rows, is also the bias's. That takes another pass over a block's
largest matrix; here every program keeps the sums of the rows it walks over.
"""
# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments are what Triton makes of them; Python's types do not describe them.

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.gelu import LOG_TAIL
from oelm.speed.kernels.attention_triton import INTERPRETED
from oelm.speed.kernels.norm_triton import column_sums, tile_of

WALKERS = 3 if INTERPRETED else 264  # programs for each column of tiles: two per multiprocessor of an H200

_LOG_TAIL, _COEFFICIENTS = tl.constexpr(LOG_TAIL), tl.constexpr(len(LOG_TAIL))


def tile_for(rows: int) -> dict[str, int]:
    """What was fastest on an H200: few programs for few rows."""
    if rows <= 2048:
        return {"ROWS": 1, "WIDTH": 1024}
    return {"ROWS": 4, "WIDTH": 512 if rows <= 16384 else 256}


@triton.jit
def _gelu_kernel(x, grad, result, partial, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        _, at, inside = tile_of(first, rows, column, width, ROWS)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        power = tl.full((ROWS, WIDTH), _LOG_TAIL[0], tl.float32)
        for index in tl.static_range(1, _COEFFICIENTS):
            power = power * tl.abs(value) + _LOG_TAIL[index]
        tail = tl.exp(power)
        density = tl.exp(-0.5 * value * value) * 0.3989422804014327
        slope *= tl.where(value > 0, 1 - tail, tail) + value * density
        sums += slope
        tl.store(result + at, slope.to(result.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(sums, 0), mask=column < width)


@torch.library.custom_op("oelm::gelu_backward", mutates_args=())
def gelu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before GELU, of x (..., C), and its sum over all rows, (C,) in float32."""
    x, grad = x.contiguous(), grad.contiguous()
    result, width = x.new_empty(x.shape), x.shape[-1]
    rows = x.numel() // width
    tile = tile_for(rows)
    walkers = min(WALKERS, triton.cdiv(rows, tile["ROWS"]))
    partial = x.new_empty(walkers, width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gelu_kernel[walkers, triton.cdiv(width, tile["WIDTH"])](
            x, grad, result, partial, rows, width, **tile, num_warps=4
        )
        return result, column_sums(partial)


@gelu_backward.register_fake
def _(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)
