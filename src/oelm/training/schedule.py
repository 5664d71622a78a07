"""Learning rate and randomness as functions of the step alone: resuming needs no memory."""

import math
import re

import numpy as np
import torch
from torch import Tensor, nn

from oelm.config import TrainingConfig
from oelm.data.shuffle import shuffle_keys
from oelm.speed.adamw import OwnAdamW, fault_of
from oelm.training.resolve import ResolvedRun


def learning_rate(run: ResolvedRun, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then the schedule, to 0 after the last step."""
    training, warmup, total = run.config.training, run.warmup_steps, run.total_steps
    if step < warmup:
        return training.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if training.schedule == "cosine":
        return training.lr * 0.5 * (1 + math.cos(math.pi * done))
    return training.lr * (1 - done) if training.schedule == "linear" else training.lr


def shrinkage(run: ResolvedRun, scale: float, steps: int) -> float:
    """The factor by which weight decay alone shrinks a matrix in the first `steps` steps of a run."""
    rates = (learning_rate(run, step) * scale for step in range(steps))
    return math.prod(1 - rate * run.config.training.weight_decay for rate in rates)


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

    A layer is the first number in a parameter's name. What has none lies below all layers where it is an
    embedding; a last norm goes with the top layer, a pooler with the head, which it is a part of. The stacks
    of an encoder-decoder are counted each from its own top.
    """
    names = [name for name, _ in model.named_parameters()]
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {name: re.search(r"(.*?\.)(\d+)\.", name) for name in names}
    depths: dict[str, int] = {}  # of a stack, by the name before the number
    for match in found.values():
        if match:
            depths[match[1]] = max(depths.get(match[1], 0), int(match[2]) + 1)
    bodies = {stack.partition(".")[0] for stack in depths}  # T5 has its two beside its head, others one
    deepest = max(depths.values(), default=0)
    scales = {}
    for name, parameter in model.named_parameters():
        match = found[name]
        if id(parameter) in embeddings or (not match and "embed" in name):  # BERT's has a norm of its own
            power = deepest + 1
        elif match:
            power = depths[match[1]] - int(match[2])
        else:
            power = 1 if name.partition(".")[0] in bodies and ".pooler." not in name else 0
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
