"""Learning rate, length of a run and randomness as functions of the step alone: resuming needs no memory."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from oelm.config import TrainingConfig
from oelm.data import Plan
from oelm.data.shuffle import shuffle_keys
from oelm.models.families import family_of, find_layers, lies_in
from oelm.speed.adamw import OwnAdamW, fault_of


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


def shrinkage(training: TrainingConfig, scale: float, steps: int, total: int) -> float:
    """What weight decay leaves of a matrix that has no gradient, after so many of a run's steps."""
    rates = (learning_rate(training, step, total) * scale for step in range(steps))
    return math.prod(1 - rate * training.weight_decay for rate in rates)


def make_optimizer(model: nn.Module, training: TrainingConfig, graphed: bool = False) -> torch.optim.AdamW:
    """AdamW over *all* parameters: one that is frozen has no gradient and is neither touched, decayed nor
    given state, and one that is unfrozen later trains (but in steps that were recorded before). Vectors
    (norms, biases) are not decayed. In a CUDA graph (`graphed`) the rate is a tensor that is filled before
    every step: see `set_rate`."""
    device = next(model.parameters()).device
    scales = layer_scales(model, training.layer_decay)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((scales[name], parameter.dim() >= 2), []).append(parameter)
    rate = lambda: torch.tensor(training.lr, device=device) if graphed else training.lr  # noqa: E731
    return (OwnAdamW if graphed else torch.optim.AdamW)(
        [
            {
                "params": parameters,
                "weight_decay": training.weight_decay * matrix,
                "lr": rate(),
                "scale": scale,
            }
            for (scale, matrix), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
        ],
        lr=rate(),
        betas=training.betas,
        eps=training.eps,
        fused=device.type in ("cpu", "cuda"),
        capturable=graphed,
    )


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """What each parameter's rate is multiplied by: 1 for the task's head, `decay` for the top layer,
    `decay` squared for the one below, and so on down to the embeddings.

    What stands in no layer lies below them all where it belongs to the embeddings; a last norm goes with the
    top layer, a pooler with the head. The stacks of an encoder-decoder are counted each from its own top.
    """
    names = [name for name, _ in model.named_parameters()]
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    family, places = family_of(model), find_layers(model, names)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    bodies = {name.partition(".")[0] for name in places}  # T5 has its two beside its head, others one
    deepest = max((depth for _, depth in places.values()), default=0)
    scales = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings or lies_in(model, name, family.below):
            power = deepest + 1
        elif name in places:
            layer, depth = places[name]
            power = depth - layer
        else:
            power = int(name.partition(".")[0] in bodies and not lies_in(model, name, family.head))
        scales[name] = decay**power
    return scales


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        scaled = rate * group.get("scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def clip_in_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float) -> Tensor:
    """The gradients' norm. The optimizer's next step divides by as much as clips them to `clip`: it reads
    every gradient anyway, and `clip_grad_norm_` would read and write them all once more. Where the norm is
    not finite, this step and all later ones change nothing: see `fault_of`."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    norm = torch.linalg.vector_norm(torch.stack(norms))
    # What clip_grad_norm_ multiplies by. Fused optimizers look here for what a GradScaler would tell them.
    coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    optimizer.grad_scale = (1 / coefficient).to(torch.float32)  # type: ignore[attr-defined]
    fault_of(optimizer).logical_or_(~norm.isfinite())
    return norm


def seed_step(seed: int, step: int, part: int, device: torch.device) -> None:
    """Dropout's randomness for one micro-batch of one process."""
    value = int(shuffle_keys(np.array([part]), seed, step)[0] >> 1)
    # torch.manual_seed would look for every kind of device there is, which takes as long as a small layer.
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
