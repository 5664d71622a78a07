"""AdamW in Triton: one step of all weights at once, and of one weight many steps without a gradient.

A step reads and writes a weight and its two moments, and all it waits for is memory. Here all weights are in
one launch, in small pieces; a table has their addresses. Gradients are clipped as they are read, and what the
next step needs, half-precision copies of weights, is written on the way. `speed/adamw.py` uses it.

Gradients whose norm is not finite set a `fault` that stays: that step and all later ones change nothing,
until someone has looked.

Steps without a gradient are taken one after another in registers: many of them read and write once.
`speed/row_windows.py` says what for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oelm.speed.kernels.attention_triton import INTERPRETED

BLOCK = 64 if INTERPRETED else 1024  # numbers that a program holds
PIECE = 1024 if INTERPRETED else 2048  # of a weight, for a program of a step
WALKERS = 4 if INTERPRETED else 1024  # programs that add up squares
ALIGNED = 16  # numbers: where a weight's gradient begins among all

# A piece: the addresses of its numbers in the weight, in both moments and in the copy (0: there is none),
# where its gradient begins, how many numbers it has, and the number of its weight.
COLUMNS = 8
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _moved(weight, mean, square, decay, rate, root, eps):
    """A weight after a step, by its new moments."""
    weight -= decay * weight
    return weight - rate * mean / (tl.sqrt(square) / root + eps)


@triton.jit(do_not_specialize=["count", "taken"])
def _coast_kernel(
    weights, means, squares, steps, counter, count, taken, size, beta1, beta2, eps, BLOCK: tl.constexpr
):  # fmt: skip
    count = tl.minimum(count, tl.load(counter).to(tl.int32) - taken)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weights + at, mask=inside, other=0.0)
    mean = tl.load(means + at, mask=inside, other=0.0)
    square = tl.load(squares + at, mask=inside, other=0.0)
    for step in range(count):
        mean *= beta1
        square *= beta2
        decay, rate, root = (
            tl.load(steps + 3 * step),
            tl.load(steps + 3 * step + 1),
            tl.load(steps + 3 * step + 2),
        )
        weight = _moved(weight, mean, square, decay, rate, root, eps)
    tl.store(weights + at, weight, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _squares_kernel(pieces, grads, partial, count, PIECE: tl.constexpr):
    """The sums of the gradients' squares, as many as there are programs."""
    inner = tl.arange(0, PIECE)
    found = tl.zeros((PIECE,), tl.float32)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        row = pieces + piece * _COLUMNS
        first, size = tl.multiple_of(tl.load(row + 4), 16), tl.load(row + 5)
        if size == PIECE:
            grad = tl.load(grads + first + inner)
        else:
            grad = tl.load(grads + first + inner, mask=inner < size, other=0.0)
        found += grad * grad
    tl.store(partial + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def _factors_kernel(addresses, constants, partial, norm, fault, factors, clip, WALKERS: tl.constexpr):
    """For a program's weight: count the step, and find its factors. Powers want float64. The fault is set by
    one program while others read it: all of them find the same, before and after."""
    number = tl.program_id(0)
    total = tl.sqrt(tl.sum(tl.load(partial + tl.arange(0, WALKERS)), 0))
    scale = 1.0
    if clip > 0:
        scale = tl.minimum(clip / (total + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL)
    bad = (tl.load(fault) != 0) | (total != total) | (total == float("inf"))
    if number == 0:
        tl.store(norm, total)
        tl.store(fault, 1.0, mask=bad)
    steps = tl.load(addresses + 2 * number).to(tl.pointer_type(tl.float32))
    rates = tl.load(addresses + 2 * number + 1).to(tl.pointer_type(tl.float32))
    step, rate = tl.load(steps) + 1, tl.load(rates).to(tl.float64)
    tl.store(steps, step, mask=bad == 0)
    decay = tl.load(constants + 3 * number)
    first = 1 - tl.exp2(step.to(tl.float64) * tl.load(constants + 3 * number + 1))
    second = 1 - tl.exp2(step.to(tl.float64) * tl.load(constants + 3 * number + 2))
    tl.store(factors + 4 * number, (rate * decay).to(tl.float32))
    tl.store(factors + 4 * number + 1, (rate / first).to(tl.float32))
    tl.store(factors + 4 * number + 2, tl.sqrt(second).to(tl.float32))
    tl.store(factors + 4 * number + 3, scale)


@triton.jit
def _piece_step(
    row, grads, decay, rate, root, scale, beta1, rest1, beta2, rest2, eps,
    WHOLE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PIECE)
    inside = None if WHOLE else at < tl.load(row + 5)
    other = None if WHOLE else 0.0
    weights = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + at
    means = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + at
    squares = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + at
    grad = tl.load(grads + tl.multiple_of(tl.load(row + 4), 16) + at, mask=inside, other=other) * scale
    mean = beta1 * tl.load(means, mask=inside, other=other) + rest1 * grad
    square = beta2 * tl.load(squares, mask=inside, other=other) + rest2 * grad * grad
    weight = _moved(tl.load(weights, mask=inside, other=other), mean, square, decay, rate, root, eps)
    tl.store(weights, weight, mask=inside)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    if tl.load(row + 3) != 0:
        copies = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.bfloat16)), 16) + at
        tl.store(copies, weight.to(tl.bfloat16), mask=inside)


@triton.jit
def _step_kernel(
    pieces, factors, grads, fault, beta1, rest1, beta2, rest2, eps, PIECE: tl.constexpr
):  # fmt: skip
    if tl.load(fault) != 0:
        return
    row = pieces + tl.program_id(0).to(tl.int64) * _COLUMNS
    mine = factors + 4 * tl.load(row + 6)
    decay, rate, root, scale = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
    if tl.load(row + 5) == PIECE:
        _piece_step(
            row, grads, decay, rate, root, scale, beta1, rest1, beta2, rest2, eps, WHOLE=True, PIECE=PIECE
        )
    else:
        _piece_step(
            row, grads, decay, rate, root, scale, beta1, rest1, beta2, rest2, eps, WHOLE=False, PIECE=PIECE
        )


def coast_(
    weight: Tensor, mean: Tensor, square: Tensor, steps: Tensor, counter: Tensor, taken: int,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """`steps` has (rate x weight decay, rate / first bias correction, root of the second) for each, of which
    as many are taken as bring the weight from `taken` steps to those that `counter` has counted."""
    size = weight.numel()
    with torch.cuda.device_of(weight):
        _coast_kernel[(triton.cdiv(size, BLOCK),)](
            weight, mean, square, steps, counter, len(steps), taken, size, beta1, beta2, eps, BLOCK=BLOCK
        )


def step_(
    pieces: Tensor, addresses: Tensor, constants: Tensor, grads: Tensor, fault: Tensor,
    betas: tuple[float, float], eps: float, clip: float,
) -> Tensor:  # fmt: skip
    """A step of every weight, by gradients clipped to the norm `clip` unless it is 0. Returns their norm.
    Where that is not finite, or `fault` is not 0 already, nothing is changed and `fault` becomes 1.

    `pieces` (pieces, COLUMNS) is described above; a weight has its `addresses` of the count of its steps and
    of its rate, and its `constants`: weight decay and the logarithms, to the base 2, of the betas.
    """
    beta1, beta2 = betas
    partial, norm = grads.new_empty(WALKERS), grads.new_empty(())
    factors = grads.new_empty(len(addresses), 4)
    with torch.cuda.device_of(grads):
        _squares_kernel[(WALKERS,)](pieces, grads, partial, len(pieces), PIECE=PIECE)
        _factors_kernel[(len(addresses),)](
            addresses, constants, partial, norm, fault, factors, float(clip), WALKERS=WALKERS
        )
        _step_kernel[(len(pieces),)](
            pieces, factors, grads, fault, beta1, 1 - beta1, beta2, 1 - beta2, eps, PIECE=PIECE, num_warps=8
        )
    return norm
