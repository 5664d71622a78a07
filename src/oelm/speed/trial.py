"""Trials of our kernels: each runs once, forward and backward, on a few numbers, to see whether it works
here."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from oelm.speed.adamw import RecordableAdamW, fresh_state
from oelm.speed.kernels import (
    adamw_triton,
    cross_entropy_triton,
    heads_triton,
    joint_triton,
    norm_triton,
    rotary_triton,
    value_only_triton,
)
from oelm.speed.kernels.rows_triton import row_sums
from oelm.system.library_errors import first_line


@cache
def why_no_heads(device: torch.device) -> str | None:
    """Why our attention kernel for other models does not run on this device; None if it does."""
    q, k, v = (torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    bounds = torch.tensor([0, 3, 16], dtype=torch.int32, device=device)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            given = [part.clone().requires_grad_() for part in (q, k, v)]
            heads_triton.forward(*given, bounds, bounds[:1].long(), False, 0.125, 0.1, 0)[0].sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # compilers, drivers and launchers raise many kinds
        return f"our kernel for packed attention does not run here: {first_line(error)}"
    return None


def trials(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A trial of each kernel in `capabilities.KERNELS`, the smallest kernel first."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad)

    def rows() -> None:
        row_sums(zeros(4, 16, grad=False), torch.zeros(4, dtype=torch.int64, device=device), 4)

    def adamw() -> None:
        weight = nn.Parameter(zeros(64, dtype=torch.float32, grad=False))
        weight.grad = torch.zeros_like(weight)
        rate = torch.tensor(1e-3, device=device)
        optimizer = RecordableAdamW([weight], lr=rate, fused=True, capturable=True)
        optimizer.gather()
        optimizer.step()
        state = fresh_state(weight)
        steps = torch.ones(1, 3, device=device)
        moments = state["exp_avg"], state["exp_avg_sq"]
        adamw_triton.coast_(weight.detach(), *moments, steps, state["step"] + 1, 0, 0.9, 0.999, 1e-8)

    def cross_entropy() -> None:
        targets = torch.zeros(2, dtype=torch.int64, device=device)
        cross_entropy_triton.cross_entropy_(zeros(2, 128, grad=False), targets, 100, 0.0, 1.0, -100, True)

    def norm() -> None:
        weight, bias = zeros(64, dtype=torch.float32), zeros(64, dtype=torch.float32)
        given = zeros(1, 4, 64), zeros(1, 4, 64), weight, bias, 1e-5, torch.bfloat16, None
        norm_triton.add_norm(*given)[1].sum().backward()

    def attention() -> None:
        bounds = torch.tensor([0, 3, 16], dtype=torch.int32, device=device)
        for causal, packed in ((True, None), (False, bounds)):
            joint_triton.forward(zeros(1, 16, 3, 2, 64), packed, causal, 0.125)[0].sum().backward()

    def rotary() -> None:
        rotary_triton.Rotation.apply(zeros(1, 4, 2, 64), zeros(2, 1, 4, 1, 32, grad=False)).sum().backward()

    def value_only() -> None:
        q, k = zeros(1, 2, 16, 64, grad=False), zeros(1, 2, 16, 64, grad=False)
        value_only_triton.value_only(q, k, zeros(1, 2, 16, 64), None, True, 0.125)[0].sum().backward()

    def checked(work: Callable[[], None]) -> Callable[[], None]:
        def trial() -> None:
            with torch.inference_mode(False), torch.enable_grad():  # wherever the device is asked about first
                work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return trial

    works = (rows, adamw, rotary, cross_entropy, norm, attention, value_only)
    return {work.__name__: checked(work) for work in works}
