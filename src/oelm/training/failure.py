"""Of which kind an exception is that ended a run: see OUTCOMES and FAULTS in `oelm.errors`."""

import errno

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from oelm.errors import RunError, UserError

# PyTorch's CPU allocator raises a plain RuntimeError: its text is all there is to know it by.
CPU_ALLOCATOR = ("DefaultCPUAllocator", "std::bad_alloc")


def failure_kind(error: BaseException) -> str:
    """The kind of failure; "software" for whatever nobody foresaw."""
    if isinstance(error, RunError):
        return error.kind
    if isinstance(error, UserError):
        return "input"
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu_memory"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        return "memory" if error.errno == errno.ENOMEM else "disk"
    if isinstance(error, SafetensorError):
        return "disk"
    if isinstance(error, torch.AcceleratorError):
        return "device"
    if isinstance(error, dist.DistError):
        return "process"
    if isinstance(error, RuntimeError) and any(name in str(error) for name in CPU_ALLOCATOR):
        return "memory"
    return "software"
