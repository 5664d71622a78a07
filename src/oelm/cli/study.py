"""The verbs of a study: study, report, demo."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli import options, show
from oelm.cli.options import option
from oelm.errors import RunError, UserError
from oelm.study import request
from oelm.system.messages import named, notice
from oelm.system.progress import duration
from oelm.system.terminal import say

if TYPE_CHECKING:
    from oelm.study.design import Study

app = typer.Typer()


# Keys of the [study] table.
TABLE = {
    "task": option(str, "Tasks by name, with commas: oelm data list."),
    "methods": option(str, "With commas; the others are compared with the first. Default: baseline,oelm."),
    "lrs": option(str, "Learning rates to try, with commas; default: 1e-4,3e-4,1e-3."),
    "seeds": option(int, "Measured runs of each method; default: 5."),
    "until_decided": option(bool, "Add seeds, up to --max-seeds, until the data decide.", "--until-decided"),
    "max_seeds": option(int, "With --until-decided; default: 20."),
    "margin": option(
        float, "Smaller differences count as equal: points, or per cent of perplexity; default: 1."
    ),
    "jobs": option(int, "Runs side by side; default: what fits."),
    "launcher": option(str, "Where runs are trained: local (the default), workers (see oelm work) or slurm."),
}


@app.command()
@options.takes(given=options.RUN, table=TABLE)
def study(
    given: dict[str, Any],
    table: dict[str, Any],
    name: Annotated[str | None, typer.Argument(help="A shipped study or a TOML file.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Train on Slurm: --launcher slurm.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="A TOML file with keys for all your studies, such as study.slurm.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any key: study.widen=0")] = None,
    out: Annotated[Path | None, options.study_out("Default: studies/NAME.")] = None,
    stop_after: options.StopAfter = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and the time, then stop.")
    ] = False,
    import_: Annotated[
        list[Path] | None, typer.Option("--import", help="Import another machine's records, then stop.")
    ] = None,
    lang: options.Lang = "en",
    gpu: options.Gpu = None,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare methods fairly: choose each one's learning rate on validation, then measure with fresh seeds.

    Examples: oelm study --data my.csv --text body --label topic --out s;
    oelm study --task imdb --methods baseline,oelm --seeds 5 --out s; oelm study --out s (goes on)
    """
    from oelm.study.report.view import Words

    Words(lang)  # a language that does not exist must not cost a study
    others = {"--dry-run": dry_run, "--import": import_, "--json": as_json}
    if len(chosen := [name for name, value in others.items() if value]) > 1:
        raise UserError(f"{' and '.join(chosen)} do not go together; keep one")
    table |= {"launcher": "slurm"} if slurm else {}
    table["tasks"] = table.pop("task", None)
    planned, folder = request.plan_study(name, out, given, table, set_ or (), plugin or (), profile)
    request.note_few_seeds(planned)
    if dry_run:
        say(describe(planned, folder))
        say("next     the same command without --dry-run")
    elif import_:
        import_records(planned, folder, import_)
    else:
        conduct_and_report(planned, folder, options.seconds_of(stop_after), lang, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study's folder, or any folder with runs.")],
    lang: options.Lang = "en",
    as_json: options.AsJson = False,
    to: Annotated[
        Path | None,
        typer.Option("--publish", metavar="NEW", help="Write compact records into a new folder, then stop."),
    ] = None,
    plugin: options.Plugin = None,
) -> None:
    """Report on a study or on runs: report.md and report.html in their folder.

    --publish writes the records instead, a few KB a run and without your paths; a report on them gives the
    same numbers. Examples: oelm report s; oelm report s --publish results/s
    """
    from oelm.models.starts import is_study

    if to is not None:
        publish_records(folder, to, as_json)
        return
    result = request.report(folder, lang=lang)
    if as_json:
        say(json.dumps(result.to_dict(), indent=1, ensure_ascii=False))
        return
    say(result)
    say(f"\nreport   {result.written.markdown}\n         {result.html}")
    use = show.after_study(folder, result.analysis) if is_study(folder) else ""
    say(show.next_line("open the page in a browser", use))


def publish_records(source: Path, to: Path, as_json: bool) -> None:
    from oelm.study.publish import publish

    done = publish(source, to)
    if as_json:
        left_out = [problem.to_dict() for problem in done.left_out]
        answer = {"folder": str(to), "runs": done.runs, "bytes": done.bytes, "left_out": left_out}
        say(json.dumps(answer, ensure_ascii=False))
        return
    for reason in done.left_out:
        say(f"left out: {reason}")
    runs = f"{done.runs:,} run{'s' * (done.runs != 1)}"
    again = show.command("report", to)
    say(f"{to}: {runs}, {done.bytes / 1000:,.0f} KB; {again} gives the same numbers")


def describe(study: "Study", out: Path) -> str:
    """The runs a study plans, with an estimate of their time and memory."""
    from oelm.models.initial_values import sharing_draws
    from oelm.study.conduct import check_methods, estimate_run, make_launcher, prepare_settings, study_time
    from oelm.study.enough import expected_precision
    from oelm.study.folder import StudyFolder

    table = study.table
    settings = prepare_settings(study)
    with sharing_draws():
        check_methods(settings)
        estimates = [estimate_run(setting) for setting in settings]
    launcher = make_launcher(study, estimates, out)
    methods, grid = len(study.arms), len(table.lrs)
    choosing = methods * grid * table.choose_seeds if grid > 1 else 0
    seeds, measured, widens = study.looks[0], methods * study.looks[0], choosing and table.widen
    looks = ", ".join(map(str, study.looks))
    times, total, timed_here = study_time(settings, estimates, launcher, (choosing, measured))
    own = "".join(f"; {name} {arm.lr:g}" for name, arm in study.arms.items() if arm.lr)
    lines = [
        f"methods   {', '.join(map(named, study.arms))}",
        f"metric    {', '.join(dict.fromkeys(setting.metric for setting in settings))}",
        f"lrs       {', '.join(f'{lr:g}' for lr in table.lrs)}{own}"
        + (f"; up to {table.widen} more on each side while the best is at the edge" if widens else ""),
        f"seeds     {f'{table.choose_seeds} to choose the learning rate, ' * (grid > 1)}{seeds} measured"
        + (f"; looked at after {looks} until all is decided" if table.until_decided else ""),
        f"compared  {'; '.join(f'{one} - {other}' for one, other in study.contrasts)}",
    ]
    for setting, estimate, seconds in zip(settings, estimates, times, strict=True):
        lines.append(
            f"{setting.task}: {setting.config.model.name}, {choosing} trials + {measured} measured runs"
            f"{' (more where learning rates nearly tie)' if choosing else ''}, "
            f"about {estimate['memory_bytes'] / 1e9:.1f} GB and {duration(seconds)} each"
        )
    besides = "without a wider grid and near-ties" if timed_here else "within a factor of two"
    lines.append(
        f"in all    {len(settings) * (choosing + measured)} runs, {launcher.places} side by side: about "
        f"{duration(total)} ({besides})"
    )
    lines += [f"enough    {expected_precision(setting, out)}" for setting in settings]
    keys = {setting.key for setting in settings}
    done = [r for r in StudyFolder(out).records()[0] if r.completed and r.identity.setting in keys]
    if done:
        lines.append(f"done      {len(done)} of these runs are already in {out}")
    return "\n".join(lines)


def import_records(study: "Study", out: Path, sources: list[Path]) -> None:
    """Import the records of other folders that belong to this study, and print what was left out."""
    from oelm.study.conduct import prepare_settings
    from oelm.study.folder import StudyFolder

    folder = StudyFolder(out)
    with folder.lock(study):
        settings = prepare_settings(study)
        folder.save(study, settings)
        for source in sources:
            imported, refused = folder.import_records(source, settings)
            say(f"{source}: {imported} records imported")
            for reason, count in refused.items():
                say(f"  {count} left out: {reason}")
    say(f"to make the runs that are missing: {show.command('study', '--out', out)}")


def conduct_and_report(study: "Study", out: Path, limit: float | None, lang: str, as_json: bool) -> None:
    """Make the runs, write the report, and print the answer, the models' folders and what failed."""
    result = request.conduct_study(study, out, limit, lang)
    if as_json:
        say(json.dumps(result.to_dict(), ensure_ascii=False))
    else:
        say(result)
        say("")
        for folder in sorted(out.glob("runs/*/*/*/model")):
            say(f"model    {folder}")
        for name, reason in result.failed.items():
            say(f"failed   {name}: {reason}")
        say(f"report   {result.html}")
        say(show.next_line("open the report in a browser", show.after_study(out, result.analysis)))
    if result.failed and not result.measured:
        raise RunError(notice("study.nothing_measured"))


@app.command()
def demo(
    out: Annotated[Path, options.study_out()] = Path("oelm-demo"),
    lang: options.Lang = "en",
) -> None:
    """The main job on embedded data: does freezing pay on 8,530 film reviews? Some minutes on a laptop.

    Example: oelm demo
    """
    from oelm.study.design import make_study, read_study
    from oelm.study.report.view import Words

    Words(lang)  # a language that does not exist must not cost a study
    conduct_and_report(make_study(read_study("demo"), "demo"), out, None, lang, as_json=False)
