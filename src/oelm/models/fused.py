"""Fused Q/K/V as three parameters and one matrix product.

Some architectures store query, key and value as one matrix. A part of a parameter cannot be frozen: with its
gradient masked, AdamW's weight decay would still shrink it. Three products instead of one would take more
time than freezing saves. So the parameter is split and the product is not: the forward pass is one matrix
multiplication, and the backward pass computes weight gradients for the trainable parts only.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Conv1D

from oelm.models.learned import effective

PARTS = ("q", "k", "v")


def as_linear(module: nn.Module) -> Tensor:
    """A projection's weight as `nn.Linear` stores it, (out, in). A view: writing to it writes the weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight


def part_view(tensor: Tensor, index: int, heads: int, layout: str) -> Tensor:
    """The q (0), k (1) or v (2) share of a fused tensor's first dimension, as a view. "concat" stores all of
    q, then all of k, then all of v; "per-head" stores q, k and v of head 0, then those of head 1, and so
    on."""
    if layout == "concat":
        return tensor.unflatten(0, (3, -1))[index]
    return tensor.unflatten(0, (heads, 3, -1))[:, index]


def fuse(parts: Sequence[Tensor], heads: int, layout: str) -> Tensor:
    """The inverse of `part_view`: q, k and v of equal shape into one tensor."""
    if layout == "concat":
        return torch.cat(list(parts))
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


class _PackedProduct(torch.autograd.Function):
    """x @ weight.T + bias, whose backward computes weight gradients for the trainable parts only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pick: tuple[int, str], *trained: Any
    ) -> Tensor:
        # `trained` holds weight and bias of every part, None where frozen. Their values are in `weight`
        # already; they are passed so that autograd gives them their gradients.
        ctx.save_for_backward(x, weight)
        ctx.pick = pick
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        heads, layout = ctx.pick
        wanted = ctx.needs_input_grad[4:]
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        grads: list[Tensor | None] = [None] * len(wanted)
        if layout == "concat" and wanted == (True, False) * 3:
            grads[::2] = (flat_grad.t() @ flat_x).chunk(3)
            return (grad_x, None, None, None, *grads)
        for index in range(3):
            if not any(wanted[2 * index : 2 * index + 2]):
                continue
            part = part_view(flat_grad.t(), index, heads, layout).reshape(-1, flat_grad.shape[0])
            if wanted[2 * index]:
                grads[2 * index] = part @ flat_x
            if wanted[2 * index + 1]:
                grads[2 * index + 1] = part.sum(1)
        return (grad_x, None, None, None, *grads)


class _SplitProduct(torch.autograd.Function):
    """`_PackedProduct` without a bias and with one output per part, so that gradients need not be split. No
    gradient flows through the first `constant` outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, constant: int, *trained: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.constant = constant
        return F.linear(x, weight).chunk(len(trained), -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        count, first = len(grads), ctx.constant
        flat_x = x.flatten(0, -2)
        # Only the concatenation is used below, so that the memory of the parts can be freed.
        flowing = [grad.flatten(0, -2) for grad in grads[first:]]
        together = torch.cat(flowing, -1) if len(flowing) > 1 else flowing[0]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (together @ weight[first * len(weight) // count :]).view_as(x)
        grad_weights: list[Tensor | None] = [None] * count
        wanted = ctx.needs_input_grad[3 + first :]
        if all(wanted):
            grad_weights[first:] = (together.t() @ flat_x).chunk(len(wanted))
        else:
            parts = together.chunk(len(wanted), -1)
            grad_weights[first:] = [
                grad.t() @ flat_x if want else None for grad, want in zip(parts, wanted, strict=True)
            ]
        return (grad_x, None, None, *grad_weights)


def packed_linear(
    x: Tensor, parts: Sequence[nn.Linear], heads: int, layout: str = "concat", joint: Tensor | None = None
) -> Tensor:
    """The outputs of the q, k and v projections in one fused tensor, by one matrix product. `joint` is their
    fused weight, if it exists already."""
    every = [tensor for part in parts for tensor in effective(part)]
    weights = [weight for weight in every[::2] if weight is not None]
    biases = [bias for bias in every[1::2] if bias is not None] or None
    if joint is None and _alike([*weights, *(biases or [])]):
        bias = None if biases is None else fuse(biases, heads, layout)
        return F.linear(x, fuse(weights, heads, layout), bias)
    with torch.no_grad():
        weight = fuse(weights, heads, layout) if joint is None else joint
        bias = None if biases is None else fuse(biases, heads, layout)
    trained = [tensor if tensor is not None and tensor.requires_grad else None for tensor in every]
    return _PackedProduct.apply(*as_autocast(x, weight, bias), (heads, layout), *trained)


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them need a gradient, or none."""
    return len({tensor.requires_grad for tensor in tensors}) == 1


def split_linear(
    x: Tensor, parts: Sequence[nn.Linear], joint: Tensor | None = None, constant: int = 0
) -> tuple[Tensor, ...]:
    """The outputs of several projections of one input, all without bias, by one matrix product. `joint` is
    their concatenated weight, if it exists already. No gradient flows through the first `constant`
    outputs."""
    weights = [effective(part)[0] for part in parts]
    if joint is None and not constant and _alike(weights):
        return F.linear(x, torch.cat(weights)).chunk(len(parts), -1)
    with torch.no_grad():
        weight = torch.cat(weights) if joint is None else joint
    x, weight, _ = as_autocast(x, weight, None)
    trained = [weight if weight.requires_grad else None for weight in weights]
    if torch.is_grad_enabled() and (x.requires_grad or any(t is not None for t in trained)):
        return _SplitProduct.apply(x, weight, constant, *trained)
    return F.linear(x, weight).chunk(len(parts), -1)


def as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments cast as autocast would cast them, as it does not act in a custom function's backward."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class SplitQKV(nn.Module):
    """Replaces a fused projection: same outputs, same state dict, but q, k and v are parameters of their own
    (`q.weight`, `k.weight`, ...), so that each can be frozen by itself."""

    def __init__(self, fused: nn.Linear | Conv1D, heads: int, layout: str) -> None:
        super().__init__()
        self.heads, self.layout = heads, layout
        self.transposed = isinstance(fused, Conv1D)
        weight, bias = as_linear(fused), fused.bias
        for index, name in enumerate(PARTS):
            part = nn.Linear(weight.shape[1], weight.shape[0] // 3, bias=bias is not None, device="meta")
            part.weight = nn.Parameter(_contiguous_part(weight, index, heads, layout), weight.requires_grad)
            if bias is not None:
                part.bias = nn.Parameter(_contiguous_part(bias, index, heads, layout), bias.requires_grad)
            self.add_module(name, part)
        self.register_state_dict_post_hook(_save_fused)
        self.register_load_state_dict_pre_hook(_load_fused)

    @property
    def parts(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in PARTS]

    # Read by code that knows the fused module, such as torch.distributed.checkpoint.
    @property
    def weight(self) -> Tensor:
        weight = fuse([effective(part)[0] for part in self.parts], self.heads, self.layout)
        return weight.t().contiguous() if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        biases = [bias for part in self.parts if (bias := effective(part)[1]) is not None]
        return fuse(biases, self.heads, self.layout) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] == 1 and not torch.is_grad_enabled():  # one token, in generation
            outputs = [part(x).movedim(-1, 0) for part in self.parts]
            return fuse(outputs, self.heads, self.layout).movedim(0, -1)
        return packed_linear(x, self.parts, self.heads, self.layout)

    def to_fused(self) -> nn.Linear | Conv1D:
        """A fused module like the one that was replaced, with the current weights."""
        weight, bias = self.weight.detach(), self.bias
        out, in_ = reversed(weight.shape) if self.transposed else weight.shape
        fused: nn.Linear | Conv1D
        fused = Conv1D(out, in_) if self.transposed else nn.Linear(in_, out, bias=bias is not None)
        fused.weight = nn.Parameter(weight, any(part.weight.requires_grad for part in self.parts))
        if bias is not None:
            fused.bias = nn.Parameter(bias.detach(), any(part.bias.requires_grad for part in self.parts))
        return fused


def _contiguous_part(tensor: Tensor, index: int, heads: int, layout: str) -> Tensor:
    part = part_view(tensor.detach(), index, heads, layout)
    return part.reshape(-1, *tensor.shape[1:]).contiguous().clone()


def _save_fused(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, SplitQKV)
    for kind in ("weight", "bias"):
        keys = [f"{prefix}{name}.{kind}" for name in PARTS]
        if keys[0] in state:
            tensor = fuse([state.pop(key) for key in keys], module.heads, module.layout)
            state[prefix + kind] = (
                tensor.t().contiguous() if module.transposed and kind == "weight" else tensor
            )


def _load_fused(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, SplitQKV)
    for kind in ("weight", "bias"):
        tensor = state.pop(prefix + kind, None)
        if tensor is not None:
            tensor = tensor.t() if module.transposed and kind == "weight" else tensor
            for index, name in enumerate(PARTS):
                state[f"{prefix}{name}.{kind}"] = _contiguous_part(tensor, index, module.heads, module.layout)
