"""Operations of a block and of an embedding by kernels of our own, on hardware where they were measured.

Their results are defined by `portable` and `F.scaled_dot_product_attention`, by `F.layer_norm` of a sum, and
by `F.embedding`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.assemble import Packing
from oelm.models import gpt_block
from oelm.speed.capabilities import runs
from oelm.speed.kernels import load_kernels
from oelm.system.private_torch import varlen_attn

attention_triton = load_kernels("attention_triton")
cross_entropy_triton = load_kernels("cross_entropy_triton")
heads_triton = load_kernels("heads_triton")
joint_triton = load_kernels("joint_triton")
norm_triton = load_kernels("norm_triton")
rotary_triton = load_kernels("rotary_triton")
rows_triton = load_kernels("rows_triton")

# On an H200 attention takes 0.52 to 0.72 of the time of PyTorch's flash attention (benchmarks/kernels.json).
# cuDNN's cannot take packed texts; with texts of 512 tokens it takes longer than ours, but for classifiers at
# 2,048 only 0.87 of our time, and for language models at 4,096 0.94. Other GPUs: capabilities.py.

# Tokens of a text up to which our kernels use a separate random number for each attention weight's dropout.
LONGEST_DROPPED = 0 if attention_triton is None else attention_triton.LONGEST_DROPPED

_allowed = True


def kernels_allowed() -> bool:
    return _allowed


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """A context in which no kernel of our own runs."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def have_kernels(device: torch.device, dtype: torch.dtype, d_model: int, heads: int) -> bool:
    """Whether attention and norms of this size can be computed by our kernels on this device."""
    fits = norm_triton is not None and d_model <= norm_triton.MAX_WIDTH
    return fits and runs("norm", device) and have_attention(device, dtype, d_model // heads)


def have_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention of heads of this size can be computed by our kernels on this device."""
    if attention_triton is None or head_dim > attention_triton.MAX_HEAD_DIM or not runs("attention", device):
        return False
    return attention_triton.INTERPRETED or dtype in (torch.bfloat16, torch.float16)


def run_here(x: Tensor) -> bool:
    """Whether the kernels can run on this tensor: a trained model may have moved to another device."""
    return kernels_allowed() and (x.is_cuda or attention_triton.INTERPRETED)


def joint_attention(qkv: Tensor, causal: bool, packing: Packing | None) -> Tensor:
    """Attention of q, k and v in one tensor (B, T, 3, H, D), perhaps of packed texts: (B, T, H, D)."""
    bounds = None if packing is None else packing.bounds.contiguous()
    # Without gradients the kernel is called directly, as a PyTorch operation takes twice the CPU time.
    forward = joint_triton.forward if torch.is_grad_enabled() else joint_triton.launch
    return forward(qkv, bounds, causal, qkv.shape[-1] ** -0.5)[0]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, one_query: bool = False) -> Tensor:
    """Bidirectional attention over (N, H, D) tensors, by flash attention if the device and dtype support it.
    `one_query`: q is (texts, H, D), one query per text; texts without tokens give zeros."""
    if varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        bounds, longest = packing
        queries, most = bounds, longest
        if one_query:
            queries, most = torch.arange(len(bounds), dtype=torch.int32, device=q.device), 1
        out = varlen_attn(q, k, v, queries, bounds, most, longest)
        assert isinstance(out, Tensor)
        return out
    return portable(q, k, v, packing, one_query)


def heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention over (1, H, N, D) tensors of packed texts; the result has the same shape. With `dropout`, the
    integer `seed` on the device decides what is dropped; with `window` a token sees others up to that
    distance."""
    if attention_triton is not None and run_here(q):
        dropout = 0.0 if seed is None else dropout
        return heads_triton.forward(
            q, k, v, packing.bounds.contiguous(), seed, causal, scale, dropout, window
        )[0]
    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (N, H, D)
    out = portable(q, k, v, packing, causal=causal, scale=scale, dropout=dropout, window=window)
    return out.transpose(0, 1)[None]


def portable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    one_query: bool = False,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Packed attention by padding and `F.scaled_dot_product_attention`: the definition, for any device."""
    starts, ends = packing.bounds[:-1].long(), packing.bounds[1:].long()
    token_of = starts[:, None] + torch.arange(packing.longest, device=q.device)  # (S, T)
    real = token_of < ends[:, None]
    token_of = token_of.clamp(max=len(k) - 1).flatten()

    def widen(x: Tensor) -> Tensor:  # not by indexing, whose backward pass is slow
        return x.index_select(0, token_of).unflatten(0, real.shape).transpose(1, 2)  # (S, H, T, D)

    if one_query:
        some = real.any(1)
        mask = (real | ~some[:, None])[:, None, None]
        out = F.scaled_dot_product_attention(q[:, :, None], widen(k), widen(v), attn_mask=mask)[:, :, 0]
        return out * some[:, None, None]
    visible = real[:, None, :]
    if causal or window:
        distance = torch.arange(packing.longest, device=q.device)
        distance = distance[:, None] - distance  # of a query from a key before it
        visible = visible & (distance >= 0 if causal else distance.abs() <= window)
    # A row of padding attends to everything, as without any key its softmax would be NaN.
    mask = (visible | ~real[:, :, None])[:, None]
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "scale": scale}
    out = F.scaled_dot_product_attention(widen(q), widen(k), widen(v), **options).transpose(1, 2)
    token = torch.arange(len(q), device=q.device)
    text = torch.searchsorted(ends, token, right=True)
    return out.flatten(0, 1).index_select(0, text * packing.longest + token - starts[text])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """`gpt_block.rotate`, bit for bit."""
    if rotary_triton is None or x.dtype not in rotary_triton.DTYPES:
        return gpt_block.rotate(x, rotation)
    if not (runs("rotary", x.device) and run_here(x)):
        return gpt_block.rotate(x, rotation)
    trains = x.requires_grad and torch.is_grad_enabled()
    return rotary_triton.Rotation.apply(x, rotation) if trains else rotary_triton.launch(x, rotation)


def add_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x + residual, LayerNorm of that sum in autocast's dtype); of the sum only `rows`, if given:
    (B, rows / B, C)."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    forward = norm_triton.add_norm if torch.is_grad_enabled() else norm_triton.launch
    total, out, *_, picked = forward(x, residual, norm.weight, norm.bias, norm.eps, dtype, rows)
    return total if rows is None else picked.view(x.shape[0], -1, x.shape[2]), out


def cross_entropy_for(hidden: Tensor, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The kernel for a chunk of the language model's loss (`models.lm_loss.kernel_for`), or None. Without it,
    the passes over the logits take a GPU as long as the products."""
    if cross_entropy_triton is None or dtype == torch.float64 or not kernels_allowed():
        return None
    return cross_entropy_triton.cross_entropy_ if runs("cross_entropy", hidden.device) else None


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of (B, T, C), counted through all texts, as (B, rows / B, C)."""
    return x.flatten(0, 1).index_select(0, rows).view(x.shape[0], -1, x.shape[2])


def mean_packed(x: Tensor, bounds: Tensor) -> Tensor:
    """The mean of each text's rows of (N, C); 0 for texts without tokens."""
    text = torch.searchsorted(bounds[1:], torch.arange(len(x), device=x.device), right=True)
    sums = x.new_zeros(len(bounds) - 1, x.shape[1], dtype=torch.float32).index_add(0, text, x.float())
    return (sums / bounds.diff().clamp(min=1)[:, None]).to(x.dtype)


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The embedding of every id. Its gradient is summed in a fixed order, so that the same inputs give the
    same bits, without the sorting of PyTorch's deterministic gradient."""
    trains = weight.requires_grad and torch.is_grad_enabled()
    can = weight.is_cuda and rows_triton is not None and runs("rows", weight.device)
    if trains and can and kernels_allowed():
        return Lookup.apply(weight, ids)
    return F.embedding(ids, weight)


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return rows_triton.row_sums(grad.flatten(0, -2), ids.flatten(), ctx.rows), None
