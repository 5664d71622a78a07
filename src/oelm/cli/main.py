"""The command line: verbs only. Each parses, calls, prints.

Nothing heavy is imported here: `oelm --help` must not wait for torch.
"""

import errno
import sys
from typing import Annotated, Any

import typer

from oelm.cli import bench, claims, convert, data, doctor, experiments, run, study
from oelm.errors import REQUEUE, AuditError, Interrupted, RunError, UserError
from oelm.system.library_errors import is_out_of_memory
from oelm.system.terminal import say
from oelm.system.version import __version__

UsageError: Any = typer.BadParameter.__base__  # typer brings its own click and does not show this class

app = typer.Typer(
    name="oelm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does freezing orthogonal query/key projections pay on your task?",
)

app.command()(experiments.experiments)
app.command()(bench.bench)
app.command()(claims.claims)
app.command()(convert.convert)
app.command()(doctor.doctor)
app.add_typer(run.app)
app.add_typer(study.app)
app.add_typer(data.app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"oelm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: exit code 2 and one line for a user's mistake, no traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        if text := " ".join(error.format_message().split()):  # empty: no arguments, and the help is shown
            verb = error.ctx.command_path if error.ctx else "oelm"
            say(f"oelm: {text.rstrip('.')}; see {verb} --help", err=True)
        sys.exit(2)
    except UserError as error:
        say(f"oelm: {' '.join(str(error).splitlines())}", err=True)
        sys.exit(2)
    except (AuditError, RunError) as error:
        say(f"oelm: {error}", err=True)
        sys.exit(1)
    except Interrupted as reason:
        say(f"oelm: {reason}; progress is saved: run the same command again to resume", err=True)
        sys.exit(REQUEUE)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            text = " ".join(str(error).split()) or "no more is available"
            say(f"oelm: out of memory: {text}; raise the limit (ulimit -v) or ask for less", err=True)
            sys.exit(1)
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" for {error.filename}" if error.filename else ""
        say(f"oelm: no space left on the disk{where}; free some and run the same command again", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        say("oelm: stopped at once; run the same command again to resume from what was saved", err=True)
        sys.exit(130)
