"""How right attention and its gradients are where scores are huge, on a GPU: our packed kernel, PyTorch's
packed one (flash), and its kernels for masks (memory-efficient, and plain operations), against float64.

    python benchmarks/large_scores.py > benchmarks/h200-large-scores.md

16 texts of 50 tokens, 8 heads of 64, bf16; the standard deviation of the scores is a quarter of `size`. A
cell is the relative error of a tensor and, in brackets, its norm over the right one.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oelm.data.assemble import Packing
from oelm.speed import operations
from oelm.training.folder import environment

TEXTS, LENGTH, HEADS, DIM = 16, 50, 8, 64
SIZES = (1e1, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
DEVICE = torch.device("cuda")


def rows(x: Tensor) -> Tensor:
    """Texts end to end: (N, H, L, D) as (N L, H, D)."""
    return x.transpose(1, 2).reshape(TEXTS * LENGTH, HEADS, DIM)


def texts(x: Tensor) -> Tensor:
    return x.reshape(TEXTS, LENGTH, HEADS, DIM).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    out = (q @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1) @ v
    return [out, *torch.autograd.grad(out, (q, k, v), grad.double())]


def arms(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, list[Tensor]]:
    """The output and the gradients of q, k and v by each kernel."""
    from oelm.speed.kernels import joint_triton  # needs Triton

    bounds = torch.arange(0, (TEXTS + 1) * LENGTH, LENGTH, dtype=torch.int32, device=DEVICE)
    joint = torch.stack([rows(x) for x in (q, k, v)], 1)[None].contiguous().requires_grad_()
    out = joint_triton.forward(joint, bounds, False, DIM**-0.5)[0]
    (grads,) = torch.autograd.grad(out, joint, rows(grad)[None])
    found = {"ours": [texts(out[0]), *(texts(grads[0, :, i]) for i in range(3))]}
    parts = [rows(x).detach().requires_grad_() for x in (q, k, v)]
    out = operations.packed_attention(*parts, Packing(bounds, LENGTH))
    found["flash"] = [texts(x) for x in (out, *torch.autograd.grad(out, parts, rows(grad)))]
    mask = torch.ones(TEXTS, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE)
    for name, kind in (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH)):
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel([kind]):
            out = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        found[name] = [out, *torch.autograd.grad(out, parts, grad)]
    return found


def cell(found: Tensor, right: Tensor) -> str:
    norm = max(float(right.detach().norm()), 1e-30)
    error = float((found.double() - right).detach().norm()) / norm
    return f"{error:.1e} ({float(found.detach().double().norm()) / norm:.2g})"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    about = environment(DEVICE, 1)
    print(f"{about['gpu']}, commit {about.get('commit')}: `python benchmarks/large_scores.py`\n")
    print("| size | kernel | output | dq | dk | dv |\n|---|---|---|---|---|---|")
    torch.manual_seed(0)
    for size in SIZES:
        scale = (size / 4) ** 0.5
        shape = (TEXTS, HEADS, LENGTH, DIM)
        q, k = ((torch.randn(shape, device=DEVICE) * scale).bfloat16() for _ in range(2))
        v, grad = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
        right = exact(q, k, v, grad)
        for name, found in arms(q, k, v, grad).items():
            cells = [cell(a, b) for a, b in zip(found, right, strict=True)]
            print(f"| {size:.0e} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
