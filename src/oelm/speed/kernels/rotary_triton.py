"""Rotary positions in Triton: one pass over memory, where PyTorch's operations take seven each way.

Each product is rounded to the tensor's dtype before the sum, as PyTorch does: the bits are those of
`models.gpt_block.rotate`. Its gradient is the rotation by the opposite angles.

Shapes: B texts, T positions, H heads, D numbers of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

TILE = 256 if INTERPRETED else 2048  # pairs of numbers to a program
DTYPES = (torch.bfloat16, torch.float16)
# Without it, the compiler takes a product and a sum for one operation, which rounds once.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _rounded_product(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "length"])
def _rotate_kernel(
    x, cosines, sines, out, rows, length, heads, half, text_stride, place_stride, head_stride,
    BACK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token: (B, T, H) counted through."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < half)[None, :]
    token, head = row // heads, row % heads
    text, place = (token // length).to(tl.int64), token % length
    angle = token.to(tl.int64)[:, None] * half + column[None, :]
    start = text * text_stride + place * place_stride + head * head_stride
    first = start[:, None] + column[None, :]
    a = tl.load(x + first, mask=inside, other=0.0)
    b = tl.load(x + first + half, mask=inside, other=0.0)
    cos = tl.load(cosines + angle, mask=inside, other=0.0).to(a.dtype)
    sin = tl.load(sines + angle, mask=inside, other=0.0).to(a.dtype)
    turned_a, turned_b = _rounded_product(a, cos), _rounded_product(b, cos)
    if BACK:
        turned_a += _rounded_product(b, sin)
        turned_b -= _rounded_product(a, sin)
    else:
        turned_a -= _rounded_product(b, sin)
        turned_b += _rounded_product(a, sin)
    there = out + row.to(tl.int64)[:, None] * (2 * half) + column[None, :]
    tl.store(there, turned_a.to(out.dtype.element_ty), mask=inside)
    tl.store(there + half, turned_b.to(out.dtype.element_ty), mask=inside)


def launch(x: Tensor, rotation: Tensor, back: bool = False) -> Tensor:
    """`x` (B, T, H, D), whose last dimension may be part of a longer one, turned by `rotation`
    (2, B, T, 1, D/2): contiguous."""
    texts, length, heads, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cosines, sines = rotation.contiguous().unbind()
    out = x.new_empty(x.shape)
    rows, columns = texts * length * heads, triton.next_power_of_2(width // 2)
    per_program = max(1, TILE // columns)
    with torch.cuda.device_of(x):
        _rotate_kernel[(triton.cdiv(rows, per_program),)](
            x, cosines, sines, out, rows, length, heads, width // 2, *x.stride()[:3],
            BACK=back, ROWS=per_program, WIDTH=columns, **OPTIONS,
        )  # fmt: skip
    return out


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return launch(x, rotation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        return launch(grad, rotation, back=True), None
