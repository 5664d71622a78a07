"""Rows added up by number, in Triton: the gradient of an embedding, in the same order every time.

Adding every token's row where it belongs takes an atomic addition for each number, and which comes first is
left open: two runs of one seed then differ. Here tokens are ordered by word (and by place among equal ones);
then one program adds up all rows of a word. A step's few thousand tokens are ordered by counting, for each,
those that come before it: that is quicker than sorting them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

# The fastest of some forty variants tried on an H200.
COUNTED = 64 if INTERPRETED else 8192  # tokens; more are sorted, for counting takes their square
ORDER = {"BLOCK": 16, "OTHERS": 32} if INTERPRETED else {"BLOCK": 8, "OTHERS": 512}
SUM = {"ROWS": 4, "WIDTH": 32} if INTERPRETED else {"ROWS": 32, "WIDTH": 256, "num_warps": 2}


@triton.jit(do_not_specialize=["count"])
def _order_kernel(ids, order, ordered, count, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """Tokens in the order of their words, and the words in that order."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(ids + token, mask=token < count, other=0).to(tl.int32)
    before = tl.zeros((BLOCK, OTHERS), tl.int32)
    for first in range(0, count, OTHERS):
        other = first + tl.arange(0, OTHERS)
        theirs = tl.load(ids + other, mask=other < count, other=0x7FFFFFFF).to(tl.int32)
        earlier = other[None, :] < token[:, None]
        comes = (theirs[None, :] < word[:, None]) | ((theirs[None, :] == word[:, None]) & earlier)
        before += comes.to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(order + place, token, mask=token < count)
    tl.store(ordered + place, word, mask=token < count)


@triton.jit(do_not_specialize=["count"])
def _row_sums_kernel(
    grad, order, ordered, sums, count, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The program at the first of a word's tokens adds up their rows, `ROWS` at a time."""
    place = tl.program_id(0)
    word = tl.load(ordered + place)
    if tl.load(ordered + place - 1, mask=place > 0, other=-1) == word:
        return
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    more = True
    while more:
        at = place + tl.arange(0, ROWS)
        same = tl.load(ordered + at, mask=at < count, other=-1) == word
        token = tl.load(order + at, mask=same, other=0).to(tl.int64)
        inside = same[:, None] & (column < width)[None, :]
        rows = tl.load(grad + token[:, None] * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(rows.to(tl.float32), 0)
        place += ROWS
        more = tl.sum(same.to(tl.int32), 0) == ROWS
    where = sums + word.to(tl.int64) * width + column
    tl.store(where, total.to(sums.dtype.element_ty), mask=column < width)


def row_sums(grad: Tensor, ids: Tensor, size: int) -> Tensor:
    """(size, C): row w is the sum of the rows of `grad` (N, C) whose id, of `ids` (N,), is w."""
    grad, ids = grad.contiguous(), ids.contiguous()
    count, width = grad.shape
    sums = grad.new_zeros(size, width)
    if not count:
        return sums
    with torch.cuda.device_of(grad):
        if count > COUNTED:
            ordered, order = ids.int().sort(stable=True)
        else:
            order, ordered = (ids.new_empty(count, dtype=torch.int32) for _ in range(2))
            _order_kernel[(triton.cdiv(count, ORDER["BLOCK"]),)](ids, order, ordered, count, **ORDER)
        _row_sums_kernel[(count, triton.cdiv(width, SUM["WIDTH"]))](
            grad, order, ordered, sums, count, width, **SUM
        )
    return sums
