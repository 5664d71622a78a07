"""AdamW whose step is one kernel for all weights, where their gradients lie end to end in one array.

For a small model on a fast GPU the optimizer is a quarter of a step, all of it waiting for memory. With
PyTorch's fused AdamW gradients are read to measure them, read and written when they are clipped, and weights
are read once more to make half-precision copies. In `kernels/adamw_triton.py` gradients are read twice, all
else is read and written once, and there are three launches however many weights there are. (Gradients that
nobody widens, such as an embedding's, are moved to the array first.)
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data.assemble import pinned
from oelm.speed.capabilities import runs
from oelm.speed.kernels import load_kernels
from oelm.system.private_torch import (
    add_all_,
    copy_all_,
    divide_gradients_in_step,
    divisor_of,
    fault_of,
    fused_adamw_,
    total_norm,
)

adamw_triton = load_kernels("adamw_triton")

VECTOR_BYTES = 16
_ONE = torch.ones(())
CHUNK = 1 << 19  # numbers that take all their missed steps before the next ones: they stay in the cache


def can_be_one_kernel(weights: Iterable[Tensor]) -> bool:
    return all(_is_for(weight, None) for weight in weights if weight.requires_grad)


def _is_for(weight: Tensor, copy: Tensor | None) -> bool:
    """Whether the kernels can have a weight: they read and write vectors of numbers."""
    if adamw_triton is None or not runs("adamw", weight.device):
        return False
    tensors = (weight,) if copy is None else (weight, copy)
    return weight.dtype == torch.float32 and all(
        tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in tensors
    )


def clip_in_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float) -> Tensor:
    """The gradients' norm. The optimizer's next step divides by as much as clips them to `clip`: it reads
    every gradient anyway, and `clip_grad_norm_` would read and write them all once more. Where the norm is
    not finite, this step and all later ones change nothing: see `fault_of`."""
    norm = total_norm([p.grad for p in parameters if p.grad is not None])
    # As clip_grad_norm_ does it.
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    divide_gradients_in_step(optimizer, (1 / coefficient).to(torch.float32))
    fault_of(optimizer).logical_or_(~norm.isfinite())
    return norm


def fresh_state(weight: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps of a weight before its first step."""
    moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": weight.new_zeros((), dtype=torch.float32), **moments}


class HostAdamW(torch.optim.AdamW):
    """PyTorch's fused one on a CPU, the same steps, without what PyTorch does around them for all kinds of
    optimizers and devices that there are: that is some per cent of a small model's step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None
        faulty, divisor = bool(fault_of(self)), divisor_of(self)
        if divisor is not None and divisor == 1:
            divisor = None  # nothing is read and written to be divided by 1
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] |= fresh_state(weight)
            if faulty or not weights:
                continue
            states = [self.state[weight] for weight in weights]
            means, squares, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            add_all_(steps, [_ONE] * len(steps))
            fused_adamw_(
                weights,
                [p.grad for p in weights],
                means,
                squares,
                steps,
                lr=group["lr"],
                **_settings(group),
                grad_scale=divisor,
            )
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            return super().zero_grad(False)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None
        return None


def _settings(group: dict[str, Any]) -> dict[str, float]:
    """What `fused_adamw_` wants to know of a group, but its rate."""
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "eps": group["eps"]}


class RecordableAdamW(torch.optim.AdamW):
    """PyTorch's, unless it is told to `gather` all gradients before a step."""

    recordable = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights: list[nn.Parameter] = []  # those that train
        self.array: Tensor | None = None  # their gradients
        self.together = False  # whether their gradients lie end to end, and nothing else has one
        self.copies: dict[int, Tensor] = {}  # of weights, by their ids, to be kept up to date
        self.clip = 0.0  # the largest norm of the gradients; 0: any
        self.made_of: list[list[float]] = []  # what the tables were made of: addresses, above all

    def forget(self) -> None:
        """Forget what trains: the next step's gradients say it anew. Moments stay with their weights."""
        self.weights, self.array, self.together, self.copies, self.made_of = [], None, False, {}, []

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
        fit = all(_is_for(p, self.copies.get(id(p))) for p in found)
        if found and not self.weights and fit:
            aligned = adamw_triton.ALIGNED
            ends = np.cumsum([-(-weight.numel() // aligned) * aligned for weight in found])
            self.weights, self.firsts, self.total = found, [0, *ends[:-1].tolist()], int(ends[-1])
        self.together = fit and bool(found) and list(map(id, found)) == list(map(id, self.weights))
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
            copy_all_(placed, strays)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.together:
            return super().step(closure)
        assert closure is None and self.array is not None
        group = self.param_groups[0]
        self.norm = adamw_triton.step_(
            *self._tables(), self.array, fault_of(self), tuple(group["betas"]), group["eps"], self.clip
        )
        return None

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernels want to know of the weights; made anew where something has moved. A step that was
        recorded goes on with what was there then."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        found = []
        for weight in self.weights:
            state = self.state[weight]
            if not state:
                state |= fresh_state(weight)
            copy, group = self.copies.get(id(weight)), groups[id(weight)]
            assert isinstance(group["lr"], Tensor)  # of a step that can be recorded
            tensors = (weight, state["exp_avg"], state["exp_avg_sq"], state["step"], group["lr"])
            places = [*(t.data_ptr() for t in tensors), 0 if copy is None else copy.data_ptr()]
            found.append([*places, group["weight_decay"]])
        if found != self.made_of:
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("what the optimizer keeps was moved just before a step was recorded")
            self.tables, self.made_of = self._make_tables(found), found
        return self.tables

    def _make_tables(self, found: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
        places = np.array([row[:6] for row in found], dtype=np.int64)
        piece, sizes = adamw_triton.PIECE, np.array([weight.numel() for weight in self.weights])
        counts = -(-sizes // piece)
        number = np.repeat(np.arange(len(sizes)), counts)
        begin = piece * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        pieces = np.zeros((len(number), adamw_triton.COLUMNS), dtype=np.int64)
        pieces[:, :3] = places[number, :3] + 4 * begin[:, None]
        pieces[:, 3] = np.where(places[number, 5] > 0, places[number, 5] + 2 * begin, 0)
        pieces[:, 4] = np.array(self.firsts)[number] + begin
        pieces[:, 5] = np.minimum(sizes[number] - begin, piece)
        pieces[:, 6] = number
        logs = [math.log2(beta) if beta else -math.inf for beta in self.param_groups[0]["betas"]]
        constants = np.array([(row[6], *logs) for row in found])
        tables = map(torch.from_numpy, (pieces, places[:, 3:5].copy(), constants))
        device = self.weights[0].device
        one, two, three = (pinned(table, device).to(device, non_blocking=True) for table in tables)
        return one, two, three


def coefficients(rates: list[float], taken: int, group: dict[str, Any]) -> Tensor:
    """What `coast_` wants to know of every step."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    numbers = enumerate(rates, taken + 1)
    return torch.tensor([(r * decay, r / (1 - beta1**n), (1 - beta2**n) ** 0.5) for n, r in numbers])


def coast(
    weight: Tensor, mean: Tensor, square: Tensor, rates: list[float], taken: int, counter: Tensor,
    group: dict[str, Any],
) -> None:  # fmt: skip
    """Steps of AdamW without a gradient, for a weight and its moments that have taken `taken` so far: until
    they have taken as many as `counter` has counted. (Steps after a fault are not counted.)"""
    (beta1, beta2), eps = group["betas"], group["eps"]
    if weight.is_cuda and adamw_triton is not None and runs("adamw", weight.device):
        steps = pinned(coefficients(rates, taken, group), weight.device)
        steps = steps.to(weight.device, non_blocking=True)
        adamw_triton.coast_(weight, mean, square, steps, counter, taken, beta1, beta2, eps)
        return
    rates = rates[: int(counter) - taken]
    counts = [torch.tensor(float(taken + n), device=weight.device) for n in range(1, len(rates) + 1)]
    nothing = weight.new_zeros(min(CHUNK, weight.numel()))
    settings = _settings(group)
    for w, m, v in zip(*(table.view(-1).split(CHUNK) for table in (weight, mean, square)), strict=True):
        for count, rate in zip(counts, rates, strict=True):
            fused_adamw_([w], [nothing[: len(w)]], [m], [v], [count], lr=rate, **settings)
