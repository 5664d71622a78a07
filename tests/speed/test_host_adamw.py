"""AdamW on a CPU without what PyTorch puts around it: PyTorch's steps, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from oelm.speed.adamw import HostAdamW, clip_in_step
from oelm.system.private_torch import fault_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 37), nn.GELU(), nn.Linear(37, 3))


def optimizer_of(kind, net):
    embedding, *weights = (p for p in net.parameters() if p.dim() > 1)
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-3},
        {"params": [embedding]},
    ]
    return kind(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-5, fused=True)


def train(kind, clip, steps=8):
    """A layer is frozen at first, an embedding has no gradient, there are faults, moments are restored."""
    net = model()
    optimizer = optimizer_of(kind, net)
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        if number == 5:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        net[1].requires_grad_(number > 2)
        ids, labels = (
            torch.randint(50, (9,), generator=generator),
            torch.randint(3, (9,), generator=generator),
        )
        inputs = net[0](ids) if number % 2 else net[0](ids).detach()
        nn.functional.cross_entropy(net[1:](inputs) * (5.0 if number else 1.0), labels).backward()
        if clip is not None:
            clip_in_step(optimizer, list(net.parameters()), clip)
            fault_of(optimizer).fill_(number in (0, 4))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number != 3)
    return net, optimizer


@pytest.mark.parametrize("clip", [None, 0.0, 0.01, 10.0])
def test_steps_are_pytorchs(clip):
    (net, ours), (other, theirs) = train(HostAdamW, clip), train(torch.optim.AdamW, clip)
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    mine, its = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == its.keys() and len(its) == 5
    for number, values in its.items():
        assert values.keys() == mine[number].keys()
        assert all(torch.equal(value, mine[number][name]) for name, value in values.items())


def test_after_a_fault_nothing_changes():
    net = model()
    optimizer = optimizer_of(HostAdamW, net)
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.arange(5)).sum().mul(torch.inf).backward()
    clip_in_step(optimizer, list(net.parameters()), 1.0)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_hooks_are_called():
    """The benchmark counts bytes in one."""
    net, called = model(), []
    optimizer = optimizer_of(HostAdamW, net)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    net(torch.arange(5)).sum().backward()
    optimizer.step()
    assert called == [1]
