"""Our own kernels for a block, where the hardware is one they were measured on. What they compute is defined
by `packed.portable` and `F.scaled_dot_product_attention`, by `F.layer_norm` of a sum, and by `F.gelu`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.models.fused import as_autocast
from oelm.speed.gelu import gelu_value
from oelm.speed.packed import Packing
from oelm.speed.plain import kernels_allowed

try:
    from oelm.speed.kernels import attention_triton, gelu_triton, joint_triton, norm_triton, one_query_triton
except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
    attention_triton = gelu_triton = joint_triton = norm_triton = one_query_triton = None  # type: ignore[assignment]

# On an H200 attention takes 0.52 to 0.72 of the time of PyTorch's flash attention (benchmarks/kernels.json).
# cuDNN's knows no texts end to end; where all have 512 tokens it takes longer, but for classifiers at 2,048
# only 0.87 of ours, and for language models at 4,096 0.94. Elsewhere nobody has looked.
MEASURED = 9  # compute capability, the major number


def have_own_kernels(device: torch.device, dtype: torch.dtype, d_model: int, heads: int) -> bool:
    if attention_triton is None:
        return False
    if d_model // heads > attention_triton.MAX_HEAD_DIM or d_model > norm_triton.MAX_WIDTH:
        return False
    if attention_triton.INTERPRETED:
        return True
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device)[0] == MEASURED


def run_here(x: Tensor) -> bool:
    """Whether kernels that were switched on can run on this tensor: a trained model may have moved."""
    return kernels_allowed() and (x.is_cuda or attention_triton.INTERPRETED)


def joint_attention(qkv: Tensor, causal: bool, packing: Packing | None) -> Tensor:
    """Attention of (B, T, 3, H, D), of texts end to end if `packing` says so: (B, T, H, D)."""
    bounds = None if packing is None else packing.bounds.contiguous()
    return joint_triton.forward(qkv, bounds, causal, qkv.shape[-1] ** -0.5)[0]


def one_query_attention(q: Tensor, kv: Tensor, packing: Packing) -> Tensor:
    """A query for every text, (texts, H, D), on keys and values end to end, (N, 2, H, D)."""
    return one_query_triton.forward(q, kv, packing.bounds.contiguous(), q.shape[-1] ** -0.5)[0]


def add_norm(x: Tensor, late: Tensor, norm: nn.LayerNorm, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + late, or these rows of it, (B, rows / B, C); and its LayerNorm, as wide as autocast's products."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    total, out, *_, picked = norm_triton.add_norm(x, late, norm.weight, norm.bias, norm.eps, dtype, rows)
    return total if rows is None else picked.view(x.shape[0], -1, x.shape[2]), out


def is_plain(linear: nn.Module) -> bool:
    """Whether computing with the weights is all that calling it does: an adapter or a hook must be called."""
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    return _LinearGelu.apply(*as_autocast(x, linear.weight, linear.bias))


class _LinearGelu(torch.autograd.Function):
    """One pass over the gradient before GELU also gives that of the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, product)
        return gelu_value(product)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, product = ctx.saved_tensors
        grad, sums = gelu_triton.gelu_backward(product, grad)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, sums.to(weight.dtype) if ctx.needs_input_grad[2] else None
