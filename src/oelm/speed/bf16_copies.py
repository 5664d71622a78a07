"""Half-precision copies of the weights in matrix products, beside the optimizer's float32 weights.

Autocast makes such copies too, with a kernel for each weight and another for each gradient, which on a fast
GPU take longer than the small products between them. Here one kernel refreshes all copies (or the optimizer's
kernel does), another widens all their gradients, copies of frozen weights are made once, and q, k and v of an
attention are one matrix. The values are the same.
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
    """The copies of a model's weights, on its device. The model itself is not changed."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, forward: FastForward | None = None) -> None:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        copies: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self.forward = forward
        self.joint: dict[int, torch.Tensor] = {}  # q, k and v in one, by the id of their attention
        for module in model.modules():
            # With learned additions, q and k are merged again at every step.
            if forward is not None and isinstance(module, SelfAttention) and not learned_layers(module):
                parts = (module.q_proj.weight, module.k_proj.weight, module.v_proj.weight)
                joint = torch.cat([part.detach().to(dtype) for part in parts])
                self.joint[id(module)] = joint
                for part, rows in zip(parts, joint.chunk(3), strict=True):
                    copies[id(part)] = part, nn.Parameter(rows, part.requires_grad)
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        for module in model.modules():
            if type(module) not in (nn.Linear, Conv1D):  # other modules may not be cast by autocast
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
        """Update the copies of trained weights after the optimizer's step."""
        self._copy(self.trained)

    def refresh_if_changed(self) -> None:
        """Update all copies if weights were changed otherwise, such as by loading. Changes by a recorded step
        or through `.data` are not noticed."""
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
        """A context in which the model computes with the copies."""
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
    def collect(self, make_gradients: Callable[[], dict[int, torch.Tensor]] = dict) -> None:
        """Move the copies' gradients to the weights, adding to existing ones. `make_gradients` returns
        tensors for them, by the weights' ids."""
        targets: dict[int, torch.Tensor] | None = None
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        for own, copy in self.trained:
            if copy.grad is None:
                continue
            if own.grad is None:
                targets = make_gradients() if targets is None else targets
                own.grad = targets[id(own)] if id(own) in targets else torch.empty_like(own)
                written.append((own.grad, copy.grad))
            else:
                added.append((own.grad, copy.grad))
            copy.grad = None
        if written:
            copy_all_([own for own, _ in written], [copy for _, copy in written])
        if added:
            add_all_([own for own, _ in added], [copy for _, copy in added])
