"""Cross-entropy and its gradient from a chunk of logits, in Triton. `lm_loss.py` defines it.

A program takes a row: once for the softmax's normaliser, once to write the gradient over the logits.
Exponentials are taken relative to the largest logit of the first block, which needs no comparisons. Only if
another exceeds it by so much that digits would be lost are they taken again, relative to the largest of all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

# With these, the fastest of thirty variants tried on an H200.
BLOCK = 64 if INTERPRETED else 4096  # words at a time
WARPS = 32


@triton.jit
def _words(logits, first, width, vocab, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The logits of a block in float32; words past the vocabulary have no probability."""
    words = first + tl.arange(0, BLOCK)
    if WHOLE:
        return tl.load(logits + words).to(tl.float32)
    # The width is a round number: so masked, many words are loaded at once.
    values = tl.load(logits + words, mask=words < width, other=float("-inf")).to(tl.float32)
    return tl.where(words < vocab, values, float("-inf"))


@triton.jit
def _total(logits, peak, width, vocab, BLOCK: tl.constexpr):
    """The sum of the exponentials, relative to `peak`."""
    whole = vocab // BLOCK * BLOCK
    totals = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, whole, BLOCK):
        totals += tl.exp(_words(logits, first, width, vocab, True, BLOCK) - peak)
    if whole < vocab:
        totals += tl.exp(_words(logits, whole, width, vocab, False, BLOCK) - peak)
    return tl.sum(totals, 0)


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, width, vocab, smoothing, gain, ignored,
    SMOOTHING: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if WRITE:
            for first in range(0, width, BLOCK):
                words = first + tl.arange(0, BLOCK)
                zeros = tl.zeros((BLOCK,), logits.dtype.element_ty)
                tl.store(logits + words, zeros, mask=words < width)
        return
    exists = (target >= 0) & (target < vocab)  # the loss of a word that does not exist is not a number
    at = tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32)
    peak = tl.max(_words(logits, 0, width, vocab, False, BLOCK), 0)
    total = _total(logits, peak, width, vocab, BLOCK)
    if (total > 1e6) | (total != total):
        peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            peaks = tl.maximum(peaks, _words(logits, first, width, vocab, False, BLOCK))
        peak = tl.max(peaks, 0)
        total = _total(logits, peak, width, vocab, BLOCK)
    # What the normaliser has more than the peak stays apart: its digits would be lost in the sum.
    more = tl.log(total)
    at = at - peak - more
    loss = -at
    if SMOOTHING:
        everything = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            words = first + tl.arange(0, BLOCK)
            everything += tl.load(logits + words, mask=words < vocab, other=0.0).to(tl.float32)
        loss = -(1 - smoothing) * at - smoothing * (tl.sum(everything, 0) / vocab - peak - more)
    tl.store(losses + row, loss)
    if WRITE:
        whole = vocab // BLOCK * BLOCK
        share, scale = smoothing / vocab * gain, gain / total
        for first in range(0, whole, BLOCK):
            slopes = tl.exp(_words(logits, first, width, vocab, True, BLOCK) - peak) * scale - share
            tl.store(logits + first + tl.arange(0, BLOCK), slopes.to(logits.dtype.element_ty))
        for first in range(whole, width, BLOCK):
            slopes = tl.exp(_words(logits, first, width, vocab, False, BLOCK) - peak) * scale - share
            words = first + tl.arange(0, BLOCK)
            slopes = tl.where(words < vocab, slopes, 0.0)
            tl.store(logits + words, slopes.to(logits.dtype.element_ty), mask=words < width)
        tl.debug_barrier()  # the target's is written by then, and written again
        at_target = tl.where(at > -1e-3, at + 0.5 * at * at, tl.exp(at) - 1)  # p - 1 without its cancellation
        at_target = (at_target + smoothing) * gain - share
        tl.store(logits + target, at_target.to(logits.dtype.element_ty), mask=exists)


@torch.library.custom_op("oelm::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, gain: float, ignored: int, write: bool
) -> Tensor:
    """The losses (n,) in float32, 0 where the target is `ignored`. With `write`, `gain` times the gradient is
    left in place of the logits (n, P), of which those past the vocabulary have neither."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(len(logits),)](
            logits, targets, losses, logits.shape[1], vocab, smoothing, gain, ignored,
            SMOOTHING=smoothing > 0, WRITE=write, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses


@cross_entropy_.register_fake
def _(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
