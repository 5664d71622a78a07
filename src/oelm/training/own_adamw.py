"""AdamW whose step is one kernel for all weights, where their gradients lie end to end in one array.

For a small model on a fast GPU the optimizer is a third of a step, and all of it is waiting for memory. With
PyTorch's fused AdamW gradients are read to measure them, read and written when they are clipped, and weights
are read once more to make half-precision copies. In `kernels/adamw_triton.py` gradients are read twice, all
else is read and written once, and there are three launches however many weights there are.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.training.objective import pinned

try:
    from oelm.kernels import adamw_triton
except ImportError:  # Triton comes with torch's CUDA builds for Linux, and with few others
    adamw_triton = None  # type: ignore[assignment]

VECTOR = 16  # bytes


def have_own_adamw() -> bool:
    return adamw_triton is not None


def _is_for(weight: Tensor, copy: Tensor | None) -> bool:
    """Whether the kernels can have a weight: they read and write vectors of numbers."""
    if adamw_triton is None or not (weight.is_cuda or adamw_triton.INTERPRETED):
        return False
    tensors = (weight,) if copy is None else (weight, copy)
    return weight.dtype == torch.float32 and all(
        tensor.is_contiguous() and tensor.data_ptr() % VECTOR == 0 for tensor in tensors
    )


def fresh_state(weight: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps of a weight before its first step."""
    moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": weight.new_zeros((), dtype=torch.float32), **moments}


class OwnAdamW(torch.optim.AdamW):
    """PyTorch's, unless it is told to `gather` all gradients before a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights: list[nn.Parameter] = []  # those that train
        self.array: Tensor | None = None  # their gradients
        self.together = False  # whether their gradients lie end to end, and nothing else has one
        self.copies: dict[int, Tensor] = {}  # of weights, by their ids, to be kept up to date
        self.clip = 0.0  # the largest norm of the gradients; 0: any
        self.made_of: list[list[int]] = []  # the addresses that the tables were made of

    def rooms(self) -> dict[int, Tensor]:
        """A new place for every weight's gradient, by the weight's id: one behind the other."""
        if not self.weights:
            return {}
        self.array = self.weights[0].new_empty(self.total)
        return {id(weight): self._place(n) for n, weight in enumerate(self.weights)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if set_to_none:
            self.array = None  # its memory is free for what the next step computes

    def _place(self, n: int) -> Tensor:
        assert self.array is not None
        weight, first = self.weights[n], self.firsts[n]
        return self.array[first : first + weight.numel()].view_as(weight)

    @torch.no_grad()
    def gather(self) -> None:
        """Have the gradients that lie elsewhere in their places, too. The first time says what trains."""
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if found and not self.weights and all(_is_for(p, self.copies.get(id(p))) for p in found):
            aligned = adamw_triton.ALIGNED
            ends = np.cumsum([-(-weight.numel() // aligned) * aligned for weight in found])
            self.weights, self.firsts, self.total = found, [0, *ends[:-1].tolist()], int(ends[-1])
        self.together = bool(found) and list(map(id, found)) == list(map(id, self.weights))
        if not self.together:
            return
        if self.array is None:
            self.rooms()
        assert self.array is not None
        placed: list[Tensor] = []
        strays: list[Tensor] = []
        for n, weight in enumerate(self.weights):
            assert weight.grad is not None
            if weight.grad.data_ptr() != self.array.data_ptr() + 4 * self.firsts[n]:
                strays.append(weight.grad)
                weight.grad = self._place(n)
                placed.append(weight.grad)
        if placed:
            torch._foreach_copy_(placed, strays)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.together:
            return super().step(closure)
        assert closure is None and self.array is not None
        group = self.param_groups[0]
        self.norm = adamw_triton.step_(
            *self._tables(), self.array, tuple(group["betas"]), group["eps"], self.clip
        )
        return None

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernels want to know of the weights; made anew where something has moved."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        found = []
        for weight in self.weights:
            state = self.state[weight]
            if not state:
                state |= fresh_state(weight)
            copy, rate = self.copies.get(id(weight)), groups[id(weight)]["lr"]
            assert isinstance(rate, Tensor)  # of a step that can be recorded
            tensors = (weight, state["exp_avg"], state["exp_avg_sq"], state["step"], rate)
            found.append([*(t.data_ptr() for t in tensors), 0 if copy is None else copy.data_ptr()])
        if found != self.made_of:
            self.tables, self.made_of = self._make_tables(np.array(found), groups), found
        return self.tables

    def _make_tables(self, found: np.ndarray, groups: dict[int, Any]) -> tuple[Tensor, Tensor, Tensor]:
        piece, sizes = adamw_triton.PIECE, np.array([weight.numel() for weight in self.weights])
        counts = -(-sizes // piece)
        number = np.repeat(np.arange(len(sizes)), counts)
        begin = piece * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        pieces = np.zeros((len(number), adamw_triton.COLUMNS), dtype=np.int64)
        pieces[:, :3] = found[number, :3] + 4 * begin[:, None]
        pieces[:, 3] = np.where(found[number, 5] > 0, found[number, 5] + 2 * begin, 0)
        pieces[:, 4] = np.array(self.firsts)[number] + begin
        pieces[:, 5] = np.minimum(sizes[number] - begin, piece)
        pieces[:, 6] = number
        constants = [
            (group["weight_decay"], *(math.log2(beta) if beta else -math.inf for beta in group["betas"]))
            for group in (groups[id(weight)] for weight in self.weights)
        ]
        tables = map(torch.from_numpy, (pieces, found[:, 3:5].copy(), np.array(constants)))
        device = self.weights[0].device
        one, two, three = (pinned(table, device).to(device, non_blocking=True) for table in tables)
        return one, two, three
