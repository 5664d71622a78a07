"""One line of output in a notebook that is written anew, as a progress bar is in a terminal."""

import sys
import time
from typing import Any

PAUSE = 0.25  # seconds between two updates


class NotebookLine:
    """A line below the cell, from its first `show` on."""

    def __init__(self) -> None:
        self.shown, self.latest, self.last = "", "", 0.0
        self._handle: Any = None

    def show(self, text: str) -> None:
        self.latest = text
        if time.monotonic() - self.last >= PAUSE:
            self._write()

    def close(self) -> None:
        """Leave the latest text."""
        if self.latest != self.shown:
            self._write()

    def _write(self) -> None:
        from IPython.display import display

        self.shown, self.last = self.latest, time.monotonic()
        content = {"text/plain": self.latest}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def notebook_line() -> NotebookLine | None:
    """A line of its own where this process is a notebook's kernel."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    return NotebookLine() if hasattr(get_ipython(), "kernel") else None
