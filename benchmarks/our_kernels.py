"""Our kernels and PyTorch's for the same, on one NVIDIA GPU.

    python benchmarks/our_kernels.py [--rounds 7] [--json benchmarks/kernels.json]

Shapes of training Medium-512 (512 wide, 8 heads of 64) in bf16. Every arm is recorded in a CUDA graph,
several calls of it, so that launching costs nothing; the arms take turns, and medians are compared.

Attention, forward and backward: an arm starts from the product's output, (tokens, q k v), and ends with its
gradient in the same shape: for PyTorch's kernels this takes a split and a join, as it does in a model. Texts
end to end go through `varlen_attn`; texts of one length could also be a batch for
`scaled_dot_product_attention`, so those arms are there as well. AdamW is compared with PyTorch's fused one,
all else with torch.compile.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from oelm.data.assemble import Packing
from oelm.speed.adamw import RecordableAdamW, clip_in_step
from oelm.speed.kernels.cross_entropy_triton import cross_entropy_
from oelm.speed.operations import add_norm, joint_attention
from oelm.system.files import write_json
from oelm.training.folder import environment

HEADS, HEAD_DIM, CALLS = 8, 64, 5
VOCAB, PADDED, ROWS = 50257, 50304, 16384
WIDTH, INNER, LAYERS = 512, 2048, 6
TOKENS = (640, 4352, 65536)  # of 16 pairs of sentences, of 16 reviews, of a large step
BACKENDS = {"SDPA, flash": SDPBackend.FLASH_ATTENTION, "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}

Arm = Callable[[], Any]


def lengths_of() -> dict[str, tuple[list[int], bool]]:
    """Texts of a step, and whether attention is causal."""
    rng = random.Random(0)
    reviews = [rng.randint(60, 496) for _ in range(16)]
    pairs = [rng.randint(15, 80) for _ in range(16)]
    for texts in (reviews, pairs):
        texts[-1] += -sum(texts) % 16
    return {
        "classifier, 128 texts of 512": ([512] * 128, False),
        "classifier, 32 texts of 2048": ([2048] * 32, False),
        "classifier, 16 reviews": (reviews, False),
        "classifier, 16 pairs of sentences": (pairs, False),
        "language model, 128 windows of 512": ([512] * 128, True),
        "language model, 32 windows of 2048": ([2048] * 32, True),
        "language model, 16 windows of 4096": ([4096] * 16, True),
    }


def attention_arms(lengths: list[int], causal: bool) -> dict[str, Arm]:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    packing, longest = Packing(bounds, max(lengths)), max(lengths)
    one_length = len(set(lengths)) == 1
    shape = (len(lengths), longest) if causal else (1, sum(lengths))
    qkv = torch.randn(*shape, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(*shape, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def ours() -> Tensor:
        return joint_attention(qkv, causal, None if causal else packing)

    def varlen() -> Tensor:
        q, k, v = qkv.flatten(0, 1).unbind(1)
        window = (-1, 0) if causal else (-1, -1)
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=window)
        return out.view_as(grad)  # type: ignore[union-attr]

    def batch(kind: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            texts = qkv.view(len(lengths), longest, 3, HEADS, HEAD_DIM)
            q, k, v = (part.transpose(1, 2) for part in texts.unbind(2))
            with sdpa_kernel([kind]):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return out.transpose(1, 2).reshape(grad.shape)

        return call

    calls = {"ours": ours, "varlen_attn": varlen}
    if one_length:
        calls |= {name: batch(kind) for name, kind in BACKENDS.items()}
    return {name: lambda call=call: torch.autograd.grad(call(), qkv, grad) for name, call in calls.items()}  # type: ignore[misc]


def cross_entropy_arms() -> dict[str, Arm]:
    """Ours overwrites its logits, with numbers that take as long the next time."""
    logits = torch.randn(ROWS, PADDED, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, VOCAB, (ROWS,), device="cuda")

    @torch.compile
    def compiled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = F.log_softmax(logits, 1, dtype=torch.float32)
        at = logp.gather(1, targets[:, None])
        return -at[:, 0], logp.exp().scatter(1, targets[:, None], at.expm1()).to(logits.dtype)

    return {
        "ours": lambda: cross_entropy_(logits, targets, VOCAB, 0.0, 1.0, -100, True),
        "torch.compile": lambda: compiled(logits, targets),
    }


def norm_arms(tokens: int) -> dict[str, Arm]:
    """The sum of a wide and a narrow tensor and its LayerNorm, forward and backward."""
    norm = torch.nn.LayerNorm(WIDTH, device="cuda")
    x = torch.randn(tokens, WIDTH, device="cuda", requires_grad=True)
    late = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.randn_like(x), torch.randn_like(late)]

    def plain() -> tuple[Tensor, Tensor]:
        total = x + late
        return total, norm(total).to(late.dtype)

    def ours() -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):  # so that the norm's result is narrow here, too
            return add_norm(x, late, norm, None)

    calls = {"ours": ours, "torch.compile": torch.compile(plain)}
    return {
        name: lambda call=call: torch.autograd.grad(call(), [x, late, *norm.parameters()], grads)  # type: ignore[misc]
        for name, call in calls.items()
    }


def adamw_arms() -> dict[str, Arm]:
    """Clipping, AdamW's step and half-precision copies of the matrices, for all blocks."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH), (WIDTH, INNER), (INNER,)] + [(WIDTH,)] * 9
    arms: dict[str, Arm] = {}
    for name in ("ours", "PyTorch's, fused"):
        weights = [
            torch.nn.Parameter(torch.randn(shape, device="cuda")) for _ in range(LAYERS) for shape in shapes
        ]
        matrices = [weight for weight in weights if weight.dim() == 2]
        copies = [matrix.detach().bfloat16() for matrix in matrices]
        optimizer = RecordableAdamW(
            weights, lr=torch.tensor(1e-4, device="cuda"), fused=True, capturable=True
        )
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        if name == "ours":
            optimizer.clip = 1.0
            optimizer.copies = {id(m): copy for m, copy in zip(matrices, copies, strict=True)}
            optimizer.gather()
            arms[name] = optimizer.step
            continue

        def plain(optimizer=optimizer, weights=weights, matrices=matrices, copies=copies) -> None:  # type: ignore[no-untyped-def]
            clip_in_step(optimizer, weights, 1.0)
            optimizer.step()
            torch._foreach_copy_(copies, [matrix.detach() for matrix in matrices])

        arms[name] = plain
    return arms


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, dict[str, Any]]:
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for name, call in arms.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    for _ in range(rounds + 1):  # the first is not kept
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / CALLS / 1e3)
    ours = statistics.median(times["ours"][1:])
    found = {}
    for name, seconds in times.items():
        median = statistics.median(seconds[1:])
        found[name] = {"seconds": median, "ours_of_it": ours / median, "rounds": seconds[1:]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("kernels.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    torch.manual_seed(0)
    cases: dict[str, Callable[[], dict[str, Arm]]]
    cases = {
        name: lambda texts=texts: attention_arms(*texts)  # type: ignore[misc]
        for name, texts in lengths_of().items()
    }
    cases[f"cross-entropy and its gradient, {ROWS} rows of {VOCAB} words"] = cross_entropy_arms
    for n in TOKENS:
        cases[f"a sum and its norm, {n} x {WIDTH}"] = lambda n=n: norm_arms(n)  # type: ignore[misc]
    cases["clipping, AdamW and half-precision copies, 18.9 million weights"] = adamw_arms
    found = {name: measure(make(), options.rounds) for name, make in cases.items()}
    record = {
        "what": "our kernels and PyTorch's, bf16, in CUDA graphs; attention has 8 heads of 64",
        "command": f"python benchmarks/our_kernels.py --rounds {options.rounds}",
        "environment": environment(torch.device("cuda"), 1),
        "cases": found,
    }
    write_json(options.json, record)
    for name, arms in found.items():
        print(name)
        for arm, values in arms.items():
            print(
                f"  {arm:14} {values['seconds'] * 1e6:8.1f} us   ours takes {values['ours_of_it']:.2f} of it"
            )


if __name__ == "__main__":
    main()
