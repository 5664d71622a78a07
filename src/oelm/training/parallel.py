"""One process or many: wrapping, precision, exchanged values, determinism. Models need no code for this."""

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from oelm.system.private_torch import release_groups
from oelm.system.private_transformers import block_class_names
from oelm.system.shards import gathered

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MESHES: list[DeviceMesh] = []  # over which this process's models are sharded


def process_state() -> PartialState:
    """Accelerate's state: the processes, and the device of this one. Without a GPU it needs `cpu=True`:
    otherwise processes started by torchrun do not connect, and each takes itself for the only one."""
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    state = PartialState(cpu=cpu or not torch.accelerator.is_available())
    if state.num_processes > 1:
        atexit.unregister(_release_process_groups)
        atexit.register(_release_process_groups)
    return state


def _release_process_groups() -> None:
    """End gloo's threads before Python exits: one that frees a tensor during the exit aborts the process
    ("terminate called without an active exception"). They end with the last reference to their group, which
    PyTorch's caches hold through the device meshes."""
    for mesh in MESHES:
        release_groups(mesh)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


@contextlib.contextmanager
def deterministic_mode(wanted: bool, device: torch.device) -> Iterator[None]:
    """Within this context the same seed gives the same bits on one kind of GPU: PyTorch uses deterministic
    operations, and raises an error where it has none. Our own kernels are deterministic anyway, and so is a
    CPU with a fixed number of threads."""
    if not wanted or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for a deterministic cuBLAS
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it only helps to find bugs, and takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def autocast_of(precision: str, device: torch.device) -> Callable[[], Any]:
    """A callable that opens the autocast context of this precision."""
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=DTYPES[precision])


def wrap(model: PreTrainedModel, state: PartialState, fsdp: bool) -> nn.Module:
    """The model as training calls it: as it is, wrapped in DDP, or sharded by FSDP2 block by block."""
    if state.num_processes == 1:
        return model
    if not fsdp:
        ids = [state.device.index] if state.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    MESHES.append(mesh)
    blocks = block_class_names(model)
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def reshard(model: nn.Module) -> None:
    """Reshard the parameters of an FSDP2 model, so that they are the tensors that the optimizer holds. After
    a forward pass without a backward pass, those outside the blocks are still unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Any:
    """Reduce gradients over processes only with the last micro-batch of a step."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    else:
        yield


def total(value: float, state: PartialState) -> float:
    if state.num_processes == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=state.device)
    dist.all_reduce(tensor)
    return float(tensor)


def gather_values(value: Any, state: PartialState | None) -> list[Any]:
    """Every process's value, in the order of the processes."""
    if state is None or state.num_processes == 1:
        return [value]
    values = [value] * state.num_processes
    dist.all_gather_object(values, value)
    return values


def any_process(flag: bool, state: PartialState) -> bool:
    return total(float(flag), state) > 0


def norm_of(parameters: list[nn.Parameter], clip: float) -> Tensor:
    """Clip the gradients to the norm `clip` (0: not at all), and return their norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"), foreach=None)
    return gathered(norm)
