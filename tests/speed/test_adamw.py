"""The optimizer's step on a CPU, beside PyTorch's: the same bits."""

import copy

import pytest
import torch
from torch import nn

from oelm.speed.adamw import CpuAdamW, can_be_on_a_cpu, clip_in_step
from oelm.system.private_torch import fault_of


def optimizer_of(kind):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (3,), (), (5, 4), (2, 2)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups = [
        {"params": weights[:2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": weights[2:4], "weight_decay": 0.0, "lr": 1e-1},
        {"params": weights[4:], "weight_decay": 0.5, "lr": 1.0},
    ]
    return weights, kind(groups, betas=(0.8, 0.95), eps=1e-6, fused=True)


def train(kind, clip, fault_at, other_from=99):
    """Some steps: weight 3 has a gradient from the second on, weight 4 never has one. From step `other_from`
    on another optimizer goes on with what this one has saved."""
    weights, optimizer = optimizer_of(kind)
    generator = torch.Generator().manual_seed(1)
    for number in range(6):
        if number == other_from:
            before, saved = weights, copy.deepcopy(optimizer.state_dict())
            weights, optimizer = optimizer_of(kind)
            optimizer.load_state_dict(saved)
            for weight, trained in zip(weights, before, strict=True):
                weight.data.copy_(trained.data)
        if number == 4 and fault_at is None:  # as a schedule does that freezes it for a while
            optimizer.state.pop(weights[1], None)
        for weight in weights[: 3 if number == 0 else 4]:
            weight.grad = torch.randn(weight.shape, generator=generator) * 10
        if number == fault_at:
            weights[0].grad[0] = torch.nan
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        clip_in_step(optimizer, weights, clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights, optimizer


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("fault_at", [None, 3])
def test_steps_on_a_cpu_are_pytorchs(clip, fault_at):
    ours, optimizer = train(CpuAdamW, clip, fault_at)
    theirs, reference = train(torch.optim.AdamW, clip, fault_at)
    assert float(fault_of(optimizer)) == (fault_at is not None)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        states = optimizer.state.get(mine, {}), reference.state.get(other, {})
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert ours[4] not in optimizer.state and len(optimizer.state) == 4


def test_steps_go_on_from_what_was_saved():
    for kind in (CpuAdamW, torch.optim.AdamW):  # each goes on with what it saved; the states are alike
        ours, _ = train(kind, 1.0, None, other_from=3)
        unbroken, _ = train(CpuAdamW, 1.0, None)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, unbroken, strict=True))


def test_it_is_for_float32_weights_of_one_process_on_a_cpu():
    weight = nn.Parameter(torch.ones(2))
    assert can_be_on_a_cpu([weight])
    assert not can_be_on_a_cpu([weight, nn.Parameter(torch.ones(2).bfloat16())])
    assert not can_be_on_a_cpu([nn.Parameter(torch.ones(2, device="meta"))])

    class Part(torch.Tensor):
        """As a part of a weight that several processes share is a class of its own."""

    assert not can_be_on_a_cpu([nn.Parameter(torch.ones(2).as_subclass(Part))])
