"""The gradient of position embeddings, in Triton: one pass over memory.

Adding every token's row where it belongs takes an atomic addition for each number, and thousands of them meet
at one place. Here the rows of a position are gathered, in the same order every time.
"""
# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments are what Triton makes of them; Python's types do not describe them.

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_texts"])
def _position_kernel(grad, sums, bounds, num_texts, width, TEXTS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of every text's row at the program's position, `TEXTS` texts at a time."""
    position = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, num_texts, TEXTS):
        texts = first + tl.arange(0, TEXTS)
        begin = tl.load(bounds + texts, mask=texts < num_texts, other=0)
        end = tl.load(bounds + texts + 1, mask=texts < num_texts, other=0)
        rows = begin + position
        exist = (rows < end)[:, None] & (columns < width)[None, :]
        found = tl.load(grad + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=exist, other=0.0)
        total += tl.sum(found.to(tl.float32), 0)
    tl.store(sums + position.to(tl.int64) * width + columns, total, mask=columns < width)


@torch.library.custom_op("oelm::position_gradient", mutates_args=())
def position_gradient(grad: Tensor, bounds: Tensor, positions: int) -> Tensor:
    """The gradient of position embeddings, (positions, C), from that of texts that lie end to end, (N, C)."""
    grad = grad.contiguous()
    sums = grad.new_empty(positions, grad.shape[1])
    with torch.cuda.device_of(grad):
        _position_kernel[positions, triton.cdiv(grad.shape[1], 256)](
            grad, sums, bounds, len(bounds) - 1, grad.shape[1], TEXTS=16, WIDTH=256
        )
    return sums


@position_gradient.register_fake
def _(grad: Tensor, bounds: Tensor, positions: int) -> Tensor:
    return grad.new_empty(positions, grad.shape[1])
