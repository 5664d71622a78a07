"""Every kernel over the whole range of its inputs, against float64.

Trained Q/K reach scores of hundreds, frozen orthonormal ones do not: an overflow in a kernel would strike one
arm of a comparison. So inputs here are the extremes, not only what random numbers make likely. The same cases
run in Triton's interpreter and on a GPU (kernel_ranges.py).

A result is right where its error is a few times that of PyTorch's own operation in the same dtype, or below
what rounding the inputs once would do. Results are never NaN.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.data.assemble import Packing
from oelm.models import gpt_block
from oelm.models.gpt_block import rotation_of
from oelm.speed.kernels import adamw_triton, cross_entropy_triton, norm_triton
from oelm.speed.kernels.rows_triton import row_sums
from oelm.speed.operations import add_norm, joint_attention, packed_attention, portable, rotate
from oelm.speed.value_only import packed_value_only

HEAD_DIM = 64
SIZES = (1e-6, 1.0, 1e4)
# What the scores of a query look like, in nats: `level` for all of them, plus what varies.
SCORES = {
    "tiny": (1e-6, 1e-6),
    "usual": (0.0, 1.0),
    "all very negative": (-1e4, 1.0),
    "all about -100": (-100.0, 1.0),
    "all very positive": (1e4, 1.0),
    "all equal": (0.0, 0.0),
    "all equal and very negative": (-1e3, 0.0),
    "spread wide": (0.0, 1e3),
    "one dominates": (-1e4, 1.0),  # and one key has +1e4
}


@dataclass(frozen=True)
class Where:
    """A device, and the lengths of texts that matter there: none, one, and around the edges of tiles."""

    device: str
    lengths: tuple[int, ...]
    heads: int = 1
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def packing(self) -> Packing:
        bounds = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0).int()
        return Packing(bounds.to(self.device), max(self.lengths))


def score_inputs(where: Where, kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """q and k (rows, H, D) whose scores, times 1/sqrt(D), are as SCORES says."""
    level, spread = SCORES[kind]
    q, k = (torch.randn(rows, where.heads, HEAD_DIM, device=where.device) for _ in range(2))
    size = spread**0.5
    q, k = q * size, k * size
    constant = (abs(level) / HEAD_DIM**0.5) ** 0.5  # in every component of both
    q, k = q + constant, k + math.copysign(constant, level)
    if kind == "one dominates":
        for begin, length in zip(_starts(where), where.lengths, strict=True):
            if length:
                k[begin + length // 2] = constant
    return q, k


def _starts(where: Where) -> list[int]:
    return [0, *itertools.accumulate(where.lengths)][:-1]


def check(
    found: list[Tensor], twin: list[Tensor], exact: list[Tensor], names: str, tolerance: float,
    floor: float = 0.0,
) -> None:  # fmt: skip
    """`twin` is PyTorch's result in the same dtype; `floor` is what a rounding before a difference leaves."""
    for name, ours, theirs, right in zip(names.split(), found, twin, exact, strict=True):
        assert ours.isfinite().all(), f"{name} is not finite"
        size = right.double().norm()
        error, usual = ((x.double() - right).norm() for x in (ours, theirs))
        limit = tolerance * size + (3 * usual if usual.isfinite() else 0.0) + floor * right.numel() ** 0.5
        assert error <= limit + 1e-30, f"{name}: error {error:.3g}, allowed {limit:.3g}, size {size:.3g}"


def results(call: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs that have one."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*leaves)
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def compare(
    call: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, names: str,
    tolerance: float,
) -> None:  # fmt: skip
    """Inputs of attention, v last. The slope of a score is the difference of two products of v and the
    gradient: where it is 0, as with a single key, a rounding of them is left."""
    wide = [x.double() for x in inputs]
    exact = results(twin, wide, grad.double())
    largest = [float(x.abs().max()) for x in (grad, *inputs)]
    floor = 1e-6 * largest[0] * largest[-1] * (max(largest[1:-1]) if len(inputs) > 1 else 0.0)
    check(results(call, inputs, grad), results(twin, inputs, grad), exact, names, tolerance, floor)


def attention_tolerance(kind: str, dtype: torch.dtype) -> float:
    """Scores are sums in float32: a score of 1e4 is known to 1e-3, and so is the logarithm of its weight."""
    level, spread = SCORES[kind]
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
    return rounding + 2e-6 * (abs(level) + 3 * spread)


# (what the scores are like, the size of the values, the size of the gradient)
ATTENTION = [(kind, 1.0, 1.0) for kind in SCORES] + [
    ("usual", 1e4, 1e4), ("usual", 1e-6, 1e-6), ("usual", 1.0, 0.0), ("all very negative", 1e4, 1e4),
    ("all very negative", 1.0, 0.0), ("one dominates", 1e4, 1e-6),
]  # fmt: skip


def attention_cases(where: Where) -> list[tuple[torch.dtype, str, float, float]]:
    return [(dtype, *case) for dtype, case in itertools.product(where.dtypes, ATTENTION)]


def joint(where: Where, dtype: torch.dtype, kind: str, values: float, slope: float, causal: bool) -> None:
    """q, k and v in one tensor: packed texts, or (causal) texts of one length each."""
    for length in where.lengths if causal else (None,):
        if length == 0:
            continue
        total = sum(where.lengths) if length is None else length
        q, k = (
            score_inputs(where, kind, total)
            if length is None
            else score_inputs(Where(where.device, (length,)), kind, length)
        )
        v, grad = (torch.randn_like(q) * size for size in (values, slope))
        parts = [x.to(dtype)[None] for x in (q, k, v)]
        packing = where.packing() if length is None else None

        def ours(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = packing) -> Tensor:
            return joint_attention(torch.stack((q, k, v), 2), causal, packing)

        def twin(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = packing) -> Tensor:
            if packing is not None:
                return portable(q[0], k[0], v[0], packing)[None]
            return plain_attention(q, k, v, causal)

        names = "output dq dk dv"
        compare(ours, twin, parts, grad.to(dtype)[None], names, attention_tolerance(kind, dtype))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """(B, T, H, D), by softmax of a matrix."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def one_query(where: Where, dtype: torch.dtype, kind: str, values: float, slope: float) -> None:
    """A query for every text: that of a text without tokens gives zeros."""
    q, k = score_inputs(where, kind, sum(where.lengths))
    q = q[: len(where.lengths)]
    v, grad = torch.randn_like(k) * values, torch.randn_like(q) * slope
    packing = where.packing()
    compare(
        lambda q, k, v: packed_attention(q, k, v, packing, one_query=True),
        lambda q, k, v: portable(q, k, v, packing, one_query=True),
        [x.to(dtype) for x in (q, k, v)], grad.to(dtype), "output dq dk dv", attention_tolerance(kind, dtype),
    )  # fmt: skip


def value_only(where: Where, dtype: torch.dtype, kind: str, values: float, slope: float) -> None:
    q, k = (x.to(dtype) for x in score_inputs(where, kind, sum(where.lengths)))
    v, grad = torch.randn_like(k) * values, torch.randn_like(k) * slope
    packing = where.packing()
    compare(
        lambda v: packed_value_only(q, k, v, packing),
        lambda v: portable(q.to(v.dtype), k.to(v.dtype), v, packing),
        [v], grad, "output dv", attention_tolerance(kind, dtype),
    )  # fmt: skip


# Logits of a row: (what all are, how they vary, what the target has more than the others)
LOGITS = [
    (0.0, 1e-6, 0.0), (0.0, 1.0, 0.0), (1e4, 1.0, 0.0), (-1e4, 1.0, 0.0), (0.0, 0.0, 0.0), (-1e4, 0.0, 0.0),
    (0.0, 1e4, 0.0), (0.0, 1.0, 1e4), (0.0, 1.0, -1e4), (-1e4, 1.0, 2e4),
]  # fmt: skip


def cross_entropy(
    where: Where, dtype: torch.dtype, level: float, spread: float, more: float, smoothing: float
) -> None:
    vocab, width = (150, 192) if where.device == "cpu" else (50257, 50304)
    targets = torch.randint(0, vocab, (7,), device=where.device)
    targets[3] = -100
    logits = torch.randn(7, width, device=where.device) * spread + level
    logits[torch.arange(7), targets.clamp(min=0)] += more
    logits = logits.to(dtype)
    exact = logits[:, :vocab].double().requires_grad_()
    right = F.cross_entropy(exact, targets, label_smoothing=smoothing, reduction="none")
    right.sum().backward()
    assert exact.grad is not None
    found = cross_entropy_triton.cross_entropy_(logits, targets, vocab, smoothing, 1.0, -100, True)
    assert found.isfinite().all() and logits.isfinite().all()
    # A loss is a difference of logits: it is known to a rounding of the largest of them.
    largest = abs(level) + 5 * spread + abs(more) + 1
    torch.testing.assert_close(found.double(), right.detach(), rtol=1e-5, atol=1e-6 * largest)
    tolerance = (1e-5 if dtype == torch.float32 else 8e-3) + 1e-6 * largest
    assert (logits[:, :vocab].double() - exact.grad).norm() <= tolerance * exact.grad.norm() + 1e-6
    assert not logits[:, vocab:].any() and not logits[3].any()


# Rows of activations: (what all are, how they vary)
ROWS = [(0.0, 1e-6), (0.0, 1.0), (0.0, 1e4), (1e4, 1.0), (-1e4, 1e-6), (0.0, 0.0), (1e4, 0.0), (-1.0, 1e3)]


def norm(where: Where, late: torch.dtype, level: float, spread: float, slope: float, count: int) -> None:
    width = 48 if where.device == "cpu" else 512
    layer = torch.nn.LayerNorm(width, device=where.device)
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(count, width, device=where.device) * spread + level
    more = (torch.randn(count, width, device=where.device) * spread).to(late)
    grad = torch.randn(count, width, device=where.device) * slope

    def ours(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer.weight.data, layer.bias.data = weight.data, bias.data
        return norm_triton.add_norm(x, more, weight, bias, layer.eps, x.dtype, None)[1]

    def twin(x: Tensor, more: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + more, (width,), weight, bias, layer.eps)

    # A row known to a rounding of its level has a norm that is known to as much over its spread.
    known = 1e-6 * abs(level) / math.sqrt(spread**2 + layer.eps)
    inputs = [x, more.float(), layer.weight.detach(), layer.bias.detach()]
    exact = results(twin, [i.double() for i in inputs], grad.double())
    found = results(lambda x, m, w, b: ours(x, m.to(late), w, b), inputs, grad)
    tolerance = (1e-5 if late == torch.float32 else 8e-3) + 10 * known
    check(found, results(twin, inputs, grad), exact, "output dx dlate dweight dbias", tolerance)
    with torch.no_grad():
        total, out = add_norm(x, more, layer, None)
    torch.testing.assert_close(total, x + more)
    assert out.isfinite().all()


def rotary(where: Where, dtype: torch.dtype, size: float, shape: tuple[int, ...], packed: bool) -> None:
    """Of a part of a joint product: the bits of PyTorch's operations, of the gradient, too."""
    texts, length, heads, width = shape
    joint = (torch.randn(texts, length, 3 * heads * width, device=where.device) * size).to(dtype)
    x = joint.chunk(3, -1)[1].unflatten(-1, (heads, width)).requires_grad_()
    place = torch.randint(0, 512, (texts, length)) if packed else torch.arange(length).expand(texts, -1)
    rotation = rotation_of(place.to(where.device), width, 10000.0)
    # The gradient comes from attention, where heads come before places.
    grad = (torch.randn(texts, heads, length, width, device=where.device) * size).to(dtype).transpose(1, 2)
    found, right = rotate(x, rotation), gpt_block.rotate(x, rotation)
    with torch.no_grad():
        without_gradient = rotate(x, rotation)
    grads = [torch.autograd.grad(out, x, grad)[0] for out in (found, right)]
    for ours, theirs in ((found, right), (without_gradient, right), grads):
        assert ours.is_contiguous() and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def adamw(where: Where, size: float, clip: float, decay: float) -> None:
    """Three steps of every weight at once, in float64 by the formula."""
    shapes = [(1,), (70, 16), (1023,), (1024,), (1025,)]
    grads = [[torch.randn(s, device=where.device) * size for s in shapes] for _ in range(3)]
    grads[1] = [torch.zeros_like(g) for g in grads[1]]  # nothing, in between
    start = [torch.randn(s, device=where.device) for s in shapes]
    from oelm.speed.adamw import RecordableAdamW

    weights = [torch.nn.Parameter(w.clone()) for w in start]
    rate = torch.tensor(1e-3, device=where.device)
    optimizer = RecordableAdamW(weights, lr=rate, eps=1e-8, weight_decay=decay, fused=True)
    optimizer.clip = clip
    exact = [(w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()) for w in start]
    for step, given in enumerate(grads, 1):
        for weight, grad in zip(weights, given, strict=True):
            weight.grad = grad.clone()
        optimizer.gather()
        assert optimizer.gathered
        optimizer.step()
        length = torch.sqrt(sum((g.double() ** 2).sum() for g in given))  # type: ignore[arg-type]
        assert abs(optimizer.norm.double() - length) <= 1e-5 * length
        scale = min(1.0, clip / (float(length) + 1e-6)) if clip else 1.0
        exact = [_adamw_step(*e, g.double() * scale, step, decay) for e, g in zip(exact, given, strict=True)]
    for weight, (right, *_), before in zip(weights, exact, start, strict=True):
        way = (right - before.double()).norm()
        assert (weight.double() - right).norm() <= 1e-4 * way + 1e-6 * right.norm()


def _adamw_step(
    weight: Tensor, mean: Tensor, square: Tensor, grad: Tensor, step: int, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    rate = float(torch.tensor(1e-3))
    mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
    weight = weight * (1 - rate * decay)
    root = (square / (1 - 0.999**step)).sqrt() + 1e-8
    return weight - rate * mean / (1 - 0.9**step) / root, mean, square


def coasting(where: Where, size: float) -> None:
    """Steps without a gradient: moments of any size, nothing among them."""
    from oelm.speed import adamw as fast_adamw

    group = {"betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}
    weight, mean = torch.randn(100, device=where.device), torch.randn(100, device=where.device) * size
    square = mean**2 * torch.rand(100, device=where.device)
    mean[:7] = square[:7] = 0.0
    exact = [x.double() for x in (weight, mean, square)]
    rates = [1e-3 * (n + 1) for n in range(16)]
    for n, rate in enumerate(rates, 8):
        exact[1], exact[2] = 0.9 * exact[1], 0.999 * exact[2]
        root = (exact[2] / (1 - 0.999**n)).sqrt() + 1e-8
        exact[0] = exact[0] * (1 - rate * 0.1) - rate * exact[1] / (1 - 0.9**n) / root
    steps = fast_adamw.coefficients(rates, 7, group).to(where.device)
    counter = torch.tensor(7.0 + len(rates), device=where.device)
    adamw_triton.coast_(weight, mean, square, steps, counter, 7, 0.9, 0.999, 1e-8)
    for ours, right in zip((weight, mean, square), exact, strict=True):
        assert ours.isfinite().all() and (ours.double() - right).norm() <= 1e-5 * right.norm() + 1e-30


def looked_up(where: Where, size: float, words: int, count: int) -> None:
    """The gradient of an embedding's rows: words that are rare, that are all tokens, and that are none."""
    width = 40 if where.device == "cpu" else 512
    ids = torch.randint(0, words, (1, count), device=where.device)
    ids[:, : count // 2] = words - 1
    grad = torch.randn(1, count, width, device=where.device) * size
    found = row_sums(grad.flatten(0, 1), ids.flatten(), words + 3)
    exact = torch.zeros(words + 3, width, device=where.device, dtype=torch.float64)
    exact.index_add_(0, ids.flatten(), grad.flatten(0, 1).double())
    assert not found[words:].any()
    assert (found.double() - exact).norm() <= 1e-5 * exact.norm() + 1e-30
    assert torch.equal(found, row_sums(grad.flatten(0, 1), ids.flatten(), words + 3))
