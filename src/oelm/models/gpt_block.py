"""A block of the reference GPT: self-attention, feed-forward network, residual connections. The whole model
is in gpt.py; speed/forward.py computes the same faster.

Shapes in comments: B texts, T positions, S key positions (T plus cached), C = d_model, H heads, D = C / H.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, GradientCheckpointingLayer

from oelm.models.gpt_config import OelmGPTConfig

# Not cuDNN: with a mask its backward pass gives NaN once scores reach about 200 (seen on an H200, torch 2.11,
# cuDNN 9.19). Trained Q/K reach that, frozen orthonormal ones do not, so it would decide comparisons.
MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SelfAttention(nn.Module):
    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.layer_idx = config.num_heads, layer_idx
        self.attention_dropout = config.attention_dropout
        self.value_only = False  # set by a method that sends no gradient through the scores
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None, causal: bool, rotation: Tensor | None, cache: Cache | None
    ) -> Tensor:
        heads = (self.num_heads, -1)
        q, k, v = (part(x).unflatten(-1, heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)  # (B, T, H, D)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # (B, H, S, D)
        if self.value_only:
            q, k = q.detach(), k.detach()
        y = masked_attention(q, k, v, mask, causal, self.attention_dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(config.d_model, config.d_ff)
        self.fc_out = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x)))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, causal: bool, rotation: Tensor | None, cache: Cache | None
    ) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), mask, causal, rotation, cache))
        return x + self.dropout(self.mlp(self.ln_2(x)))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """PyTorch's attention of (B, H, T, D) tensors, by kernels that handle masks correctly."""
    with sdpa_kernel(MASKED_KERNELS) if mask is not None and q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)


def rotation_of(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every position's angles, stacked: (2, B, T, 1, D/2), float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions[:, :, None, None].float() * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle, which preserves norms and
    orthonormality."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attention_mask_of(valid: Tensor, queries: int, causal: bool) -> Tensor:
    """The attention mask (B, 1, T, S), true where a query may attend, from the positions that are text (B,
    S). A padded query attends to itself: without any key its softmax would be NaN, which would reach real
    tokens through the next layer."""
    total = valid.shape[1]
    query = torch.arange(total - queries, total, device=valid.device)[:, None]
    key = torch.arange(total, device=valid.device)[None, :]
    mask = valid[:, None, None, :].bool()
    if causal:
        mask = mask & (key <= query)
    return mask | (key == query)
