"""What ended a run: of which kind it is (see OUTCOMES and FAULTS in `oelm.errors`), and how to say it."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from oelm.errors import AuditError, Interrupted, RunError, UserError
from oelm.system.files import is_out_of_memory
from oelm.training.checkpoint import Checkpoints
from oelm.training.folder import RunFolder

if TYPE_CHECKING:
    from oelm.training.run import Run

LOWER = "try a lower learning rate"


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


def explained(run: "Run | None", folder: RunFolder, error: BaseException) -> BaseException:
    """What ended the run, as the user should meet it: no disk and no memory are no bugs of ours."""
    if isinstance(error, RunError | AuditError | Interrupted) or not isinstance(error, Exception):
        return error
    kind = failure_kind(error)
    last = Checkpoints(folder.path / "checkpoints", keep=1).last() or "none"
    text = str(error).partition("\n")[0] or type(error).__name__
    if kind == "disk":
        reason = f"the run's files could not be written or read ({text}); the last good checkpoint is {last}"
        return RunError(reason, kind, "mend it and start again to resume")
    if kind in ("memory", "gpu_memory"):
        reason = f"there is not enough memory ({text}); the last good checkpoint is {last}"
        return RunError(reason, kind, "free some, or set training.accumulate: the same batches in more parts")
    if kind == "software" and torch.are_deterministic_algorithms_enabled() and "deterministic" in text:
        return RunError(text, kind, "set training.deterministic=false to go on without the same bits")
    if kind == "software" and run is not None and (name := _spoilt(run)):
        # Not every metric can be computed from what such a model answers.
        reason = f"{name} is not finite after step {run.progress.step} ({type(error).__name__}: {text})"
        return RunError(f"{reason}; the last good checkpoint is {last}", "diverged", LOWER)
    return error


def _spoilt(run: "Run") -> str | None:
    """A trained weight that is not finite, as far as this process has its weights."""
    for name, weight in run.step.raw.named_parameters():
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        if weight.requires_grad and not part.isfinite().all():
            return name
    return None
