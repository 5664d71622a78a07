"""AdamW whose step is one kernel for all weights, with their gradients end to end in one array.

For a small model on a fast GPU the optimizer takes a quarter of a step, limited by memory bandwidth. With
PyTorch's fused AdamW gradients are read for their norm, read and written when they are clipped, and weights
are read once more to make half-precision copies. In `kernels/adamw_triton.py` gradients are read twice,
everything else is read and written once, and there are three launches for any number of weights. (Gradients
that are float32 already, such as an embedding's, are first copied into the array.)
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
CHUNK = 1 << 19  # numbers that take all their missed steps together, so that they stay in the cache


def can_be_one_kernel(weights: Iterable[Tensor]) -> bool:
    return all(_is_for(weight, None) for weight in weights if weight.requires_grad)


def _is_for(weight: Tensor, copy: Tensor | None) -> bool:
    """Whether the kernels can update a weight: they read and write aligned vectors of float32 numbers."""
    if adamw_triton is None or not runs("adamw", weight.device):
        return False
    tensors = (weight,) if copy is None else (weight, copy)
    return weight.dtype == torch.float32 and all(
        tensor.is_contiguous() and tensor.data_ptr() % VECTOR_BYTES == 0 for tensor in tensors
    )


def clip_in_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float) -> Tensor:
    """The gradients' norm. The optimizer's next step clips them to `clip` by a divisor as it reads them,
    while `clip_grad_norm_` would read and write all of them once more. If the norm is not finite, this step
    and all later ones change nothing: see `fault_of`."""
    norm = total_norm([p.grad for p in parameters if p.grad is not None])
    # As clip_grad_norm_ does it.
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    divide_gradients_in_step(optimizer, (1 / coefficient).to(torch.float32))
    fault_of(optimizer).logical_or_(~norm.isfinite())
    return norm


def fresh_state(weight: Tensor) -> dict[str, Tensor]:
    """The state of AdamW for a weight before its first step."""
    moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": weight.new_zeros((), dtype=torch.float32), **moments}


class HostAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW on a CPU, the same steps, without PyTorch's general code around them, which takes
    some per cent of a small model's step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None
        faulty, divisor = bool(fault_of(self)), divisor_of(self)
        if divisor is not None and divisor == 1:
            divisor = None  # saves the division of all gradients by 1
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
    """The arguments of `fused_adamw_` for a group, without its learning rate."""
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "eps": group["eps"]}


class RecordableAdamW(torch.optim.AdamW):
    """PyTorch's AdamW or, after `gather`, one kernel for all weights."""

    recordable = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights: list[nn.Parameter] = []  # the weights that train
        self.array: Tensor | None = None  # their gradients, end to end
        self.gathered = False  # whether all gradients are in the array
        self.copies: dict[int, Tensor] = {}  # half-precision copies to update, by the ids of their weights
        self.clip = 0.0  # the largest norm of the gradients; 0: any
        self.table_values: list[list[float]] = []  # from which the tables were made: addresses, above all

    def clear_gathered(self) -> None:
        """Reset the set of weights that train, which the next step's gradients determine again. Moments are
        kept."""
        self.weights, self.array, self.gathered, self.copies, self.table_values = [], None, False, {}, []

    def make_gradients(self) -> dict[int, Tensor]:
        """A new array for all gradients; returns each weight's part of it, by the weight's id."""
        if not self.weights:
            return {}
        self.array = self.weights[0].new_empty(self.total)
        return {id(weight): self._place(n) for n, weight in enumerate(self.weights)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if set_to_none:
            self.array = None  # frees its memory for the next step

    def _place(self, n: int) -> Tensor:
        assert self.array is not None
        weight, first = self.weights[n], self.firsts[n]
        return self.array[first : first + weight.numel()].view_as(weight)

    @torch.no_grad()
    def gather(self) -> None:
        """Copy gradients that are elsewhere into the array. The first call determines the weights that
        train."""
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        fit = all(_is_for(p, self.copies.get(id(p))) for p in trained)
        if trained and not self.weights and fit:
            aligned = adamw_triton.ALIGNED
            ends = np.cumsum([-(-weight.numel() // aligned) * aligned for weight in trained])
            self.weights, self.firsts, self.total = trained, [0, *ends[:-1].tolist()], int(ends[-1])
        self.gathered = fit and bool(trained) and list(map(id, trained)) == list(map(id, self.weights))
        if not self.gathered:
            return
        if self.array is None:
            self.make_gradients()
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
        if not self.gathered:
            return super().step(closure)
        assert closure is None and self.array is not None
        group = self.param_groups[0]
        self.norm = adamw_triton.step_(
            *self._tables(), self.array, fault_of(self), tuple(group["betas"]), group["eps"], self.clip
        )
        return None

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The kernels' tables of the weights, made again if an address has changed. A recorded step keeps
        using the tables that it was recorded with."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        values = []
        for weight in self.weights:
            state = self.state[weight]
            if not state:
                state |= fresh_state(weight)
            copy, group = self.copies.get(id(weight)), groups[id(weight)]
            assert isinstance(group["lr"], Tensor)  # of a step that can be recorded
            tensors = (weight, state["exp_avg"], state["exp_avg_sq"], state["step"], group["lr"])
            addresses = [*(t.data_ptr() for t in tensors), 0 if copy is None else copy.data_ptr()]
            values.append([*addresses, group["weight_decay"]])
        if values != self.table_values:
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("what the optimizer keeps was moved just before a step was recorded")
            self.tables, self.table_values = self._make_tables(values), values
        return self.tables

    def _make_tables(self, values: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
        addresses = np.array([row[:6] for row in values], dtype=np.int64)
        piece, sizes = adamw_triton.PIECE, np.array([weight.numel() for weight in self.weights])
        counts = -(-sizes // piece)
        number = np.repeat(np.arange(len(sizes)), counts)
        begin = piece * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        pieces = np.zeros((len(number), adamw_triton.COLUMNS), dtype=np.int64)
        pieces[:, :3] = addresses[number, :3] + 4 * begin[:, None]
        pieces[:, 3] = np.where(addresses[number, 5] > 0, addresses[number, 5] + 2 * begin, 0)
        pieces[:, 4] = np.array(self.firsts)[number] + begin
        pieces[:, 5] = np.minimum(sizes[number] - begin, piece)
        pieces[:, 6] = number
        logs = [math.log2(beta) if beta else -math.inf for beta in self.param_groups[0]["betas"]]
        constants = np.array([(row[6], *logs) for row in values])
        tables = map(torch.from_numpy, (pieces, addresses[:, 3:5].copy(), constants))
        device = self.weights[0].device
        one, two, three = (pinned(table, device).to(device, non_blocking=True) for table in tables)
        return one, two, three


def coefficients(lrs: list[float], taken: int, group: dict[str, Any]) -> Tensor:
    """The factors of every step for the kernel `coast_`, (steps, 3)."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    numbers = enumerate(lrs, taken + 1)
    return torch.tensor([(r * decay, r / (1 - beta1**n), (1 - beta2**n) ** 0.5) for n, r in numbers])


def step_without_gradients(
    weight: Tensor, mean: Tensor, square: Tensor, lrs: list[float], taken: int, counter: Tensor,
    group: dict[str, Any],
) -> None:  # fmt: skip
    """Take steps of AdamW with zero gradients, for a weight and its moments that have taken `taken` steps,
    until they have taken as many as `counter` holds. (Steps after a fault are not counted.)"""
    (beta1, beta2), eps = group["betas"], group["eps"]
    if weight.is_cuda and adamw_triton is not None and runs("adamw", weight.device):
        steps = pinned(coefficients(lrs, taken, group), weight.device)
        steps = steps.to(weight.device, non_blocking=True)
        adamw_triton.coast_(weight, mean, square, steps, counter, taken, beta1, beta2, eps)
        return
    lrs = lrs[: int(counter) - taken]
    counts = [torch.tensor(float(taken + n), device=weight.device) for n in range(1, len(lrs) + 1)]
    zeros = weight.new_zeros(min(CHUNK, weight.numel()))
    settings = _settings(group)
    for w, m, v in zip(*(table.view(-1).split(CHUNK) for table in (weight, mean, square)), strict=True):
        for count, lr in zip(counts, lrs, strict=True):
            fused_adamw_([w], [zeros[: len(w)]], [m], [v], [count], lr=lr, **settings)
