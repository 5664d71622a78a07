"""Learning rate, length of a run and randomness as functions of the step alone: resuming needs no memory."""

import math

import numpy as np
import torch
from torch import nn

from oelm.config import TrainingConfig
from oelm.data import Plan
from oelm.data.shuffle import shuffle_keys


def total_steps(training: TrainingConfig, plan: Plan) -> int:
    """The run's length in optimizer steps; a fraction of an epoch is a fraction of its batches."""
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    full = int(training.epochs)
    rest = training.epochs - full
    return max(1, plan.steps(full) + (round(rest * len(plan.epoch(full))) if rest else 0))


def warmup_steps(training: TrainingConfig, total: int) -> int:
    return int(training.warmup * total) if training.warmup < 1 else int(training.warmup)


def learning_rate(training: TrainingConfig, step: int, total: int) -> float:
    """The rate of step 0, 1, ...: up in a line, then down as the schedule says, to 0 after the last step."""
    warmup = warmup_steps(training, total)
    if step < warmup:
        return training.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if training.schedule == "cosine":
        return training.lr * 0.5 * (1 + math.cos(math.pi * done))
    return training.lr * (1 - done) if training.schedule == "linear" else training.lr


def make_optimizer(model: nn.Module, training: TrainingConfig, graphed: bool = False) -> torch.optim.AdamW:
    """AdamW over *all* parameters: one that is frozen has no gradient and is neither touched, decayed nor
    given state, and one that is unfrozen later trains. Vectors (norms, biases) are not decayed. In a CUDA
    graph (`graphed`) the rate is a tensor that is filled before every step: see `set_rate`."""
    device = next(model.parameters()).device
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": training.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=torch.tensor(training.lr, device=device) if graphed else training.lr,
        betas=training.betas,
        eps=training.eps,
        fused=device.type in ("cpu", "cuda"),
        capturable=graphed,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def seed_step(seed: int, step: int, part: int) -> None:
    """Dropout's randomness for one micro-batch of one process."""
    torch.manual_seed(int(shuffle_keys(np.array([part]), seed, step)[0] >> 1))
