"""The language-model head and its loss, a chunk of rows at a time.

The logits of a batch, tokens x vocabulary, are its largest tensor by far: 65,536 tokens and 50,257 words make
6.6 GB in bf16, and twice that again for the softmax in fp32, kept until the backward pass. Here they exist
for one chunk at a time: the forward pass computes its logits, its losses and its share of both gradients, and
the backward pass only scales the gradients.

Inside, the vocabulary is padded to a multiple of 64, because a GPU multiplies unaligned matrices slowly. The
padding has probability 0 and does not appear in parameters, gradients or checkpoints.

Shapes in comments: N rows, C = d_model, V words, P = V padded, n rows of a chunk.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.errors import UserError

IGNORE_INDEX = -100
ALIGNMENT = 64
# Logits in a chunk: on a GPU enough to keep it busy, on a CPU few enough for its caches, but enough rows that
# adding up weight gradients does not dominate.
CHUNK_LOGITS = {"cuda": 1 << 30, "cpu": 1 << 21}
SMALLEST_CHUNK = 128
NO_AUTOCAST = "meta"  # the device for counting sizes and operations, which has no autocast
# Most probabilities are below fp16's normal numbers; this factor lifts them. Sums are fp32 and cannot
# overflow.
FP16_GAIN = 1024.0


def no_kernel(hidden: Tensor, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    return None


# Returns a kernel for a chunk's losses (and its gradient, in place of its logits); set by the fast path.
kernel_for: Callable[[Tensor, torch.dtype], Callable[..., Tensor] | None] = no_kernel


def lm_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The cross-entropy of the logits `hidden @ weight.T` (N, V) against targets (N,), summed over the rows.

    Rows whose target is -100 are ignored. Products are computed in the dtype of autocast or else of `hidden`;
    softmax, sums and the loss in at least float32. `chunk` is the number of rows at a time, by default one
    that suits the device. The loss can be differentiated once.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedLoss.apply(hidden, weight, targets, chunk, label_smoothing)
    return lm_losses(hidden, weight, targets, chunk=chunk, label_smoothing=label_smoothing).sum()


@torch.no_grad()
def lm_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each row (N,), 0 for an ignored row; `lm_loss` is their sum. Without gradient."""
    return _in_chunks(hidden, weight, targets, chunk, label_smoothing, [False, False])[0]


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """The loss of a batch, hidden (B, T, C) and targets (B, T). "mean" divides the sum by `num_items` or by
    the number of targets that are not ignored; "none" gives the loss of every position, without gradient."""
    rows, targets = hidden.flatten(0, 1), targets.to(hidden.device)
    if reduction == "none":
        return lm_losses(rows, weight, targets.flatten(), label_smoothing=label_smoothing).view_as(targets)
    loss = lm_loss(rows, weight, targets.flatten(), label_smoothing=label_smoothing)
    if reduction == "sum":
        return loss
    if reduction != "mean":
        raise UserError(f'a loss is reduced by "mean", "sum" or "none", not {reduction!r}')
    if num_items is None:
        num_items = (targets != IGNORE_INDEX).sum().clamp(min=1)
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


def shifted(labels: Tensor) -> Tensor:
    """The label that follows every position, (B, T); IGNORE_INDEX after the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, smoothing: float
    ) -> Tensor:
        wanted = list(ctx.needs_input_grad[:2])
        losses, *grads, ctx.gain = _in_chunks(hidden, weight, targets, chunk, smoothing, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad / ctx.gain
        grads: list[Tensor | None] = [
            None if value is None else torch.mul(value, scale, out=torch.empty_like(value, dtype=dtype))
            for value, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None)


def _in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, smoothing: float, wanted: list[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """The loss of every row (N,), 0 for ignored rows; the gradients of their sum with respect to hidden and
    weight, where `wanted`, times a gain; and that gain."""
    dtype = _product_dtype(hidden)
    wide, rows = _wide(dtype), chunk or _rows(hidden, weight)
    # Only CUDA multiplies two narrow matrices into a wide one; elsewhere the factors are widened.
    narrow = dtype if hidden.is_cuda or not any(wanted) else wide
    gain = FP16_GAIN if narrow == torch.float16 else 1.0
    grad_hidden = grad_weight = None
    kind = hidden.device.type
    with nullcontext() if kind == NO_AUTOCAST else torch.autocast(kind, enabled=False):
        fused = kernel_for(hidden, dtype) if dtype == narrow else None
        kept, x = targets != IGNORE_INDEX, hidden.detach().to(dtype)
        if any(wanted):  # ignored rows may hold NaN, which must not reach the weight's gradient
            x = x.masked_fill(~kept[:, None], 0)
        targets = targets.contiguous() if fused else targets.masked_fill(~kept, 0)
        padded, vocab = _padded(weight, dtype), len(weight)
        losses = x.new_zeros(len(x), dtype=wide)
        if wanted[0]:
            grad_hidden, weight_factor = torch.empty_like(x, dtype=wide), padded.to(narrow)
        if wanted[1]:
            grad_weight, x_factor = torch.zeros_like(padded, dtype=wide), x.to(narrow)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            grad = x[part] @ padded.t()  # first the logits (n, P), then their gradient
            if fused:
                losses[part] = fused(grad, targets[part], vocab, smoothing, gain, IGNORE_INDEX, any(wanted))
            else:
                grad[:, vocab:] = -torch.inf  # so that the padding has probability 0
                into = narrow if any(wanted) else None
                losses[part], grad = _losses_and_gradient(grad, targets[part], vocab, smoothing, into, gain)
            if grad_hidden is not None:
                _multiply(grad, weight_factor, grad_hidden[part], add=False)
            if grad_weight is not None:
                _multiply(grad.t(), x_factor[part], grad_weight, add=True)
        if not fused:
            losses = losses.masked_fill(~kept, 0)
            grad_hidden = None if grad_hidden is None else grad_hidden.masked_fill_(~kept[:, None], 0)
    return losses, grad_hidden, None if grad_weight is None else grad_weight[:vocab], gain


def _losses_and_gradient(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, narrow: torch.dtype | None, gain: float
) -> tuple[Tensor, Tensor]:
    """The loss of every row of a chunk (n,), and `gain` times its gradient with respect to the logits (n, P),
    unless `narrow` is None. The gradient of the padding does not matter: it is multiplied by rows of zeros
    and dropped."""
    logp = torch.log_softmax(logits, 1, dtype=_wide(logits.dtype))  # (n, P)
    # Cut to the vocabulary, so that a target outside it raises an error even if it is inside the padding.
    at = logp[:, :vocab].gather(1, targets[:, None])  # (n, 1)
    losses = -at[:, 0]
    if smoothing:
        losses = -(1 - smoothing) * at[:, 0] - smoothing * logp[:, :vocab].mean(1)
    if narrow is None:
        return losses, logp
    grad, at_target = logp.exp_(), at.expm1()  # p, and p - 1 without its cancellation
    if smoothing:
        grad, at_target = grad - smoothing / vocab, at_target + (smoothing - smoothing / vocab)
    if gain != 1.0:
        grad, at_target = grad * gain, at_target * gain
    return losses, grad.to(narrow).scatter_(1, targets[:, None], at_target.to(narrow))


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype` with rows of zeros below, (P, C), with at most one copy."""
    vocab, width = weight.shape
    padding = -vocab % ALIGNMENT
    if not padding:
        return weight.detach().to(dtype)
    padded = weight.new_empty(vocab + padding, width, dtype=dtype)
    padded[:vocab] = weight.detach()
    padded[vocab:] = 0
    return padded


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Write a @ b into `out`, or add it; the product of narrow factors is never rounded to their dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if kind == NO_AUTOCAST or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    # Autocast leaves float64 alone.
    return hidden.dtype if hidden.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def _rows(hidden: Tensor, weight: Tensor) -> int:
    """The number of rows of a chunk for this device, a power of two."""
    rows = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"]) // len(weight)
    return max(SMALLEST_CHUNK, 1 << (rows.bit_length() - 1) if rows else 0)
