"""The command line. Each verb parses, calls and prints.

Nothing heavy is imported here, so that `oelm --help` does not wait for torch.
"""

import errno
import re
import sys
from typing import Annotated, Any

import typer

from oelm.cli import bench, claims, convert, data, doctor, experiments, explain, predict, run, study, work
from oelm.errors import REQUEUE, AuditError, Interrupted, RunError, UserError
from oelm.system.library_errors import is_out_of_memory
from oelm.system.terminal import say
from oelm.system.version import __version__

UsageError: Any = typer.BadParameter.__base__  # typer includes its own click and does not export this class

app = typer.Typer(
    name="oelm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Does freezing orthogonal query/key projections pay on your task?",
)

app.command()(experiments.experiments)
app.command()(bench.bench)
app.command()(claims.claims)
app.command()(convert.convert)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.add_typer(run.app)
app.add_typer(predict.app)
app.add_typer(study.app)
app.add_typer(work.app)
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


# Errors of a path from the user that cannot be used, wherever they are raised.
UNUSABLE = (
    errno.ENOENT, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
    errno.ELOOP, errno.EINVAL,
)  # fmt: skip


STOPPED_AT_ONCE = 130  # the exit code after Ctrl-C without time to save


def _print_error(text: str) -> None:
    """Print the last line of a command that failed; very long words are cut."""
    say("oelm: " + re.sub(r"\S{256,}", lambda match: f"{match[0][:60]}...", text), err=True)


def _explain(error: MemoryError | OSError | RuntimeError | ImportError) -> str:
    """One line on a fault of the machine or on a path that cannot be used; any other error is raised
    again."""
    if is_out_of_memory(error):
        text = " ".join(str(error).split()) or "no more is available"
        return f"out of memory: {text}; raise the limit (ulimit -v) or ask for less"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return f"no space left on the disk{where}; free some and run the same command again"
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename:
        return f"{error.filename} cannot be used: {str(error.strerror).lower()}; name another"
    raise error


def main() -> None:
    """Run the command line: exit code 2 and one line for a user's mistake, no traceback."""
    try:
        code = app(standalone_mode=False)
        if code == STOPPED_AT_ONCE:
            raise KeyboardInterrupt  # typer catches it and returns its exit code
        sys.exit(code)
    except UsageError as error:
        if text := " ".join(error.format_message().split()):  # empty without arguments: the help was shown
            verb = error.ctx.command_path if error.ctx else "oelm"
            _print_error(f"{text.rstrip('.')}; see {verb} --help")
        sys.exit(2)
    except UserError as error:
        _print_error(" ".join(str(error).splitlines()))
        sys.exit(2)
    except (AuditError, RunError) as error:
        _print_error(str(error))
        sys.exit(1)
    except Interrupted as reason:
        _print_error(f"{reason}; progress is saved: run the same command again to resume")
        sys.exit(REQUEUE)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        _print_error(_explain(error))
        sys.exit(2 if getattr(error, "errno", None) in UNUSABLE else 1)
    except KeyboardInterrupt:
        _print_error(
            "stopped at once by Ctrl-C; what was saved is kept, and the same command goes on from there"
        )
        sys.exit(STOPPED_AT_ONCE)
