"""Errors a user meets as one line, and why a run failed as data: a kind, never a text to search in."""

from collections.abc import Sequence

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


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do."""


class FolderInUse(UserError):
    """Another process holds the folder of a run."""


class AuditError(RuntimeError):
    """A frozen weight moved, lost its orthonormality, or a parameter is not as its method says."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)  # all of them; the message may leave some out


class RunError(RuntimeError):
    """A run cannot go on: what happened, of which kind (OUTCOMES, FAULTS), what to do. It can be resumed."""

    def __init__(self, reason: str, kind: str = "software", advice: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason, self.kind = reason, kind


class Interrupted(Exception):
    """A run was told to stop, and saved what it had: started again, it goes on from there."""
