"""The verbs of a study: study, report, demo."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli import options as options
from oelm.cli.run import seconds_of
from oelm.errors import RunError, UserError
from oelm.system.messages import notice
from oelm.system.terminal import say

if TYPE_CHECKING:
    from oelm.study.design import Study

app = typer.Typer()


@app.command()
def study(
    name: Annotated[str | None, typer.Argument(help="A shipped study or a TOML file.")] = None,
    task: Annotated[str | None, typer.Option(help="Tasks by name, with commas: oelm data list.")] = None,
    data: options.Data = None,
    text: options.Text = None,
    text_pair: options.TextPair = None,
    label: options.Label = None,
    target: options.Target = None,
    test_file: options.TestFile = None,
    train_size: options.TrainSize = None,
    train_on: options.TrainOn = None,
    max_length: options.MaxLength = None,
    max_target_length: options.MaxTargetLength = None,
    tokenizer: options.Tokenizer = None,
    data_dir: options.DataDir = None,
    model: options.Model = None,
    methods: Annotated[str | None, typer.Option(help="With commas; the first is the reference.")] = None,
    lrs: Annotated[str | None, typer.Option(help="The grid of learning rates, with commas.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Measured runs of each method.")] = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    batch_tokens: options.BatchTokens = None,
    precision: options.Precision = None,
    margin: Annotated[float | None, typer.Option(help="Points (per cent of PPL) that do not matter.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; default: what fits.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any key: study.widen=0")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The study's folder; it goes on where it was.", callback=options.new_folder),
    ] = None,
    stop_after: options.StopAfter = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and the time, then stop.")
    ] = False,
    import_: Annotated[
        list[Path] | None, typer.Option("--import", help="Bring in another machine's records, then stop.")
    ] = None,
    lang: Annotated[str, typer.Option(help="Of the report: en or zh.")] = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Compare methods fairly: choose each one's rate on validation, then measure it with fresh seeds.

    Examples: oelm study --data my.csv --text body --label topic --out s;
    oelm study --task imdb --methods baseline,oelm --seeds 5 --out s; oelm study --out s (goes on)
    """
    from oelm.study.folder import StudyFolder
    from oelm.study.report.words import Words

    given = locals()
    Words(lang)  # a language that does not exist must not cost a study
    found = resolve_study(name, out, given, set_ or [])
    folder = out or Path("studies") / Path(name or data or (task or "study").replace(",", "-")).stem
    StudyFolder(folder).check(found)  # before anything is imported or prepared
    limit = seconds_of(stop_after) if stop_after is not None else None
    if dry_run:
        say(describe(found, folder))
    elif import_:
        bring_in(found, folder, import_)
    else:
        conduct_and_report(found, folder, limit, lang, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study's folder, or any folder with runs.")],
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    as_json: Annotated[bool, typer.Option("--json", help="Print the analysis as JSON.")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--publish", metavar="NEW", help="Write compact records into a new folder, then stop."),
    ] = None,
) -> None:
    """Report on a study or on runs: report.md and report.html in their folder.

    --publish writes the records instead, a few KB a run and without your paths; a report on them gives the
    same numbers. Examples: oelm report s; oelm report s --publish results/s
    """
    from oelm.study.report import as_plain, summary, write_report

    if to is not None:
        publish_records(folder, to, as_json)
        return
    written = write_report(folder, lang)
    if as_json:
        say(json.dumps(as_plain(written.analysis, lang), indent=1, ensure_ascii=False))
        return
    say(summary(written.analysis, lang))
    say(f"\n{written.markdown}\n{written.html}")


def publish_records(source: Path, to: Path, as_json: bool) -> None:
    from oelm.study.publish import publish

    done = publish(source, to)
    if as_json:
        left_out = [problem.to_dict() for problem in done.left_out]
        answer = {"folder": str(to), "runs": done.runs, "bytes": done.bytes, "left_out": left_out}
        typer.echo(json.dumps(answer, ensure_ascii=False))
        return
    for reason in done.left_out:
        typer.echo(f"left out: {reason}")
    runs = f"{done.runs:,} run{'s' * (done.runs != 1)}"
    typer.echo(f"{to}: {runs}, {done.bytes / 1000:,.0f} KB; oelm report {to} gives the same numbers")


def resolve_study(
    name: str | None, out: Path | None, given: dict[str, Any], assignments: list[str]
) -> "Study":
    """From the general to the particular: the study in the folder or by name, flags, --set."""
    from oelm.config import FLAGS, from_assignment, merge, nest, update
    from oelm.study.design import make_study, read_study
    from oelm.study.folder import StudyFolder

    flags = {
        path: given[flag] for flag, path in FLAGS.items() if given.get(flag) is not None and flag != "task"
    }
    for flag in ("seeds", "margin", "jobs"):
        if given[flag] is not None:
            flags[f"study.{flag}"] = given[flag]
    if given["data"] is not None and given["task"] is None:
        flags["study.tasks"] = []  # a file in place of the tasks that a study names
    for flag, key in (("task", "tasks"), ("methods", "methods"), ("lrs", "lrs")):
        if given[flag] is not None:
            flags[f"study.{key}"] = [part.strip() for part in given[flag].split(",") if part.strip()]
    values: dict[str, Any] = {}
    if name is not None:
        values = read_study(name)
    elif out is not None and (out / "study.toml").is_file():
        values = StudyFolder(out).read().to_dict()
    elif not flags:
        raise UserError("name a study, a task (--task) or a file (--data); see oelm study --help")
    particular: dict[str, Any] = {}
    for part in [*(nest(path, value) for path, value in flags.items()), *map(from_assignment, assignments)]:
        update(particular, part)
    return make_study(merge(values, particular), name or "options")


def describe(study: "Study", out: Path) -> str:
    """The matrix with an estimate of time."""
    from oelm.study.conduct import check_methods, estimate_run, prepare_settings, slots_for
    from oelm.study.folder import StudyFolder
    from oelm.training.display import duration

    table = study.table
    settings = prepare_settings(study, show=True)
    check_methods(settings)
    estimates = [estimate_run(setting) for setting in settings]
    slots = len(slots_for(table, max(estimate.memory_bytes for estimate in estimates)))
    methods, grid = len(study.methods), len(table.lrs)
    choosing = methods * grid * table.choose_seeds if grid > 1 else 0
    measured = methods * table.seeds
    lines = [
        f"methods   {', '.join(study.methods)} (compared with {study.reference})",
        f"rates     {', '.join(f'{lr:g}' for lr in table.lrs)}"
        + (f"; up to {table.widen} more on each side while a best one is at the edge" if choosing else ""),
        f"seeds     {table.choose_seeds} for the choice, {table.seeds} fresh ones measured",
    ]
    total = 0.0
    for setting, estimate in zip(settings, estimates, strict=True):
        total += estimate.time_s * (choosing + measured)
        lines.append(
            f"{setting.task}: {setting.config.model.name}, {choosing} runs to choose + {measured} measured, "
            f"about {estimate.memory_bytes / 1e9:.1f} GB and {duration(estimate.time_s)} each"
        )
    lines.append(
        f"in all    {len(settings) * (choosing + measured)} runs, {slots} side by side: about "
        f"{duration(total / slots)} (good to a factor of two; a wider grid comes on top)"
    )
    keys = {setting.key for setting in settings}
    there = [r for r in StudyFolder(out).records()[0] if r.completed and r.identity.setting in keys]
    if there:
        lines.append(f"done      {len(there)} runs are in {out} already")
    return "\n".join(lines)


def bring_in(study: "Study", out: Path, sources: list[Path]) -> None:
    from oelm.study.conduct import prepare_settings
    from oelm.study.folder import StudyFolder

    folder = StudyFolder(out)
    with folder.opened(study):
        settings = prepare_settings(study, show=True)
        folder.save(study, settings)
        for source in sources:
            came, refused = folder.bring_in(source, settings)
            say(f"{source}: {came} records imported")
            for reason, count in refused.items():
                say(f"  {count} left out: {reason}")


def conduct_and_report(study: "Study", out: Path, limit: float | None, lang: str, as_json: bool) -> None:
    """Make the runs, write the report, and print the answer, where the models are and what failed."""
    from oelm.study.conduct import conduct
    from oelm.study.progress_view import Live, kept_models
    from oelm.study.report import as_plain, summary, write_report

    with Live() as live:
        progress = conduct(study, out, limit, live.show)
    written = write_report(out, lang)
    if as_json:
        say(json.dumps(as_plain(written.analysis), ensure_ascii=False))
        return
    say(summary(written.analysis, lang))
    say("")
    for what, where in kept_models(progress, out):
        say(f"model    {what}: {where}")
    for name, reason in progress.failed.items():
        say(f"failed   {name}: {reason}")
    say(f"report   {written.html}")
    if progress.failed and not any(setting.tests for setting in progress.settings):
        raise RunError(notice("study.nothing_measured"))


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="The study's folder; it goes on where it was.", callback=options.new_folder)
    ] = Path("oelm-demo"),
    lang: Annotated[str, typer.Option(help="Of the report: en or zh.")] = "en",
) -> None:
    """The main job on embedded data: does freezing pay on 8,530 film reviews? Some minutes on a laptop.

    Example: oelm demo
    """
    from oelm.study.design import make_study, read_study

    conduct_and_report(make_study(read_study("demo"), "demo"), out, None, lang, as_json=False)
