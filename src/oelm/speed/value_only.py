"""Value-only attention: for the backward pass the scores are constants.

Queries and keys get no gradient, so of the five matrix products of attention's backward pass two are
left: the scores once more, and their transpose with the gradient. Common attention kernels compute the
gradients of queries and keys whether or not anyone wants them; the one in `value_only_triton.py` does not.

`reference` and `reference_varlen` say what is computed. The others compute the same, faster.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.errors import UserError
from oelm.speed.operations import kernels_allowed

try:
    from oelm.speed.kernels import attention_triton, value_only_triton
except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
    value_only_triton = None  # type: ignore[assignment]

Implementation = Literal["auto", "triton", "torch"]

# On a CPU `F.scaled_dot_product_attention` computes all three gradients, whatever is asked for. Up to this
# length keeping the probabilities is faster, by 1.9 at 128 and 1.4 at 512, and takes memory one can spare.
_KEEP_PROBABILITIES = 512


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v for (..., T, D), with q and k taken as constants. The definition."""
    scores = q.detach() @ k.detach().transpose(-2, -1) * _scale(q, scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """The definition for texts end to end, (N, H, D): each attends to itself. Rows of no text give zeros."""
    return _each_text(reference, q, k, v, cu_seqlens, causal, scale)


def value_only_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attention over (B, H, T, D) tensors of any strides whose backward pass computes the gradient of v only.

    `scale` multiplies the scores; it is 1/sqrt(D) unless given.
    """
    if q.dim() != 4:
        raise UserError(f"value_only_attention takes (B, H, T, D), not {tuple(q.shape)}")
    scale = _checked(q, k, v, scale)
    if _use_triton(v, implementation):
        return value_only_triton.forward(q.detach(), k.detach(), v, None, causal, scale)[0]
    return _portable(q, k, v, causal=causal, scale=scale)


def value_only_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """`value_only_attention` over texts that lie end to end in (N, H, D) tensors, each attending to itself.

    Text s is rows cu_seqlens[s] to cu_seqlens[s + 1]; cu_seqlens is int32 and starts with 0. Texts of length
    zero are allowed, and rows after the last text give zeros, so that shapes can be fixed beforehand. Where
    the kernel runs, nothing waits for the device.
    """
    if q.dim() != 3:
        raise UserError(f"value_only_attention_varlen takes (N, H, D), not {tuple(q.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.device != q.device:
        raise UserError(
            f"cu_seqlens must be a vector of int32 on {q.device}, "
            f"not {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype} on {cu_seqlens.device}"
        )
    scale = _checked(q, k, v, scale)
    if _use_triton(v, implementation):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q.detach(), k.detach(), v))
        out = value_only_triton.forward(q, k, v, cu_seqlens.contiguous(), causal, scale)[0]
        return out.squeeze(0).transpose(0, 1)
    return _each_text(_portable, q, k, v, cu_seqlens, causal, scale)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _checked(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """The scale to use, once the inputs are known to fit each other."""
    if not q.shape == k.shape == v.shape:
        raise UserError(
            f"q, k and v must have one shape: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UserError(f"q, k and v must have one dtype and one device: {kinds}")
    scale = _scale(q, scale)
    if not scale > 0:
        raise UserError(f"scale must be positive, not {scale}")
    return scale


def _use_triton(v: Tensor, implementation: Implementation) -> bool:
    if implementation == "torch":
        return False
    if implementation not in ("auto", "triton"):
        raise UserError(f"implementation must be 'auto', 'triton' or 'torch', not {implementation!r}")
    why_not = _why_not_triton(v)
    if implementation == "triton" and why_not:
        raise UserError(f"the Triton kernel cannot run: {why_not}; use implementation='auto'")
    return not why_not


def _why_not_triton(v: Tensor) -> str:
    if value_only_triton is None:
        return "Triton is not installed"
    if not kernels_allowed():
        return "this run takes the plain path"
    if not v.is_cuda and not attention_triton.INTERPRETED:
        return f"it needs a GPU, and the tensors are on {v.device}"
    if v.dtype not in attention_triton.DTYPES:
        return f"it does not take {v.dtype}"
    if v.shape[-1] > attention_triton.MAX_HEAD_DIM:
        return f"head_dim is {v.shape[-1]}, and it goes to {attention_triton.MAX_HEAD_DIM}"
    return ""


def _portable(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    trains = v.requires_grad and torch.is_grad_enabled()
    exact = v.dtype in (torch.float32, torch.float64)  # below that, the softmax itself would be rounded
    if trains and exact and v.device.type == "cpu" and v.shape[-2] <= _KEEP_PROBABILITIES:
        return reference(q, k, v, causal=causal, scale=scale)
    return F.scaled_dot_product_attention(q.detach(), k.detach(), v, is_causal=causal, scale=scale)


def _each_text(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float | None,
) -> Tensor:
    bounds = cu_seqlens.tolist()
    outputs = []
    for begin, end in pairwise(bounds):
        text = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))  # (1, H, T, D)
        outputs.append(attention(*text, causal=causal, scale=scale)[0].transpose(0, 1))
    return torch.cat([*outputs, torch.zeros_like(v[bounds[-1] :])])
