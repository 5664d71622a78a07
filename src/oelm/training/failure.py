"""Classify the error that ended a run (see OUTCOMES and FAULTS in `oelm.errors`), and describe it."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from oelm.errors import AuditError, Interrupted, RunError, UserError
from oelm.system.library_errors import first_line, is_not_deterministic, is_out_of_memory
from oelm.system.messages import Notice, notice
from oelm.training.checkpoint import Checkpoints
from oelm.training.folder import RunFolder

if TYPE_CHECKING:
    from oelm.training.run import Run


def failure_kind(error: BaseException) -> str:
    """The kind of failure; "software" for any other exception."""
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


def explain_failure(run: "Run | None", folder: RunFolder, error: BaseException) -> BaseException:
    """The error as it is shown to the user: a full disk or too little memory becomes a RunError with
    advice."""
    if isinstance(error, RunError | AuditError | Interrupted) or not isinstance(error, Exception):
        return error
    kind = failure_kind(error)
    last = Checkpoints(folder.path / "checkpoints", keep=1).last()
    known: dict[str, Any] = {"error": first_line(error), "checkpoint": last}
    if kind == "disk":
        return RunError(notice("run.files", **known), kind, notice("advice.repair_and_resume"))
    if kind in ("memory", "gpu_memory"):
        return RunError(notice("run.memory", **known), kind, notice("advice.accumulate"))
    if is_not_deterministic(error):
        reason = notice("run.not_deterministic", error=known["error"])
        return RunError(reason, kind, notice("advice.allow_nondeterminism"))
    if kind == "software" and run is not None and (name := _weight_not_finite(run)):
        # With such weights computing a metric may fail before the loss is checked.
        known |= {"name": name, "step": run.progress.step, "error": reason_of(error)}
        return RunError(notice("run.no_answer", **known), "diverged", notice("advice.lower_lr"))
    return error


def reason_of(error: BaseException) -> Notice:
    """The reason that a record gives for the end of a run."""
    if isinstance(error, AuditError) and error.problems:
        return notice("run.audit_failed", count=len(error.problems), first=error.problems[0])
    if isinstance(error, RunError | UserError | AuditError | Interrupted):
        return error.notice
    if isinstance(error, KeyboardInterrupt):
        return notice("stop.signal", signal="Ctrl-C")
    return notice("run.error", type=type(error).__name__, text=first_line(error))


def _weight_not_finite(run: "Run") -> str | None:
    """The name of a trained weight that is not finite, in this process's part of the model; None if all
    are."""
    for name, weight in run.step.raw.named_parameters():
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        if weight.requires_grad and not part.isfinite().all():
            return name
    return None
