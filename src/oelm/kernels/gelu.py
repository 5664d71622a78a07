"""GELU for compiled blocks in half precision. `F.gelu` defines it.

The exact GELU needs the error function, and a GPU computes one with some forty instructions: at two bytes an
element the kernel then waits for arithmetic and not for memory. The rational approximation of Abramowitz
and Stegun (7.1.26, off by at most 1.5e-7) takes one exponential, which the derivative needs anyway. The
difference is far below what is rounded away when the result is stored in 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_P = 0.3275911 * 0.5**0.5
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def gelu(x: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16) and torch.compiler.is_compiling():
        return FastGelu.apply(x)
    return F.gelu(x)


class FastGelu(torch.autograd.Function):
    """x times the normal distribution function of x, in float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, bell = _distribution(wide)
        return (grad.float() * (below + wide * bell * (2 * torch.pi) ** -0.5)).to(x.dtype)


def _distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal distribution function of x, and exp(-x^2 / 2)."""
    bell = torch.exp(-0.5 * x * x)
    t = 1 / (1 + _P * x.abs())
    sums = torch.zeros_like(t)
    for coefficient in _COEFFICIENTS:
        sums = (sums + coefficient) * t
    tail = 0.5 * sums * bell  # what lies beyond |x|, without cancellation
    return torch.where(x > 0, 1 - tail, tail), bell
