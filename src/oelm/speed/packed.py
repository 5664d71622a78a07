"""Attention over texts that lie end to end, each attending to itself: no padding is ever computed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.data.assemble import Packing
from oelm.system.private_torch import varlen_attn


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, one_query: bool = False) -> Tensor:
    """Bidirectional attention over (N, H, D) tensors. Flash attention where the device and dtype have it.
    `one_query`: q is (texts, H, D), a query for every text. That of a text without tokens gives zeros."""
    if varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        bounds, longest = packing
        queries, most = bounds, longest
        if one_query:
            queries, most = torch.arange(len(bounds), dtype=torch.int32, device=q.device), 1
        out = varlen_attn(q, k, v, queries, bounds, most, longest)
        assert isinstance(out, Tensor)
        return out
    return portable(q, k, v, packing, one_query)


def portable(q: Tensor, k: Tensor, v: Tensor, packing: Packing, one_query: bool = False) -> Tensor:
    """The same through padding and `F.scaled_dot_product_attention`: the definition, for any device."""
    starts, ends = packing.bounds[:-1].long(), packing.bounds[1:].long()
    place = starts[:, None] + torch.arange(packing.longest, device=q.device)  # (S, T)
    real = place < ends[:, None]
    place = place.clamp(max=len(k) - 1).flatten()

    def widen(x: Tensor) -> Tensor:  # not by indexing, whose backward pass is slow
        return x.index_select(0, place).unflatten(0, real.shape).transpose(1, 2)  # (S, H, T, D)

    if one_query:
        some = real.any(1)
        mask = (real | ~some[:, None])[:, None, None]
        out = F.scaled_dot_product_attention(q[:, :, None], widen(k), widen(v), attn_mask=mask)[:, :, 0]
        return out * some[:, None, None]
    # A row of padding looks at everything: with nothing to look at its softmax would be NaN.
    mask = (real[:, None, :] | ~real[:, :, None])[:, None]
    out = F.scaled_dot_product_attention(widen(q), widen(k), widen(v), attn_mask=mask).transpose(1, 2)
    token = torch.arange(len(q), device=q.device)
    text = torch.searchsorted(ends, token, right=True)
    return out.flatten(0, 1).index_select(0, text * packing.longest + token - starts[text])
