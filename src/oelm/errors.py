"""Errors a user meets as one line, and why a run failed as data: a kind, never a text to search in."""

from collections.abc import Sequence

from oelm.system.messages import Notice, notice

REQUEUE = 75  # EX_TEMPFAIL: the exit code that schedulers take as "start me again"


# Kinds of failure. Only an outcome says something about the method, and only an outcome rules a learning
# rate out. Everything else is a fault: the run is made again, and no conclusion is drawn without it.
OUTCOMES = {
    "diverged": "a loss, gradient or weight is not finite",
    "at_chance": "stopped at chance level, where training.stop_at_chance asks for it",
}
FAULTS = {
    "memory": "the machine has no memory left",
    "gpu_memory": "the GPU has no memory left",
    "disk": "files could not be written or read",
    "process": "a process was lost or told to stop",
    "device": "the GPU failed",
    "software": "an error in the software",
    "input": "something given cannot be used",
    "unknown": "the record, an old one, does not say why",
}


class _Told(Exception):
    """An error with its message as a notice, for records; a plain text is one without a code."""

    def __init__(self, message: str | Notice = "") -> None:
        super().__init__(str(message))
        self.notice = message if isinstance(message, Notice) else notice("text", text=message)


class UserError(_Told, ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do."""


class FolderInUse(UserError):
    """Another process holds the folder of a run."""


class AuditError(_Told, RuntimeError):
    """A frozen weight moved, lost its orthonormality, or a parameter is not as its method says."""

    def __init__(self, message: str | Notice, problems: Sequence[Notice] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)  # all of them; the message may leave some out


class RunError(_Told, RuntimeError):
    """A run cannot go on: what happened, of which kind (OUTCOMES, FAULTS), what to do. It can be resumed."""

    def __init__(self, reason: str | Notice, kind: str = "software", advice: Notice | None = None) -> None:
        super().__init__(reason)
        self.kind, self.advice = kind, advice

    def __str__(self) -> str:
        return f"{self.notice}; {self.advice}" if self.advice else str(self.notice)


class Interrupted(_Told):
    """A run was told to stop, and saved what it had: started again, it goes on from there."""
