"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from oelm.system.terminal import console, say

QUIET_SECONDS = 10.0  # between two lines where there is no terminal; short work prints none


@contextlib.contextmanager
def progress(label: str, total: int | None, unit: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`; `total` is None where nobody can know it."""
    if not show:
        yield lambda n: None
    elif sys.stderr.isatty():
        with _bar(label, total) as advance:
            yield advance
    else:
        yield _lines(label, total, unit)


@contextlib.contextmanager
def _bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


def _lines(label: str, total: int | None, unit: str) -> Callable[[int], None]:
    started = last = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= QUIET_SECONDS:
            last = now
            rate = done / (now - started)
            of, left = (f" of {total:,}", f", {(total - done) / rate:.0f} s left") if total else ("", "")
            say(f"{label}: {done:,}{of} {unit}, {rate:,.0f} a second{left}", err=True)

    return advance
