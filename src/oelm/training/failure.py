"""Of which kind an exception is that ended a run: see OUTCOMES and FAULTS in `oelm.errors`."""

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from oelm.atomic import is_out_of_memory
from oelm.errors import RunError, UserError


def failure_kind(error: BaseException) -> str:
    """The kind of failure; "software" for whatever nobody foresaw."""
    if isinstance(error, RunError):
        return error.kind
    if isinstance(error, UserError):
        return "input"
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu_memory"
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, OSError | SafetensorError):
        return "disk"
    if isinstance(error, torch.AcceleratorError):
        return "device"
    if isinstance(error, dist.DistError):
        return "process"
    return "software"
