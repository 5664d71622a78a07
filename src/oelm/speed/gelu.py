"""GELU for compiled blocks in half precision. `F.gelu` defines it.

The exact GELU needs the error function, and a GPU computes one with some forty instructions: at two bytes an
element the kernel then waits for arithmetic and not for memory. The logarithm of the normal distribution's
tail, though, is nearly a parabola: a polynomial and one exponential give the tail to 7e-7. That is far below
what is rounded away when the result is stored in 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# log(P(X > x)) for x >= 0, highest power first: fitted for the least error of the tail, or of x times it.
LOG_TAIL = (-0.00034675635, 0.0050477769, -0.036281604, -0.31844154, -0.79784849, -0.69314847)


def gelu(x: Tensor) -> Tensor:
    return FastGelu.apply(x) if _is_for(x) else F.gelu(x)


def gelu_value(x: Tensor) -> Tensor:
    """The same for a function that has its own backward pass."""
    return _value(x) if _is_for(x) else F.gelu(x)


def _is_for(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and torch.compiler.is_compiling()


class FastGelu(torch.autograd.Function):
    """x times the normal distribution function of x, in float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _value(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gelu_gradient(x, grad)


def gelu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    wide = x.float()
    slope = _distribution(wide) + wide * torch.exp(-0.5 * wide * wide) * (2 * torch.pi) ** -0.5
    return (grad.float() * slope).to(x.dtype)


def _value(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * _distribution(wide)).to(x.dtype)


def _distribution(x: Tensor) -> Tensor:
    """The normal distribution function."""
    positive = x.abs()
    power: Tensor | float = 0.0
    for coefficient in LOG_TAIL:
        power = power * positive + coefficient
    assert isinstance(power, Tensor)
    tail = torch.exp(power)
    return torch.where(x > 0, 1 - tail, tail)
