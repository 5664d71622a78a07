"""Errors that are the user's to mend: the command line prints them as one line and exits with 2."""

from collections.abc import Sequence

REQUEUE = 75  # EX_TEMPFAIL: the exit code that schedulers take as "start me again"


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do."""


class AuditError(RuntimeError):
    """A frozen weight moved, lost its orthonormality, or a parameter is not as its method says."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)  # all of them; the message may leave some out


class RunError(RuntimeError):
    """A run cannot go on: no space, numbers that are not finite, nothing learned. What was saved stays."""


class Interrupted(Exception):
    """A run was told to stop, and saved what it had: started again, it goes on from there."""
