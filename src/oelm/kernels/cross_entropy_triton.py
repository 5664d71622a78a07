"""Cross-entropy and its gradient from a chunk of logits, in Triton. `lm_loss.py` defines it.

A program takes a row: once for the softmax's normaliser, once to write the gradient over the logits. So few
programs run at a time that the second pass finds the row in the GPU's cache, and memory is read and written
once.
"""
# mypy: disable-error-code="no-untyped-def"
# A kernel's arguments are what Triton makes of them; Python's types do not describe them.

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run on the CPU, in numpy
BLOCK = 64 if INTERPRETED else 8192  # words at a time
WARPS = 32  # half of what a multiprocessor holds


@triton.jit
def _kernel(
    logits, targets, losses, width, vocab, smoothing, gain, ignored, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
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
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    everything = tl.full((), 0.0, tl.float32)  # the sum of the logits, for smoothing
    for first in range(0, vocab, BLOCK):
        words = first + tl.arange(0, BLOCK)
        values = tl.load(logits + words, mask=words < vocab, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(values, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(values - new_peak), 0)
        peak = new_peak
        if smoothing > 0:
            everything += tl.sum(tl.where(words < vocab, values, 0.0), 0)
    more = tl.log(
        total
    )  # what the normaliser has more than the peak, apart: its digits would be lost in the sum
    exists = (target >= 0) & (target < vocab)  # the loss of a word that does not exist is not a number
    at = tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32) - peak - more
    loss = -(1 - smoothing) * at - smoothing * (everything / vocab - peak - more)
    tl.store(losses + row, loss)
    if WRITE:
        share, scale = smoothing / vocab, 1 / total
        at_target = tl.where(at > -1e-3, at + 0.5 * at * at, tl.exp(at) - 1)  # p - 1 without its cancellation
        at_target = (at_target + smoothing - share) * gain
        for first in range(0, width, BLOCK):
            words = first + tl.arange(0, BLOCK)
            values = tl.load(logits + words, mask=words < vocab, other=float("-inf")).to(tl.float32)
            slopes = (tl.exp(values - peak) * scale - share) * gain
            slopes = tl.where(words == target, at_target, slopes)
            slopes = tl.where(words < vocab, slopes, 0.0)
            tl.store(logits + words, slopes.to(logits.dtype.element_ty), mask=words < width)


@torch.library.custom_op("oelm::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, gain: float, ignored: int, write: bool
) -> Tensor:
    """The losses (n,) in float32, 0 where the target is `ignored`. With `write`, `gain` times the gradient is
    left in place of the logits (n, P), of which those past the vocabulary have neither."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _kernel[(len(logits),)](
            logits, targets, losses, logits.shape[1], vocab, smoothing, gain, ignored,
            WRITE=write, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses


@cross_entropy_.register_fake
def _(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, gain: float, ignored: int, write: bool
) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
