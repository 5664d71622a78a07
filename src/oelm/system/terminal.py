"""All output of the package, without control characters: a label or file name must not control the
terminal."""

import errno
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters except tab and newline, marks of text direction, halves of surrogate pairs.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Text with characters that could control a terminal written as `\\u001b`, which is valid in JSON,
    too."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: Any = "", err: bool = False) -> None:
    """Print a line to standard output, or to standard error.

    Standard error only shows progress and warnings, so a closed pipe or a lost terminal there is ignored. If
    nobody reads standard output any more (`| head`), the process ends with exit code 0.
    """
    stream = sys.stderr if err else sys.stdout
    try:
        print(plain(str(text)), file=stream, flush=True)
    except OSError as error:
        if not err and error.errno != errno.EPIPE:
            raise
        silence(stream)
        if not err:
            raise SystemExit(0) from None


def columns(most: int) -> int:
    """The width of text on standard output: `most`, or less in a narrower terminal."""
    if not sys.stdout.isatty():
        return most
    return max(40, min(most, shutil.get_terminal_size((most, 24)).columns))


def reserve_stdout() -> TextIO:
    """A stream to standard output for the answers to a parent process. Everything else that is printed from
    now on, by a plugin or a library, goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def silence(stream: TextIO) -> None:
    """Redirect a stream that can no longer be written to the null device."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def console(**options: Any) -> "Console":
    """A rich Console whose texts pass through `plain`; its own control codes are kept."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            for segment in super().render(*args, **kwargs):
                yield segment if segment.control else Segment(plain(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            self.quiet = True
            silence(sys.stderr if self.stderr else sys.stdout)
            if not self.stderr:
                raise SystemExit(0)

    return PlainConsole(**options, force_jupyter=False)  # in a notebook rich would display by itself
