"""Attention for GPUs, in Triton: the forward pass, and what the backward passes share with it.

One program per tile of queries walks the keys with an online softmax and keeps, per query, the log-sum-exp of
its scores, from which a backward pass makes the probabilities again. Exponentials and the kept logarithm are
to the base 2, with log2(e) folded into the scale, because that is what the hardware computes.

Tensors are (B, H, T, D) with any strides. Texts that lie end to end are one batch entry (B = 1) with
`cu_seqlens`. No launch depends on a value on the device, so every call can stand in a CUDA graph. No two
programs write to one place, so the same inputs give the same bits.

DROPOUT: weights are dropped with a chance. WINDOW: a query sees only the keys that are at most so many places
before or after it; 0: all.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run on the CPU, in numpy
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 128
LONGEST_DROPPED = 1 << 13  # tokens of a text up to which no two of its weights share a random number

_INTERPRETED = tl.constexpr(INTERPRETED)
_LONGEST_DROPPED = tl.constexpr(LONGEST_DROPPED)


@triton.jit
def rows_of_tile(cu_seqlens, num_texts, rows, tile, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """(first row of the text, its length, the tile's first row within it, whether it is a text at all).

    Text s owns the tiles from cu_seqlens[s] // BLOCK + s on. These are enough for it whatever its length,
    so rows // BLOCK + num_texts + 1 tiles are enough for all, and the grid depends on no length. The rows
    after the last text are found as one more, which is no text.
    """
    start = tl.full((), 0, tl.int64)
    length = rows
    first = tile * BLOCK
    is_text = True
    if VARLEN:
        text = tl.full((), 0, tl.int32)
        above = text + num_texts + 1
        while above - text > 1:
            middle = (text + above) // 2
            if tl.load(cu_seqlens + middle) // BLOCK + middle <= tile:
                text = middle
            else:
                above = middle
        begin = tl.load(cu_seqlens + text)
        is_text = text < num_texts
        start = begin.to(tl.int64)
        length = tl.load(cu_seqlens + text + 1, mask=is_text, other=rows) - begin
        first = (tile - begin // BLOCK - text) * BLOCK
    return start, length, first, is_text


@triton.jit
def head_of(tensor, strides, start):
    """The program's own part of a tensor: where its text begins in its head, row stride, column stride."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    return tensor + batch * strides[0] + head * strides[1] + start * strides[2], strides[2], strides[3]


@triton.jit
def _pointers(head, first, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    tensor, row_stride, column_stride = head
    origin = tensor + tl.cast(first, tl.int64) * row_stride  # within a tile 32 bits are enough
    return origin + tl.arange(0, BLOCK)[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :] * column_stride


@triton.jit
def first_of_head(rows, start):
    """Where the program's text begins among numbers that are kept per head and row, (B, H, rows)."""
    return (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * rows + start


@triton.jit
def load(
    head, first, length,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NEAR_END: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `first + BLOCK` of a head. NEAR_END: zeros for those after the end of the text."""
    pointers = _pointers(head, first, BLOCK, BLOCK_D)
    row_exists = (first + tl.arange(0, BLOCK) < length)[:, None]
    column_exists = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if NEAR_END and HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=row_exists & column_exists, other=0.0)
    elif NEAR_END:
        tile = tl.load(pointers, mask=row_exists, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=column_exists, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store(
    head, tile, first, length, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    exists = (first + tl.arange(0, BLOCK) < length)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(_pointers(head, first, BLOCK, BLOCK_D), tile.to(head[0].dtype.element_ty), mask=exists)


@triton.jit
def product(a, b, sums):
    """sums + a @ b, in float32."""
    if _INTERPRETED:  # its products take the bits of a bfloat16 for an integer
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def random_of(seed, chance, start, DROPOUT: tl.constexpr):
    """What `keep` needs: a seed of this head's own, the chance, the first row of the text."""
    own, row = 0, 0
    if DROPOUT:
        own = tl.load(seed) + tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
        row = start.to(tl.int32)
    return own, chance, row


@triton.jit
def keep(weights, random, queries, keys):
    """The weights that dropout keeps, enlarged so that their expected sum stays. What is kept depends on the
    place alone: a backward pass finds the same. `queries` and `keys` have the dimensions of `weights`."""
    seed, chance, start = random
    place = (start + queries) * _LONGEST_DROPPED + keys
    return tl.where(tl.rand(seed, place) < chance, 0.0, weights / (1 - chance))


@triton.jit
def near(queries, keys, WINDOW: tl.constexpr):
    return (keys <= queries + WINDOW) & (queries <= keys + WINDOW)


@triton.jit
def within(first, length, BLOCK: tl.constexpr, OTHER: tl.constexpr, WINDOW: tl.constexpr):
    """From where, in whole tiles of OTHER, to where rows `first` to `first + BLOCK` are near to something."""
    return tl.maximum(first - WINDOW, 0) // OTHER * OTHER, tl.minimum(first + BLOCK + WINDOW, length)


@triton.jit
def _attend(
    state, q_tile, k, v, first_query, low, high, length, scale, random,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys low..high. MASKED: some of them are hidden from some of the queries."""
    sums, total, peak = state
    queries = first_query + tl.arange(0, BLOCK_M)
    for first in range(low, high, BLOCK_N):
        k_tile = load(k, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        scores = product(q_tile, tl.trans(k_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        if MASKED:
            keys = first + tl.arange(0, BLOCK_N)
            seen = (keys < length)[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= queries[:, None])
            if WINDOW > 0:
                seen = seen & near(queries[:, None], keys[None, :], WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        # Every query sees key 0, which is in the first tile: from there on the peak is finite. With a window
        # it may see no key of the first tiles, and any finite peak will do.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        if WINDOW > 0:
            new_peak = tl.maximum(new_peak, -1e30)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        peak = new_peak
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            weights = keep(weights, random, queries[:, None], (first + tl.arange(0, BLOCK_N))[None, :])
        v_tile = load(v, first, length, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
        sums = product(weights.to(v_tile.dtype), v_tile, sums * shrink[:, None])
    return sums, total, peak


@triton.jit(do_not_specialize=["num_texts"])
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, seed, chance,
    cu_seqlens, num_texts, rows, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if CAUSAL:  # later queries see more keys: begin with the long work
        tile = tl.num_programs(0) - 1 - tile
    start, length, first, is_text = rows_of_tile(cu_seqlens, num_texts, rows, tile, BLOCK_M, VARLEN)
    if first >= length:
        return
    out = head_of(out, out_strides, start)
    lse += first_of_head(rows, start)
    queries = first + tl.arange(0, BLOCK_M)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if not is_text:
        store(out, sums, first, length, BLOCK_M, HEAD_DIM, BLOCK_D)
        tl.store(lse + queries, total, mask=queries < length)
        return
    q, k, v = head_of(q, q_strides, start), head_of(k, k_strides, start), head_of(v, v_strides, start)
    q_tile = load(q, first, length, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    # Only the tiles of keys that hold the text's end or the diagonal need a mask.
    high = tl.minimum(first + BLOCK_M, length) if CAUSAL else length
    masked = (first if CAUSAL else length) // BLOCK_N * BLOCK_N
    random = random_of(seed, chance, start, DROPOUT)
    state = sums, total, tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if WINDOW > 0:
        masked, high = within(first, length, BLOCK_M, BLOCK_N, WINDOW)
    else:
        state = _attend(state, q_tile, k, v, first, 0, masked, length, scale, random,
                        HEAD_DIM, BLOCK_D, CAUSAL, False, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    state = _attend(state, q_tile, k, v, first, masked, high, length, scale, random,
                    HEAD_DIM, BLOCK_D, CAUSAL, True, BLOCK_M, BLOCK_N, DROPOUT, WINDOW)  # fmt: skip
    sums, total, peak = state
    if WINDOW > 0:  # a query after the text's end sees nothing
        total = tl.maximum(total, 1e-30)
    store(out, sums / total[:, None], first, length, BLOCK_M, HEAD_DIM, BLOCK_D)
    tl.store(lse + queries, peak + tl.log2(total), mask=queries < length)


class Tiles(NamedTuple):
    """How much of the scores a program has before it at a time, and how. Those chosen were about the fastest
    of some ten tried on an H200, for heads of 64 and texts of 40 to 2048 tokens; the trial left no record."""

    queries: int
    keys: int
    warps: int = 4  # a group of four takes 64 rows of a product
    stages: int = 3
    registers: int | None = None  # at most, of a thread; the fewer, the more programs run at a time


FORWARD = Tiles(64, 64)
INTERPRETED_TILES = Tiles(32, 16)  # small, so that small inputs have several


def launch_options(tiles: Tiles, like: Tensor) -> dict[str, int]:
    """For tensors such as `like`, (B, H, T, D)."""
    if INTERPRETED:
        tiles = INTERPRETED_TILES
    elif like.dtype == torch.float32:  # exact products do not run on the matrix units and need registers
        tiles = Tiles(32, 32, 8, 2)
    elif like.shape[-1] > 64:  # shared memory
        tiles = tiles._replace(stages=2, registers=None)
    options = {
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    return options if tiles.registers is None else options | {"maxnreg": tiles.registers}  # NVIDIA's only


def grid(
    like: Tensor, cu_seqlens: Tensor | None, block: str
) -> Callable[[dict[str, int]], tuple[int, int, int]]:
    batch, heads, rows, _ = like.shape

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        if cu_seqlens is None:
            return triton.cdiv(rows, meta[block]), heads, batch
        return rows // meta[block] + cu_seqlens.shape[0], heads, batch  # see rows_of_tile

    return grid


def arguments(like: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float) -> dict[str, Any]:
    """What all kernels take besides their tensors."""
    head_dim = like.shape[-1]
    return {
        "cu_seqlens": cu_seqlens,
        "num_texts": 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        "rows": like.shape[2],
        "scale": scale * math.log2(math.e),
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),  # the least a matrix product takes
        "CAUSAL": causal,
        "VARLEN": cu_seqlens is not None,
    }


def empty_like(tensor: Tensor) -> Tensor:
    """(B, H, T, D) that lies in memory as (B, T, H, D): joining its heads again costs no copy."""
    batch, heads, rows, head_dim = tensor.shape
    return tensor.new_empty(batch, rows, heads, head_dim).transpose(1, 2)


class Hidden(NamedTuple):
    """Which weights are left out besides those after a text's end: `seed` is an integer on the device."""

    seed: Tensor | None = None
    chance: float = 0.0  # of dropout
    window: int = 0

    def arguments(self) -> dict[str, Any]:
        names = {"DROPOUT": self.chance > 0, "WINDOW": self.window}
        return names | {"seed": self.seed, "chance": self.chance}


NOTHING_HIDDEN = Hidden()


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
    hidden: Hidden = NOTHING_HIDDEN,
) -> tuple[Tensor, Tensor]:
    """The output and the base-2 log-sum-exp of each query's scores, (B, H, T). Rows of no text give zeros."""
    out, lse = empty_like(v), v.new_empty(v.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(v):
        forward_kernel[grid(v, cu_seqlens, "BLOCK_M")](
            q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
            **arguments(v, cu_seqlens, causal, scale), **hidden.arguments(), **launch_options(FORWARD, v),
        )  # fmt: skip
    return out, lse
