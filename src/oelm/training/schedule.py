"""Learning rate and randomness as functions of the step alone, so a checkpoint need not store them."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from oelm.config import TrainingConfig
from oelm.data.shuffle import shuffle_keys
from oelm.models.families import family_of, layers_of, relative_name
from oelm.models.roles import role_scales
from oelm.training.resolve import ResolvedRun


def learning_rate(run: ResolvedRun, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, then constant, or down to 0."""
    training, warmup, total = run.config.training, run.warmup_steps, run.total_steps
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
    """The factor by which weight decay alone shrinks a matrix in the first `steps` steps of a run, where its
    learning rate and its weight decay are multiplied by `scale` and `decay`."""
    rates = (learning_rate(run, step) * scale for step in range(steps))
    return math.prod(1 - rate * (run.config.training.weight_decay * decay) for rate in rates)


def make_optimizer(
    model: nn.Module, training: TrainingConfig, recordable: type[torch.optim.AdamW] | None = None
) -> torch.optim.AdamW:
    """AdamW over *all* parameters: one that is frozen has no gradient and is neither touched, decayed nor
    given state, and one that is unfrozen later trains (except in CUDA graphs recorded before). Vectors
    (norms, biases) are not decayed. `recordable` is a kind of AdamW for CUDA graphs: its learning rate is a
    tensor that is filled before every step (`set_learning_rate`)."""
    device = next(model.parameters()).device
    scales = parameter_scales(model, training)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        scale, decay = scales[name]
        groups.setdefault((scale, decay * (parameter.dim() >= 2)), []).append(parameter)

    def lr() -> Any:
        return torch.tensor(training.lr, device=device) if recordable else training.lr

    return (recordable or torch.optim.AdamW)(
        [
            {"params": group, "weight_decay": training.weight_decay * decay, "lr": lr(), "scale": scale}
            for (scale, decay), group in sorted(groups.items(), key=lambda item: item[0], reverse=True)
        ],
        lr=lr(),
        betas=training.betas,
        eps=training.eps,
        fused=device.type in ("cpu", "cuda"),
        capturable=recordable is not None,
    )


def parameter_scales(model: nn.Module, training: TrainingConfig) -> dict[str, tuple[float, float]]:
    """What each parameter's learning rate and weight decay are multiplied by."""
    layers = layer_scales(model, training.layer_decay)
    rates = role_scales(model, training, "lr_scale")
    decays = role_scales(model, training, "weight_decay_scale")
    return {name: (layers[name] * rates[name], decays[name]) for name in layers}


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """What each parameter's learning rate is multiplied by: 1 for the task's head, `decay` for the top layer,
    `decay` squared for the one below, and so on down to the embeddings and their norms. A final norm counts
    as part of the top layer, a pooler as part of the head. The layers of an encoder and of a decoder are
    counted separately, each from its own top."""
    names = [name for name, _ in model.named_parameters()]
    if decay == 1:
        return dict.fromkeys(names, 1.0)
    embedding_norms = family_of(model).embedding_norms
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = layers_of(model, names)
    bodies = {name.partition(".")[0] for name in layers}  # T5 has two beside its head, others one
    deepest = max((count for _, count in layers.values()), default=0)
    scales = {}
    for name, parameter in model.named_parameters():
        module = relative_name(model, name).rpartition(".")[0]
        if id(parameter) in embeddings or module in embedding_norms:
            power = deepest + 1
        elif name in layers:
            layer, count = layers[name]
            power = count - layer
        else:
            power = 1 if name.partition(".")[0] in bodies and ".pooler." not in name else 0
        scales[name] = decay**power
    return scales


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        scaled = lr * group.get("scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def seed_step(seed: int, step: int, part: int, device: torch.device) -> None:
    """Dropout's randomness for one micro-batch of one process."""
    value = int(shuffle_keys(np.array([part]), seed, step)[0] >> 1)
    # torch.manual_seed would look for every kind of device there is, which takes as long as a small layer.
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
