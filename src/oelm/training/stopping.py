"""Requests to stop a run: signals and a time limit."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oelm.errors import Interrupted, UserError
from oelm.system.messages import Notice, notice, sentences


@dataclass
class Stop:
    """The request to stop this process; `reason` is None without one.

    While `patient` is set, the training loop checks `reason` after each step and saves before it ends. At any
    other time there is nothing to save, and a request raises `Interrupted` at once.
    """

    reason: Notice | None = None
    patient: bool = False


@contextlib.contextmanager
def stopping(stop_after: float | None) -> Iterator[Stop]:
    """A context in which SIGTERM, SIGUSR1, Ctrl-C and the time limit request a stop. A second Ctrl-C raises
    KeyboardInterrupt."""
    stop = Stop()
    if isinstance(stop_after, str):
        raise UserError(f"stop_after is a number of seconds, such as 540, not {stop_after!r}")
    if stop_after is not None and stop_after <= 0:
        raise UserError("--stop-after needs a positive time, for example 9m")
    sentences()  # read now, as a signal can arrive during an import that reading them needs
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only; here a timer sets the reason for the loop to check.
        limit = threading.Timer(stop_after or 0, setattr, (stop, "reason", notice("stop.time_limit")))
        limit.daemon = True
        if stop_after is not None:
            limit.start()
        try:
            yield stop
        finally:
            limit.cancel()
        return
    names = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}
    if stop_after is not None:  # without a limit, SIGALRM is left to the caller
        names[signal.SIGALRM] = ""

    def on_signal(number: int, _: Any) -> None:
        if stop.reason is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        name = names[signal.Signals(number)]
        stop.reason = notice("stop.signal", signal=name) if name else notice("stop.time_limit")
        if not stop.patient:
            raise Interrupted(stop.reason)

    previous = {number: signal.signal(number, on_signal) for number in names}
    try:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, stop_after)
        yield stop
    finally:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
