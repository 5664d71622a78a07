"""A line of output in a notebook that is updated in place, as a progress bar in a terminal."""

import sys
import time
from typing import Any

PAUSE = 0.25  # seconds between two updates


class NotebookLine:
    """A line below the cell, which appears with the first `show`."""

    def __init__(self) -> None:
        self.shown, self.latest, self.last = "", "", 0.0
        self._handle: Any = None

    def show(self, text: str) -> None:
        self.latest = text
        if time.monotonic() - self.last >= PAUSE:
            self._write()

    def close(self) -> None:
        """Show the latest text, which stays."""
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
    """A new line if this process is a notebook's kernel, else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    return NotebookLine() if hasattr(get_ipython(), "kernel") else None
