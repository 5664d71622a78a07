"""Value-only attention: the scores are constants for the backward pass.

Queries and keys get no gradient, so only two of the five matrix products of attention's backward pass are
needed: the scores again, and their transpose with the gradient. Common attention kernels always compute the
gradients of queries and keys; the one in `value_only_triton.py` does not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.data.assemble import Packing
from oelm.speed.capabilities import runs
from oelm.speed.kernels import load_kernels
from oelm.speed.operations import kernels_allowed, packed_attention

attention_triton, value_only_triton = load_kernels("attention_triton"), load_kernels("value_only_triton")

# On a CPU `F.scaled_dot_product_attention` always computes all three gradients. Up to this length keeping the
# probabilities is faster, by a factor of 1.9 at 128 and 1.4 at 512, and takes little memory.
_KEEP_PROBABILITIES = 512


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for (..., T, D), with q and k taken as constants. The definition."""
    scores = q.detach() @ k.detach().transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def value_only_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention over (B, H, T, D) tensors whose backward pass computes the gradient of v only."""
    q, k = q.detach(), k.detach()
    if _has_kernel(v):
        return value_only_triton.value_only(q, k, v, None, causal, q.shape[-1] ** -0.5)[0]
    trains = v.requires_grad and torch.is_grad_enabled()
    exact = v.dtype in (torch.float32, torch.float64)  # in lower precision the softmax would be rounded
    if trains and exact and v.device.type == "cpu" and v.shape[-2] <= _KEEP_PROBABILITIES:
        return reference(q, k, v, causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=q.shape[-1] ** -0.5)


def packed_value_only(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """`value_only_attention`, bidirectional, over packed texts in (N, H, D) tensors."""
    q, k = q.detach(), k.detach()
    if not _has_kernel(v):
        return packed_attention(q, k, v, packing)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = value_only_triton.value_only(q, k, v, packing.bounds.contiguous(), False, q.shape[-1] ** -0.5)[0]
    return out.squeeze(0).transpose(0, 1)


def _has_kernel(v: Tensor) -> bool:
    if attention_triton is None or not kernels_allowed():
        return False
    return (
        runs("value_only", v.device)
        and v.dtype in attention_triton.DTYPES
        and v.shape[-1] <= attention_triton.MAX_HEAD_DIM
    )
