"""Our own attention kernels, where the hardware is one they were measured on. `packed.portable` and
`F.scaled_dot_product_attention` define what they compute."""

import torch
from torch import Tensor

from oelm.kernels.packed import Packing

try:
    from oelm.kernels import attention_triton, joint_triton, one_query_triton
except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
    attention_triton = joint_triton = one_query_triton = None  # type: ignore[assignment]

# On an H200 they were faster than PyTorch's when tried; benchmarks/attention.py measures it, and its record
# is still to be made. Elsewhere nobody has looked.
MEASURED = 9  # compute capability, the major number


def have_own_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if attention_triton is None or head_dim > attention_triton.MAX_HEAD_DIM:
        return False
    if attention_triton.INTERPRETED:
        return True
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device)[0] == MEASURED


def joint_attention(qkv: Tensor, causal: bool, packing: Packing | None) -> Tensor:
    """Attention of (B, T, 3, H, D), of texts end to end if `packing` says so: (B, T, H, D)."""
    bounds = None if packing is None else packing.bounds.contiguous()
    return joint_triton.forward(qkv, bounds, causal, qkv.shape[-1] ** -0.5)[0]


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """A query for every text, (texts, H, D), on keys and values end to end, (N, H, D)."""
    return one_query_triton.forward(q, k, v, packing.bounds.contiguous(), q.shape[-1] ** -0.5)[0]
