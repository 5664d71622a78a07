"""How a run is told to stop: signals and a time limit."""

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
    """Why this process was told to stop, if it was. `patient` while steps are made: the loop looks at
    `reason` after each and saves before it leaves. At any other time all that is worth keeping is on disk,
    and the order is obeyed at once."""

    reason: Notice | None = None
    patient: bool = False


@contextlib.contextmanager
def stopping(stop_after: float | None) -> Iterator[Stop]:
    """SIGTERM, SIGUSR1, Ctrl-C and the time limit ask a run to save and leave. A second Ctrl-C does not
    ask."""
    stop = Stop()
    if stop_after is not None and stop_after <= 0:
        raise UserError("--stop-after needs a positive time, for example 9m")
    sentences()  # a signal can arrive in the middle of an import that reading them needs
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only: here the time limit is seen where the run looks.
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
    if stop_after is not None:  # without a limit the alarm stays its owner's
        names[signal.SIGALRM] = ""

    def ask(number: int, _: Any) -> None:
        if stop.reason is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        name = names[signal.Signals(number)]
        stop.reason = notice("stop.signal", signal=name) if name else notice("stop.time_limit")
        if not stop.patient:
            raise Interrupted(stop.reason)

    previous = {number: signal.signal(number, ask) for number in names}
    try:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, stop_after)
        yield stop
    finally:
        if stop_after is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
