"""Half-precision copies of the weights that are factors of matrix products, beside the optimizer's own.

Autocast makes such copies too, with a kernel for each weight and another for each gradient, which on a fast
GPU take longer than the small products between them. Here one kernel refreshes all of them (or the optimizer
does, on its way), another widens all their gradients, those of frozen weights are made once, and q, k and v
of an attention lie in one matrix. The values are the same.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import Conv1D

from oelm.models.gpt_block import SelfAttention
from oelm.models.learned import learned_layers
from oelm.speed.forward import FastForward
from oelm.system.private_torch import add_all_, copy_all_, version_of


class Bf16Copies:
    """The copies of a model's weights, made for it on its device. The model itself is not changed."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, forward: FastForward | None = None) -> None:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        copies: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self.forward = forward
        self.joint: dict[int, torch.Tensor] = {}  # q, k and v in one, by the id of their attention
        for module in model.modules():
            # Where something is learned beside q and k, they are formed anew at every step.
            if forward is not None and isinstance(module, SelfAttention) and not learned_layers(module):
                parts = (module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)
                joint = torch.cat([part.detach().to(dtype) for part in parts])
                self.joint[id(module)] = joint
                for part, rows in zip(parts, joint.chunk(3), strict=True):
                    copies[id(part)] = part, nn.Parameter(rows, part.requires_grad)
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in model.modules():
            if type(module) not in (nn.Linear, Conv1D):  # others may not want what autocast would make
                continue
            for name, own in module.named_parameters(recurse=False):
                if id(own) in embeddings:  # looked up in float32
                    continue
                if id(own) not in copies:
                    copies[id(own)] = own, nn.Parameter(own.detach().to(dtype), own.requires_grad)
                self.places.append((module, name, own, copies[id(own)][1]))
        self.pairs = list(copies.values())
        self.trained = [(own, copy) for own, copy in self.pairs if own.requires_grad]
        self.versions = self._versions()

    def refresh(self) -> None:
        """Take over what the optimizer did."""
        self._copy(self.trained)

    def follow(self) -> None:
        """Take over what others did, such as loading weights. A recorded step does not show here, nor does
        what is done through `.data`."""
        if self.versions != self._versions():
            self._copy(self.pairs)

    @torch.no_grad()
    def _copy(self, pairs: list[tuple[torch.Tensor, nn.Parameter]]) -> None:
        if pairs:
            copy_all_([copy for _, copy in pairs], [own for own, _ in pairs])
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version_of(own) for own, _ in self.pairs]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model computes with the copies while this lasts."""
        for module, name, _, copy in self.places:
            setattr(module, name, copy)
        if self.forward is not None:
            self.forward.joint = self.joint
        try:
            yield
        finally:
            for module, name, own, _ in self.places:
                setattr(module, name, own)
            if self.forward is not None:
                self.forward.joint = {}

    @torch.no_grad()
    def collect(self, rooms: Callable[[], dict[int, torch.Tensor]] = dict) -> None:
        """Give the copies' gradients to the weights, or add them to those that are there. `rooms` has places
        for them by the weights' ids."""
        places: dict[int, torch.Tensor] | None = None
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for own, copy in self.trained:
            if copy.grad is None:
                continue
            if own.grad is None:
                places = rooms() if places is None else places
                own.grad = places[id(own)] if id(own) in places else torch.empty_like(own)
                written.append((own.grad, copy.grad))
            else:
                added.append((own.grad, copy.grad))
            copy.grad = None
        if written:
            copy_all_([own for own, _ in written], [copy for _, copy in written])
        if added:
            add_all_([own for own, _ in added], [copy for _, copy in added])
