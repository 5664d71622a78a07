"""Steps of AdamW without a gradient, several at once, in Triton. `training/row_windows.py` says what for.

A step reads and writes a weight and its two moments. Taken one after another in registers, many steps read
and write them once.
"""
# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments are what Triton makes of them; Python's types do not describe them.

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.kernels.attention_triton import INTERPRETED

BLOCK = 64 if INTERPRETED else 1024


@triton.jit(do_not_specialize=["count"])
def _coast_kernel(weights, means, squares, steps, count, size, beta1, beta2, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weights + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    square = tl.load(squares + at, mask=inside, other=0.0)
    for step in range(count):
        weight -= tl.load(steps + 3 * step) * weight
        mean *= beta1
        square *= beta2
        spread = tl.sqrt(square) / tl.load(steps + 3 * step + 2) + eps
        weight -= tl.load(steps + 3 * step + 1) * mean / spread
    tl.store(weights + at, weight, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)


def coast_(
    weight: Tensor, mean: Tensor, square: Tensor, steps: Tensor, beta1: float, beta2: float, eps: float
) -> None:
    """`steps` has (rate x weight decay, rate / first bias correction, root of the second) for each."""
    size = weight.numel()
    with torch.cuda.device_of(weight):
        _coast_kernel[(triton.cdiv(size, BLOCK),)](
            weight, mean, square, steps, len(steps), size, beta1, beta2, eps, BLOCK=BLOCK
        )
