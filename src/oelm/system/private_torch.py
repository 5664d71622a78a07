"""The private and unstable parts of PyTorch that this package uses, each behind a function with a test."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # builds of torch without flash attention
    varlen_attn = None  # type: ignore[assignment]


def version_of(tensor: Tensor) -> int:
    """A counter that grows with every change of the tensor in place, but not with one through `.data`."""
    return tensor._version


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its target, on a GPU by one kernel."""
    torch._foreach_copy_(targets, sources)


def add_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add every source to its target, on a GPU by one kernel."""
    torch._foreach_add_(targets, sources)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """`nn.utils.get_total_norm`, without its grouping if all tensors have one device and dtype."""
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) != 1:
        return nn.utils.get_total_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def fused_adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    **settings: Any,
) -> None:
    """A step of AdamW on the weights and their two moments, in place. `steps` are the numbers of the step,
    from 1; the settings are lr, beta1, beta2, weight_decay and eps, and optionally grad_scale, by which the
    gradients are divided."""
    tensors: Any = weights, gradients, means, squares, [], steps
    torch._fused_adamw_(*tensors, amsgrad=False, maximize=False, **settings)


def end_failed_recording(device: torch.device, pool: Any) -> None:
    """Reset the allocator and the random number generator of a device after the recording of a CUDA graph
    failed. They stay in recording mode, in which later recordings into this memory pool fail, and so does
    dropout. Graphs recorded before are invalid afterwards: the generator they draw from is no longer
    seeded."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it had not begun
        torch._C._cuda_endAllocateToPool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def divide_gradients_in_step(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    """Make every step of a fused optimizer divide the gradients by `divisor`, float32, as it reads them."""
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]


def divisor_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The divisor of a fused optimizer's gradients; None if they are not divided."""
    return getattr(optimizer, "grad_scale", None)


def fault_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """A flag, 0 at first. While it is 1, the steps of a fused optimizer change nothing."""
    if not hasattr(optimizer, "found_inf"):
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    return optimizer.found_inf  # type: ignore[attr-defined]


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """A copy of a layer whose only parameter is this weight, which is not trained."""
    other = copy.copy(module)
    other._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    return other


class Undrawn(TorchFunctionMode):
    """A context in which `torch.nn.init` does nothing: the weights of new layers are uninitialised, and
    torch's generator does not advance."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (compiled := dict(model.named_children()).get("_orig_mod")) is not None:
            model = compiled
        else:
            return model


def release_groups(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its process groups. Before PyTorch 2.13 it keeps only their names."""
    getattr(mesh, "_pg_registry", {}).clear()
