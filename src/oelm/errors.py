"""Errors that are the user's to mend: the command line prints them as one line and exits with 2."""

REQUEUE = 75  # EX_TEMPFAIL: the exit code that schedulers take as "start me again"


class UserError(ValueError):
    """Something the user gave cannot be used. The message says what, where, and what to do."""


class AuditError(RuntimeError):
    """A frozen weight moved, lost its orthonormality, or a parameter is not as its method says."""


class RunError(RuntimeError):
    """A run cannot go on: no space, numbers that are not finite, nothing learned. What was saved stays."""


class Interrupted(Exception):
    """A run was told to stop, and saved what it had: started again, it goes on from there."""
