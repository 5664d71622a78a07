"""Learning rate, optimizer and seeds of a step, as functions of the step, so that checkpoints need no
state."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from oelm.config import TrainingConfig
from oelm.data.shuffle import shuffle_keys
from oelm.models.families import depths_from_top
from oelm.models.freeze_schedule import Timeline
from oelm.models.roles import role_scales
from oelm.training.freezing import Freezing
from oelm.training.resolve import ResolvedRun, warmup_steps


def learning_rate(run: ResolvedRun, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then by `training.schedule`."""
    training, warmup, total = run.config.training, run.warmup_steps, run.total_steps
    if training.extended_from:  # each extension has a schedule of its own
        ends = (*training.extended_from, total)
        first = max((end for end in training.extended_from if end <= step), default=0)
        step, total = step - first, next((end for end in ends if end > step), total) - first
        warmup = warmup_steps(training.warmup, total)
    if step < warmup:
        return training.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if training.schedule == "cosine":
        return training.lr * 0.5 * (1 + math.cos(math.pi * done))
    if training.schedule == "linear":
        return training.lr * (1 - done)
    assert training.schedule == "constant", training.schedule
    return training.lr


def shrinkage(run: ResolvedRun, scale: float, decay: float, steps: int) -> float:
    """The factor by which weight decay alone shrinks a matrix in the first `steps` steps of a run; `scale`
    and `decay` multiply its learning rate and its weight decay."""
    lrs = (learning_rate(run, step) * scale for step in range(steps))
    return math.prod(1 - lr * (run.config.training.weight_decay * decay) for lr in lrs)


def make_optimizer(
    model: nn.Module,
    training: TrainingConfig,
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
    freezing: Freezing | None = None,
) -> torch.optim.AdamW:
    """AdamW over *all* parameters. A frozen one has no gradient, so it is not updated, not decayed and has no
    state; one that is unfrozen later trains (except in CUDA graphs recorded before).

    Vectors (norms, biases) are not decayed. Layers that are unfrozen at different times have groups of their
    own if the schedule warms up their learning rates. A `kind` that is `recordable` is for CUDA graphs: its
    learning rate is a tensor that is filled before every step (`set_learning_rate`).
    """
    device = next(model.parameters()).device
    scales = parameter_scales(model, training)
    turns = freezing.groups if freezing and freezing.timeline.warmup else {}
    recordable = getattr(kind, "recordable", False)
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        scale, decay = scales[name]
        key = scale, decay * (parameter.dim() >= 2), turns.get(name, -1)
        groups.setdefault(key, []).append(parameter)

    def lr() -> Any:
        return torch.tensor(training.lr, device=device) if recordable else training.lr

    return kind(
        [
            {"params": group, "weight_decay": training.weight_decay * decay, "lr": lr(), "scale": scale}
            | ({"turn": turn} if turn >= 0 else {})
            for (scale, decay, turn), group in sorted(groups.items(), key=lambda item: item[0], reverse=True)
        ],
        lr=lr(),
        betas=training.betas,
        eps=training.eps,
        fused=device.type in ("cpu", "cuda"),
        capturable=recordable,
    )


def parameter_scales(model: nn.Module, training: TrainingConfig) -> dict[str, tuple[float, float]]:
    """The factors of each parameter's learning rate and weight decay, by name."""
    layers = layer_scales(model, training.layer_decay)
    rates = role_scales(model, training, "lr_scale")
    decays = role_scales(model, training, "weight_decay_scale")
    return {name: (layers[name] * rates[name], decays[name]) for name in layers}


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """The factor of each parameter's learning rate: 1 for the task's head, `decay` for the top layer, `decay`
    squared for the one below, and so on down to the embeddings and their norms."""
    if decay == 1:
        return {name: 1.0 for name, _ in model.named_parameters()}
    return {name: decay**depth for name, depth in depths_from_top(model).items()}


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, timeline: Timeline | None = None, step: int = 0
) -> None:
    """Set the learning rate of a step; `timeline` has the warm-up of unfrozen layers."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("scale", 1.0)
        if timeline is not None and "turn" in group:
            scaled *= timeline.lr_factor(group["turn"], step)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def seed_step(seed: int, step: int, part: int, device: torch.device) -> None:
    """Seed dropout for one micro-batch (`part`) of one process."""
    value = int(shuffle_keys(np.array([part]), seed, step)[0] >> 1)
    # torch.manual_seed would seed every kind of device, which takes as long as a small layer.
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
