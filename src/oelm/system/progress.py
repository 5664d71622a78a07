"""Progress of long work: in a terminal a bar with loss, metric, speed and time left; in a notebook a line
that is updated; elsewhere a line every QUIET_SECONDS."""

import sys
import time
from collections.abc import Callable
from typing import Any

from oelm.system.notebook import notebook_line
from oelm.system.terminal import console, say

QUIET_SECONDS = 15.0  # between two lines without a terminal


def figure(value: float) -> str:
    """A figure of any size: 0.06168, 4.14, 44,896,768."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Display:
    """Progress on stderr; `show=False` is silent, `total` is None if it is not known."""

    def __init__(self, label: str, total: int | None, start: int, show: bool, unit: str = "step") -> None:
        self.label, self.total, self.start, self.show, self.unit = label, total, start, show, unit
        self.began = time.monotonic()
        self.last_line = self.began
        self.tokens, self.step = 0, start
        self.latest: dict[str, str] = {}
        self._line = notebook_line() if show else None
        self._bar: Any = None  # made at the first step, so that a run that cannot start draws nothing

    def advance(self, step: int, tokens: int = 0) -> None:
        self.tokens, self.step = self.tokens + tokens, step
        if self._bar is None and self.show and sys.stderr.isatty():
            self._bar = _bar(self.label, self.total, self.start)
        self._show(self._rest(), self._text, completed=step)

    def _show(self, rest: str, text: Callable[[], str], **bar: Any) -> None:
        """Show `rest` beside the bar or, without a bar, `text` as a line."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], rest=rest, **bar)
        elif self._line is not None:
            self._line.show(text())
        elif self.show and time.monotonic() - self.last_line >= QUIET_SECONDS:
            self.last_line = time.monotonic()
            say(text(), err=True)

    def _text(self) -> str:
        done, taken = self.step - self.start, time.monotonic() - self.began
        left = duration(taken / done * (self.total - self.step)) if done and self.total else "?"
        position = f"{self.label}: {self.unit} {self.step}/{self.total or '?'}"
        return ", ".join(filter(None, (position, self._rest(), f"{left} left")))

    def show_evaluation(self, split: str, done: int, total: int) -> None:
        """Show the progress of an evaluation between two steps, in batches."""
        rest = f"{split}: batch {done}/{total}"
        self._show(rest, lambda: f"{self.label}: {rest}")

    def advance_to(self, done: int, total: int) -> None:
        """Show the progress of work whose total becomes known with it, such as an evaluation alone."""
        self.total = total
        self.advance(done)

    def note(self, **values: float) -> None:
        """Numbers to show from now on, such as the loss and a metric."""
        self.latest |= {name: figure(value) for name, value in values.items()}

    def say(self, text: str) -> None:
        """Print a line that stays above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.show:
            say(text, err=self._line is None)  # a notebook shows stderr as an error

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._line is not None:
            self._line.show(self._text())
            self._line.close()

    def _rest(self) -> str:
        speed = self.tokens / max(1e-9, time.monotonic() - self.began)
        numbers = [f"{k} {v}" for k, v in self.latest.items()]
        return ", ".join([*numbers, f"{speed:,.0f} tokens/s"] if self.tokens else numbers)


def _bar(label: str, total: int | None, start: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rest]}", markup=False),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    )
    bar.add_task(label, total=total, completed=start, rest="")
    bar.start()
    return bar


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 5 h 10 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
