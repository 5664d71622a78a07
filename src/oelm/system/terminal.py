"""All output goes through here: a label or a file's name must not control the terminal."""

import errno
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters but tab and newline, marks that turn the direction of text, halves of surrogate pairs.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Text with every character that could control a terminal as `\\u001b`, which means the same in JSON."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def say(text: Any = "", err: bool = False) -> None:
    """Print a line to standard output, or to standard error.

    What goes to standard error only accompanies the work, so a closed pipe or a lost terminal there is no
    error. Without a reader of standard output (`| head`) there is nothing left to do: the process ends.
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
    """The width of text on standard output: `most`, or less where that is a narrower terminal."""
    if not sys.stdout.isatty():
        return most
    return max(40, min(most, shutil.get_terminal_size((most, 24)).columns))


def answers_alone() -> TextIO:
    """Standard output for the answers of a process that another one reads. From here on everything else that
    is printed, by a plugin or a library, goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def silence(stream: TextIO) -> None:
    """Let a stream that cannot be written any more write to nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def console(**options: Any) -> "Console":
    """A rich Console whose texts are made `plain`; its own colours and movements stay."""
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

    return PlainConsole(**options, force_jupyter=False)  # or it displays in a notebook what it shall render
