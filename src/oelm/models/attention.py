"""The reference GPT's self-attention: one packed product for q, k and v, then whichever kernel fits.

Shapes in comments: B texts, T positions, S positions seen (T plus cached), C = d_model, H heads, D = C / H.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from oelm.models.fused import FusedWeights, packed_linear, split_linear
from oelm.models.gpt_config import OelmGPTConfig
from oelm.speed.own import joint_attention, one_query_attention, run_here
from oelm.speed.packed import Packing, packed_attention, packed_value_only
from oelm.speed.value_only import value_only_attention

# Not cuDNN: with a mask its backward pass gives NaN once scores reach about 200 (seen on an H200, torch 2.11,
# cuDNN 9.19). Trained Q/K reach that, frozen orthonormal ones do not, so it would decide comparisons.
MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SelfAttention(nn.Module):
    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.layer_idx, self.kept = config.num_heads, layer_idx, FusedWeights()
        self.attention_dropout = config.attention_dropout
        self.value_only = False  # set by a method whose scores are constants for the backward pass
        self.own_kernels = False  # training turns them on where they are faster (training/fast.py)
        # The weights of q, k and v in one, while training keeps them so (training/half.py).
        self.joint: nn.Parameter | None
        self.register_parameter("joint", None)
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        rotation: Tensor | None,
        cache: Cache | None,
        packing: Packing | None,
        rows: Tensor | None = None,
        asking: Tensor | None = None,
    ) -> Tensor:
        """With `rows` (B,), counted through all texts, the result is these only; x there is `asking`."""
        dropout = self.attention_dropout if self.training else 0.0
        plain = mask is None and rotation is None and cache is None and not dropout
        own = self.own_kernels and plain and run_here(x)
        if own and rows is None and not self.value_only:
            qkv = packed_linear(x, (self.q_proj, self.k_proj, self.v_proj), self.num_heads, joint=self.joint)
            y = joint_attention(qkv.unflatten(-1, (3, self.num_heads, -1)), causal, packing)
            return self.o_proj(y.flatten(2))
        if own and asking is not None and packing is not None:
            return self._attend_once(x[0], asking[0], packing)[None]
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)) for part in self._project(x, asking)
        )  # (B, T, H, D)
        if rotation is not None:
            q, k = rotate(q, _rotation_at(rotation, rows)), rotate(k, rotation)
        if packing is not None:  # one row of texts end to end
            y = self._attend_packed(
                q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), packing, rows is not None
            )
            return self.o_proj(y.view(1, len(y), -1))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # (B, H, S, D)
        if self.value_only:
            q, k = q.detach(), k.detach()
            if mask is None and cache is None and rows is None and not dropout:
                y = value_only_attention(q, k, v, causal=causal)
                return self.o_proj(y.transpose(1, 2).flatten(2))
        if mask is not None and rows is not None:
            mask = mask.flatten(0, 2).index_select(0, rows)[:, None, None]  # (B, 1, 1, S)
        with sdpa_kernel(MASKED_KERNELS) if mask is not None and x.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, one_query: bool
    ) -> Tensor:  # (T, H, D)
        if self.value_only and not one_query:
            return packed_value_only(q, k, v, packing)
        if self.value_only:  # of one query per text there is little to leave out
            q, k = q.detach(), k.detach()
        return packed_attention(q, k, v, packing, one_query)

    def _attend_once(self, x: Tensor, asking: Tensor, packing: Packing) -> Tensor:
        """A query for every text, by our own kernels: (texts, C)."""
        parts, heads = (self.k_proj, self.v_proj), self.num_heads
        kv = packed_linear(x, parts, heads, joint=self._joint_kv(), constant=int(self.value_only))
        q = self.q_proj(asking)
        q = q.detach() if self.value_only else q
        y = one_query_attention(q.unflatten(-1, (heads, -1)), kv.unflatten(-1, (2, heads, -1)), packing)
        return self.o_proj(y.flatten(1))

    def _project(self, x: Tensor, asking: Tensor | None) -> tuple[Tensor, ...]:
        """q, k and v, (B, T, C) each; q of the rows that ask only."""
        if asking is None:  # three parameters, one product: see fused.py
            parts = (self.q_proj, self.k_proj, self.v_proj)
            return split_linear(x, parts, self.kept, self.joint, constant=2 * self.value_only)
        keys, constant = (self.k_proj, self.v_proj), int(self.value_only)
        return self.q_proj(asking), *split_linear(x, keys, joint=self._joint_kv(), constant=constant)

    def _joint_kv(self) -> Tensor | None:
        return None if self.joint is None else self.joint[self.q_proj.out_features :]


def rotation_of(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every position's angles, stacked: (2, B, T, 1, D/2), float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions[:, :, None, None].float() * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def _rotation_at(rotation: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return rotation
    found = rotation.flatten(1, 2).index_select(1, rows)
    return found.view(2, rotation.shape[1], -1, 1, rotation.shape[-1])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle. Lengths, and so orthonormality, stay."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attention_mask_of(valid: Tensor, queries: int, causal: bool) -> Tensor:
    """Who may look at whom, (B, 1, T, S), from which of the S positions are text (B, S).

    A padded query may look at itself: with nothing to look at its softmax would be NaN, and the NaN
    would reach real tokens through the next layer.
    """
    seen = valid.shape[1]
    query = torch.arange(seen - queries, seen, device=valid.device)[:, None]
    key = torch.arange(seen, device=valid.device)[None, :]
    mask = valid[:, None, None, :].bool()
    if causal:
        mask = mask & (key <= query)
    return mask | (key == query)
