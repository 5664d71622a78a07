"""Errors that a user sees as one line, and the kinds of failure in a record."""

from collections.abc import Sequence

from oelm.system.messages import Notice, notice

REQUEUE = 75  # EX_TEMPFAIL: the exit code that schedulers take as "start me again"


# Kinds of failure. An outcome is a result of the method and excludes a learning rate. A fault is not: the run
# is repeated, and no conclusion is drawn without it.
OUTCOMES = {
    "diverged": "a loss, gradient or weight is not finite",
    "at_chance": "stopped at chance level, where training.stop_at_chance asks for it",
}
FAULTS = {
    "memory": "the machine is out of memory",
    "gpu_memory": "the GPU is out of memory",
    "disk": "files could not be written or read",
    "process": "a process was lost or told to stop",
    "device": "the GPU failed",
    "software": "a bug",
    "input": "an input cannot be used",
    "unknown": "an older record that does not say why",
}


class _NoticeError(Exception):
    """An error whose message is a notice, so that a record can hold it; a plain text has no code."""

    def __init__(self, message: str | Notice = "") -> None:
        super().__init__(str(message))
        self.notice = message if isinstance(message, Notice) else notice("text", text=message)


class UserError(_NoticeError, ValueError):
    """An input cannot be used. The message says what is wrong, where, and what to do, in one line."""


class FolderInUse(UserError):
    """Another process has locked the folder of a run."""


class AuditError(_NoticeError, RuntimeError):
    """A frozen weight changed or is not orthonormal, or a parameter is not frozen as its method says."""

    def __init__(self, message: str | Notice, problems: Sequence[Notice] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)  # all of them; the message may leave some out


class RunError(_NoticeError, RuntimeError):
    """A run failed: the reason, its kind (a key of OUTCOMES or FAULTS), what to do. It can be resumed."""

    def __init__(self, reason: str | Notice, kind: str = "software", advice: Notice | None = None) -> None:
        super().__init__(reason)
        self.kind, self.advice = kind, advice

    def __str__(self) -> str:
        return f"{self.notice}; {self.advice}" if self.advice else str(self.notice)


class Interrupted(_NoticeError):
    """A run stopped on a signal or request and saved a checkpoint: the same command resumes it."""
