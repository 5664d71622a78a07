"""The language-model head and its loss, a chunk of rows at a time.

The logits of a batch, tokens x vocabulary, are its largest tensor by far: 65,536 tokens and 50,257 words make
6.6 GB in bf16, and twice that again for the softmax in fp32, kept until the backward pass. Here they exist
for one chunk only: its logits, its losses and at once its share of both gradients, so that the backward pass
has only to scale what is there.

Inside, the vocabulary is padded to a multiple of 64, because a GPU multiplies unaligned matrices slowly. The
padding has no probability, and no parameter, gradient or checkpoint knows of it.

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
# Logits in a chunk. On a GPU enough to keep all of it busy, on a CPU few enough for its caches, but not so
# few rows that adding up their weight gradients takes the time.
CHUNK_LOGITS = {"cuda": 1 << 30, "cpu": 1 << 21}
SMALLEST_CHUNK = 128
NO_AUTOCAST = "meta"  # the device on which sizes and operations are counted
# Most probabilities lie below fp16's normal numbers; times this they do not. Sums are fp32: none overflows.
FP16_GAIN = 1024.0


def no_kernel(hidden: Tensor, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    return None


# Gives a kernel for a chunk's losses (and gradient, in place of its logits); the fast path puts its own here.
kernel_for: Callable[[Tensor, torch.dtype], Callable[..., Tensor] | None] = no_kernel


def lm_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of the logits `hidden @ weight.T` (N, V) against targets (N,), summed over the rows.

    Rows whose target is `ignore_index` do not count. The products are made in the dtype of autocast, else in
    that of `hidden`; softmax, sums and the loss are in float32 at least. `chunk` is the number of rows at a
    time; left out, it suits the device. The loss can be differentiated once.
    """
    rows = _check(hidden, weight, targets, chunk)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        dtype = _product_dtype(hidden)
        return _ChunkedLoss.apply(hidden, weight, targets, dtype, rows, ignore_index, label_smoothing)
    losses = lm_losses(
        hidden, weight, targets, chunk=rows, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return losses.sum()


@torch.no_grad()
def lm_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
) -> Tensor:
    """What `lm_loss` sums, row by row (N,), 0 where a row does not count. It has no gradient."""
    rows = _check(hidden, weight, targets, chunk)
    dtype = _product_dtype(hidden)
    with _no_autocast(hidden.device.type):
        fused, kept, x = kernel_for(hidden, dtype), targets != ignore_index, hidden.to(dtype)
        targets = targets.contiguous() if fused else targets.masked_fill(~kept, 0)
        padded, vocab = _padded(weight, dtype), len(weight)
        losses = x.new_zeros(len(x), dtype=_wide(dtype))
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = x[part] @ padded.t()  # (n, P)
            if fused:
                losses[part] = fused(logits, targets[part], vocab, label_smoothing, 1.0, ignore_index, False)
            else:
                losses[part] = _losses(_cut(logits, vocab), targets[part], vocab, label_smoothing)
        return losses if fused else losses.masked_fill(~kept, 0)


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """The loss of a batch, hidden (texts, positions, C) and targets (texts, positions).

    "mean" divides the sum by `num_items`, or by the number of targets that count; "none" keeps one loss for
    every position, without gradient.
    """
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
    """What follows every position (texts, positions); nothing follows the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        rows: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # Only CUDA multiplies two narrow matrices into a wide one; elsewhere the factors are widened.
        wide = _wide(dtype)
        narrow = dtype if hidden.is_cuda else wide
        gain = FP16_GAIN if narrow == torch.float16 else 1.0
        with _no_autocast(hidden.device.type):
            fused = kernel_for(hidden, dtype) if dtype == narrow else None
            kept = targets != ignore_index
            # Rows that do not count may hold anything: zeros keep it out of the weight's gradient.
            x = hidden.detach().to(dtype).masked_fill(~kept[:, None], 0)
            targets = targets.contiguous() if fused else targets.masked_fill(~kept, 0)
            padded, vocab = _padded(weight, dtype), len(weight)
            x_factor, weight_factor = x.to(narrow), padded.to(narrow)
            losses = x.new_zeros(len(x), dtype=wide)
            grad_hidden = torch.empty_like(x, dtype=wide) if wants_hidden else None
            grad_weight = torch.zeros_like(padded, dtype=wide) if wants_weight else None
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                grad = x[part] @ padded.t()  # the logits (n, P), as yet
                if fused:
                    losses[part] = fused(grad, targets[part], vocab, smoothing, gain, ignore_index, True)
                else:
                    losses[part], grad = _losses_and_gradient(
                        _cut(grad, vocab), targets[part], vocab, smoothing, narrow, gain
                    )
                if grad_hidden is not None:
                    _multiply(grad, weight_factor, grad_hidden[part], add=False)
                if grad_weight is not None:
                    _multiply(grad.t(), x_factor[part], grad_weight, add=True)
            if not fused:
                losses = losses.masked_fill(~kept, 0)
                grad_hidden = None if grad_hidden is None else grad_hidden.masked_fill_(~kept[:, None], 0)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[:vocab])
        ctx.gain, ctx.dtypes = gain, (hidden.dtype, weight.dtype)
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad / ctx.gain
        grads: list[Tensor | None] = [
            None if value is None else torch.mul(value, scale, out=torch.empty_like(value, dtype=dtype))
            for value, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None)


def _losses(logits: Tensor, targets: Tensor, vocab: int, smoothing: float) -> Tensor:
    """The loss of every row of a chunk (n,)."""
    logp = torch.log_softmax(logits, 1, dtype=_wide(logits.dtype))  # (n, P)
    return _losses_of(logp, _at(logp, targets, vocab), vocab, smoothing)


def _losses_and_gradient(
    logits: Tensor, targets: Tensor, vocab: int, smoothing: float, narrow: torch.dtype, gain: float
) -> tuple[Tensor, Tensor]:
    """The loss of every row of a chunk (n,), and `gain` times its gradient with respect to the logits (n, P).

    The padding's gradient is of no account: it meets rows of zeros, and is dropped.
    """
    logp = torch.log_softmax(logits, 1, dtype=_wide(logits.dtype))  # (n, P)
    at = _at(logp, targets, vocab)
    losses = _losses_of(logp, at, vocab, smoothing)
    grad, at_target = logp.exp_(), at.expm1()  # p, and p - 1 without its cancellation
    if smoothing:
        grad, at_target = grad - smoothing / vocab, at_target + (smoothing - smoothing / vocab)
    if gain != 1.0:
        grad, at_target = grad * gain, at_target * gain
    return losses, grad.to(narrow).scatter_(1, targets[:, None], at_target.to(narrow))


def _at(logp: Tensor, targets: Tensor, vocab: int) -> Tensor:
    # Cut to the vocabulary, so that a target outside it raises even where the padding has a place for it.
    return logp[:, :vocab].gather(1, targets[:, None])  # (n, 1)


def _losses_of(logp: Tensor, at: Tensor, vocab: int, smoothing: float) -> Tensor:
    if not smoothing:
        return -at[:, 0]
    return -(1 - smoothing) * at[:, 0] - smoothing * logp[:, :vocab].mean(1)


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype` with rows of zeros below, (P, C): one copy, or none where none is needed."""
    vocab, width = weight.shape
    padding = -vocab % ALIGNMENT
    if not padding:
        return weight.detach().to(dtype)
    padded = weight.new_empty(vocab + padding, width, dtype=dtype)
    padded[:vocab] = weight.detach()
    padded[vocab:] = 0
    return padded


def _cut(logits: Tensor, vocab: int) -> Tensor:
    logits[:, vocab:] = -torch.inf  # the padding has no probability
    return logits


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """a @ b into `out`, or added to what is there; of narrow factors without a narrow product in between."""
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


def _no_autocast(kind: str) -> Any:
    return nullcontext() if kind == NO_AUTOCAST else torch.autocast(kind, enabled=False)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> int:
    """Refuse what does not fit together; the number of rows at a time."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"the loss wants hidden (rows, d_model) and weight (vocabulary, d_model), "
            f"not {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise UserError(f"{len(hidden)} rows want as many targets, not {tuple(targets.shape)}")
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk is a number of rows, at least 1, not {chunk}")
    if chunk is not None:
        return chunk
    rows = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"]) // len(weight)
    return max(SMALLEST_CHUNK, 1 << (rows.bit_length() - 1) if rows else 0)
