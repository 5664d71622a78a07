"""The verbs of a run: train, evaluate, audit, status, logs."""

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli import options, show
from oelm.cli.options import option
from oelm.errors import AuditError, UserError
from oelm.system.progress import duration, figure
from oelm.system.startup import without_collection
from oelm.system.terminal import console, say
from oelm.training import request

if TYPE_CHECKING:
    from oelm.training.status import RunStatus

app = typer.Typer()

Run = Annotated[Path, typer.Argument(help="A run's folder, or a saved model's.")]


TRAIN = options.RUN | {
    "task": option(str, "A task by name: oelm data list."),
    "method": option(str, "baseline (the default), oelm, ...: docs/methods.md."),
    "lr": option(str, "Learning rate; default: 3e-4."),
    "seed": option(int, "Decides initial values and the order of the data; default: 0."),
    "config": option(Path, "A TOML file with any of the keys."),
    "set": option(list[str], "Any key: training.clip=0.5", "--set"),
    "out": option(
        Path,
        "The run's folder; an unfinished run in it is resumed. Default: below runs.",
        callback=options.new_folder,
    ),
    "overwrite": option(bool, "Start anew in a folder with a run.", "--overwrite"),
    "stop_after": (options.StopAfter, None),
    "stop_at_chance": option(bool, "End a run that stays at chance level.", "--stop-at-chance"),
    "fair": option(bool, "Of an experiment: choose on held-out validation rows, test once.", "--fair"),
}
EVALUATE = {
    "name": option(str, "Another task.", "--task"),
    "data": option(str, "Another file."),
    "test_file": option(str, "Another file of test rows."),
    "data_dir": option(str, "Folder of NAME/SPLIT.parquet."),
    "max_length": option(int, "Tokens of a text or window; default: the run's."),
}


@app.command()
@options.takes(given=TRAIN)
def train(
    given: dict[str, Any],
    experiment: Annotated[str | None, typer.Argument(metavar="[ID]", help="A published experiment.")] = None,
    gpu: options.Gpu = None,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Train one model and record everything.

    Examples: oelm train --task sst2 --method oelm --lr 1e-3 --out runs/x; oelm train GPT-02;
    oelm train IMDB-oelm --fair; oelm train --data my.csv --text body --label topic;
    oelm train --data my.csv --text article --target summary --model t5-small;
    oelm train --data tales.txt --out lm
    """
    stop_after = options.seconds_of(given.pop("stop_after", None))
    run = request.train(experiment, **given, stop_after=stop_after, plugin=plugin or ())
    if results := run.results:  # of the first process only
        if experiment is not None:
            from oelm.study.catalogue import compare_with_published

            results = results | {"published": compare_with_published(run.config, results)}
        if as_json:
            say(json.dumps(results | {"folder": str(run.folder)}))
        else:
            say(show.trained(results, run.folder))


@app.command()
@options.takes(changes=EVALUATE, columns=options.COLUMNS)
def evaluate(
    run: Run,
    *,
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    changes: dict[str, Any],
    generation: Annotated[
        bool, typer.Option("--generation", help="Measure how it continues held-out texts.")
    ] = False,
    prompts: Annotated[int, typer.Option(help="Texts to continue.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens given of each.")] = 32,
    tokens: options.Tokens = 64,
    temperature: options.Temperature = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: all.")] = 0,
    zero_shot: Annotated[str | None, typer.Option(help="A task or file to classify by likelihood.")] = None,
    template: Annotated[str | None, typer.Option(help="The prompt: '{text} It was'")] = None,
    labels: Annotated[str | None, typer.Option(help="'neg= bad,pos= good'; default: the names.")] = None,
    columns: dict[str, Any],
    limit: Annotated[int | None, typer.Option(help="Classify only this many items.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.", callback=options.seed_in_64_bits)] = 0,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a trained model on a split; --generation and --zero-shot measure that instead.

    Examples: oelm evaluate runs/x --split validation; oelm evaluate runs/lm --generation;
    oelm evaluate runs/lm --zero-shot sst2 --template '{text} It was' --labels 'negative= bad,positive= good'.
    What is measured: docs/evaluation.md.
    """
    with without_collection():
        from oelm.inference.generation_quality import Writing
        from oelm.inference.trained import Trained

    if zero_shot is None and (template or labels or columns or limit):
        raise UserError(
            "--template, --labels, --text, --text-pair, --label and --limit belong to --zero-shot"
        )
    if zero_shot is not None and template is None:
        raise UserError("--zero-shot needs a --template, for example '{text} It was'")
    writing = Writing(prompts, prompt_tokens, tokens, temperature, top_k, seed)
    if not generation and writing != Writing(seed=seed):
        raise UserError(
            "--prompts, --prompt-tokens, --tokens, --temperature and --top-k belong to --generation"
        )
    trained = Trained(run)
    answer: dict[str, Any] = {}
    if not generation and (zero_shot is None or "name" in changes or "data" in changes):
        answer = trained.evaluate(split, show=True, **changes)
    if generation:
        answer["generation"] = trained.generation(split, writing, **changes)
    if zero_shot is not None:
        assert template is not None
        columns |= {key: value for key, value in changes.items() if key == "data_dir"}
        answer["zero_shot"] = trained.zero_shot(zero_shot, split, template, labels, limit, seed, **columns)
    say(json.dumps(answer) if as_json else show.evaluated(answer))
    if not as_json:
        say(f"\nnext     {show.use_of(run, trained.folder)}")


@app.command()
def audit(run: Run, plugin: options.Plugin = None, as_json: options.AsJson = False) -> None:
    """Check that a finished run's frozen weights never moved; exit code 1 where they did.

    Example: oelm audit runs/x
    """
    with without_collection():
        from oelm.audit import merged_into, method_of
        from oelm.inference.trained import Trained

    try:
        trained = Trained(run)
        checked = trained.audit()  # loading a model audits it, too
    except AuditError as error:
        if as_json:
            say(json.dumps({"problems": [problem.to_dict() for problem in error.problems]}))
        raise AuditError(f"{run}: {error}", error.problems) from None
    if as_json:
        say(json.dumps(checked.to_dict()))
        return
    if not checked.frozen_tensors:
        say(f"{run}: clean. Nothing is frozen in the model that was saved")
        return
    sizes = {name: parameter.numel() for name, parameter in trained.model.named_parameters()}
    learned = merged_into(trained.model, method_of(trained.model)) & sizes.keys()  # no bits to compare with
    tensors = checked.frozen_tensors - len(learned)
    parameters = checked.frozen_parameters - sum(sizes[name] for name in learned)
    found = []
    if tensors:
        counts = f"{parameters:,} parameters in {tensors} tensor{'s' * (tensors != 1)}"
        found.append(f"{counts} are, bit for bit, what they were")
    if learned:
        found.append(
            f"{checked.frozen_parameters - parameters:,} frozen parameters cannot be compared: "
            "what was learned beside them is merged into them"
        )
    if heads := checked.orthonormal_heads:
        within = f"{checked.largest_deviation:.1e} (tolerance {checked.tolerance:.1e})"
        found.append(f"{heads} blocks are orthonormal to {within}")
    say(f"{run}: clean. {'; '.join(found)}")


@app.command()
def status(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Runs, studies, or folders with runs below; default: runs.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Which runs there are, how far they are, the time left, the GPUs' use; of a complete study its results.

    Without a terminal, --watch prints a line whenever a run has moved. Example: oelm status runs --watch
    """
    from oelm.study.queue_status import all_runs, slurm_lines, slurm_workers
    from oelm.training.status import gpu_use

    roots = folders or [Path("runs")]
    if as_json:
        say(json.dumps([vars(run) for run in all_runs(roots, slurm_workers(roots))]))
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def picture() -> Any:
        workers = slurm_workers(roots)
        runs = all_runs(roots, workers)
        nothing = Text(f"no runs in {', '.join(map(str, roots))} yet")
        table = status_table(runs) if runs else nothing
        why = [
            f"{Path(run.folder).name}: {run.reason}" for run in runs if run.reason and run.status == "failed"
        ]
        return Group(table, *map(Text, (*why, *slurm_lines(workers), *gpu_use())))

    screen = console()
    if not watch:
        screen.print(picture())
        for told in filter(None, map(show.study, roots)):
            say(f"\n{told}")
    elif screen.is_terminal:
        with Live(picture(), console=screen, refresh_per_second=4) as live:
            while True:
                time.sleep(2)
                live.update(picture())
    else:
        seen: dict[str, str] = {}
        while True:
            for run in all_runs(roots, slurm_workers(roots)):
                line = " ".join(filter(None, _cells(run, with_task=True)))
                if seen.get(run.folder) != line:
                    seen[run.folder] = line
                    say(line)
            time.sleep(2)


def status_table(runs: "list[RunStatus]") -> Any:
    """One row per run. A narrow terminal breaks long names of runs; nothing is ever cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    with_task = len({run.task for run in runs}) > 1
    names, numbers = ["run", "status", "method"], ["step", "loss", "best", "left"]
    names[2:2] = ["task"] if with_task else []
    for name in names + numbers:
        number, wraps = name in numbers, name in ("run", "task", "method")
        table.add_column(name, justify="right" if number else "left", no_wrap=not wraps, overflow="fold")
    colours = {"running": "cyan", "completed": "green", "failed": "red"}
    for run in runs:
        cells = [Text(cell) for cell in _cells(run, with_task)]
        cells[1].stylize(colours.get(run.status, "yellow"))
        table.add_row(*cells)
    return table


def _cells(run: "RunStatus", with_task: bool) -> list[str]:
    return [
        re.sub(r"-[0-9a-f]{8}$", "", Path(run.folder).name),  # a study's runs end with their key
        run.status,
        *((run.task,) if with_task else ()),
        run.method,
        f"{run.step}/{run.of}" if run.of else "",
        f"{run.loss:.3g}" if run.loss is not None else "",
        figure(run.best) if run.best is not None else "",
        duration(run.left_s) if run.left_s is not None else "",
    ]


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for the first line, and keep printing new ones.")
    ] = False,
) -> None:
    """A run's log. Example: oelm logs runs/x -f"""
    from oelm.training.status import is_locked

    path = run / "metrics.jsonl"
    if follow and not path.is_file():
        say(f"waiting for the first step of {run}; Ctrl-C ends", err=True)
        while not path.is_file():
            time.sleep(0.5)
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl: it is not a run, or has not logged a step yet")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            line = file.readline()
            if line.endswith("\n"):
                say(log_line(line))
            elif not follow or not is_locked(run):
                break
            else:
                file.seek(file.tell() - len(line.encode()))
                time.sleep(0.5)


def log_line(line: str) -> str:
    """One line of metrics.jsonl as text."""
    try:
        entry = json.loads(line)
        if entry["kind"] == "eval":
            numbers = ", ".join(f"{name} {figure(value)}" for name, value in entry["metrics"].items())
            return f"step {entry['step']}: {entry['split']} {numbers}"
        return (
            f"step {entry['step']}/{entry['of']}: loss {entry['loss']:.4f}, lr {entry['lr']:.2e}, "
            f"gradient {entry['grad_norm']:.3g}, {entry['train_time_s']:.1f} s"
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"(a damaged line: {line.strip()[:60]})"
