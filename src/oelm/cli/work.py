"""The verbs of a study on several machines: work, cancel."""

from pathlib import Path
from typing import Annotated

import typer

from oelm.cli import options, show
from oelm.errors import Interrupted
from oelm.system.terminal import say

app = typer.Typer()

Study = Annotated[Path, typer.Argument(metavar="STUDY", help="The study's folder, which the machines share.")]


@app.command()
def work(
    study: Study,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; default: what fits.", min=1)] = None,
    idle: Annotated[
        str | None,
        typer.Option(
            help="Leave after so long without a run, such as 10m, while others train not before twice "
            "--expires; default: never."
        ),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="A worker without a sign of life for so long has lost its runs.")
    ] = "90s",
    patience: Annotated[
        str | None, typer.Option(help="How long runs may take to save when told to stop; default: 100s.")
    ] = None,
    gpu: options.Gpu = None,
    plugin: options.Plugin = None,
) -> None:
    """Train runs of a study that was started with --launcher workers; any number of machines may.

    Start it wherever the study's folder is mounted, and stop it whenever you like: its runs are saved and go
    to other workers. Example: oelm work studies/x
    """
    from oelm.study.work import STOP_PATIENCE
    from oelm.study.work import work as train_runs

    limit = options.seconds_of(expires, "--expires") or 90.0
    save = options.seconds_of(patience, "--patience") or STOP_PATIENCE
    try:
        train_runs(study, jobs, options.seconds_of(idle, "--idle"), limit, say, save)
    except Interrupted as reason:
        if reason.notice.code == "stop.cancelled":  # as it was asked to
            say(str(reason))
            return
        # The signal that Slurm sends before the time limit: the rest is for another turn of this job.
        from oelm.study.slurm_jobs import requeue

        if reason.notice.values.get("signal") != "SIGUSR1" or not requeue():
            raise
        say("the time limit is near: runs are saved, and the job is queued again")


@app.command()
def cancel(study: Study) -> None:
    """Have all that trains a study's runs save and leave; oelm study --out STUDY starts it again.

    Returns when Slurm's workers have left; those that need longer than study.slurm.lead are ended.

    Example: oelm cancel studies/x
    """
    from oelm.study.folder import StudyFolder
    from oelm.study.slurm_jobs import cancel as stop_slurm

    table = StudyFolder(study).read().table
    (study / "cancel").touch()
    say(f"{study}: runs save and stop; {show.command('study', '--out', study)} starts it again")
    stop_slurm(study, float(table.slurm.lead))
