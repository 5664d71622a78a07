"""The verbs of a run: train, evaluate, predict, generate, audit, status, logs."""

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oelm.cli import options
from oelm.errors import AuditError, UserError
from oelm.system.gpu import wake_gpu
from oelm.system.messages import read_notice
from oelm.system.plugins import load_plugins
from oelm.system.terminal import console, say

if TYPE_CHECKING:
    from oelm.config import RunConfig
    from oelm.training.status import RunStatus

app = typer.Typer()

Run = Annotated[Path, typer.Argument(help="A run's folder, or a saved model's.")]
Tokens = Annotated[int, typer.Option(help="New tokens, at most; never beyond the length of training.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token every time.")]


@app.command()
@options.takes(options.RUN)
def train(
    given: dict[str, Any],
    experiment: Annotated[str | None, typer.Argument(metavar="[ID]", help="A published experiment.")] = None,
    task: Annotated[str | None, typer.Option(help="A task by name: oelm data list.")] = None,
    method: Annotated[str | None, typer.Option(help="baseline, oelm, ...: docs/methods.md.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides initial values and the order of the data.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of the keys.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any key: training.clip=0.5")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder; an unfinished run in it is resumed.", callback=options.new_folder
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in a folder with a run.")
    ] = False,
    stop_after: options.StopAfter = None,
    stop_at_chance: Annotated[
        bool, typer.Option("--stop-at-chance", help="End a run that stays at chance level.")
    ] = False,
    fair: Annotated[
        bool, typer.Option("--fair", help="An experiment with validation held out, tested once.")
    ] = False,
    gpu: options.Gpu = None,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Train one model and record everything.

    Examples: oelm train --task sst2 --method oelm --lr 1e-3 --out runs/x; oelm train GPT-02;
    oelm train IMDB-oelm --fair; oelm train --data my.csv --text body --label topic;
    oelm train --data my.csv --text article --target summary --model t5-small
    """
    from oelm.config import flag_keys, resolve_config
    from oelm.study.catalogue import experiment_config, published_beside

    flags = flag_keys(given | {"task": task, "method": method, "lr": lr, "seed": seed})
    if stop_at_chance:
        flags["training.stop_at_chance"] = True
    if fair:
        flags |= {"task.hold_out": True, "training.choose_on": "validation"}
    base = experiment_config(experiment).to_dict() if experiment is not None else {}
    if plugin:
        flags["plugins"] = plugin
    asked, limit = resolve_config(base, config, flags, set_ or []), options.seconds_of(stop_after)
    load_plugins(asked.plugins)
    if fair and out is None and asked.experiment:  # the folder without -fair is that of the exact repeat
        out = Path("runs", f"{asked.experiment}-fair")
    results = run_training(asked, out, overwrite, limit)
    if results:  # of the first process only
        if experiment is not None:
            results = results | {"published": published_beside(asked, results)}
        say(json.dumps(results) if as_json else summary(results))


def run_training(
    config: "RunConfig", out: Path | None, overwrite: bool, stop_after: float | None
) -> dict[str, Any]:
    """Prepare the data (one process does, the others wait), then train."""
    wake_gpu()  # before torch is imported
    from oelm.method import Method
    from oelm.training.loop import train as train_run
    from oelm.training.parallel import process_state
    from oelm.training.resolve import default_folder, prepare_data
    from oelm.training.stopping import stopping

    Method.from_dict(config.method.overrides())  # a wrong name costs no data preparation
    out, state, began = out or default_folder(config), process_state(), time.monotonic()
    with stopping(stop_after), state.main_process_first():
        config, store = prepare_data(config, state.device, show=bool(state.is_main_process))
    if stop_after is not None:  # preparing took some of it
        stop_after = max(0.001, stop_after - (time.monotonic() - began))
    return train_run(config, store, out, overwrite=overwrite, stop_after=stop_after)


def summary(results: dict[str, Any]) -> str:
    metric = results["metric"]
    chosen = "the last one" if results["chosen_on"] == "last" else f"chosen on {results['best']['split']}"
    measured = results["test"] or results["best"]  # without a test, what validation says
    split = measured["split"]
    lines = [
        f"{results['method']} on {results['task']}: {split} {metric} {measured['metrics'][metric]:.4f} "
        f"(step {measured['step']} of {results['steps']}, {chosen})"
    ]
    for name, splits in results["references"].items():
        if metric in splits.get(split, {}):
            lines.append(f"  {name}: {splits[split][metric]:.4f}")
    lines += [f"  note: {read_notice(warning)}" for warning in results["warnings"]]
    if "published" in results:
        lines += _published(results["published"])
    return "\n".join(lines)


def _published(theirs: dict[str, Any]) -> list[str]:
    """The published figures of an experiment beside those of a run that repeats it."""
    from oelm.study.report.numbers import figure

    keys = ", ".join(theirs["differs_in"])
    how = f"differs from the published recipe in: {keys}" if keys else "an exact repeat"
    rows = {name: (figure(row["published"]), figure(row["here"])) for name, row in theirs["beside"].items()}
    lines = [f"  {name:<23} {a:>14} {b:>14}" for name, (a, b) in {"": ("published", "here"), **rows}.items()]
    return [f"{theirs['experiment']}: {how}", *lines]


@app.command()
def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    task: Annotated[str | None, typer.Option(help="Another task.")] = None,
    data: Annotated[str | None, typer.Option(help="Another file.")] = None,
    test_file: Annotated[str | None, typer.Option(help="Another file of test rows.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of NAME/SPLIT.parquet.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a text or window; default: the run's.")
    ] = None,
    generation: Annotated[
        bool, typer.Option("--generation", help="Measure how it continues held-out texts.")
    ] = False,
    prompts: Annotated[int, typer.Option(help="Texts to continue.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens given of each.")] = 32,
    tokens: Tokens = 64,
    temperature: Temperature = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: all.")] = 0,
    zero_shot: Annotated[str | None, typer.Option(help="A task or file to classify by likelihood.")] = None,
    template: Annotated[str | None, typer.Option(help="The prompt: '{text} It was'")] = None,
    labels: Annotated[str | None, typer.Option(help="'neg= bad,pos= good'; default: the names.")] = None,
    text: options.Text = None,
    text_pair: options.TextPair = None,
    label: options.Label = None,
    limit: Annotated[int | None, typer.Option(help="Classify only this many items.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    plugin: options.Plugin = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a trained model; prints JSON, with --json on one line. What is measured: docs/evaluation.md.

    Examples: oelm evaluate runs/x --split validation; oelm evaluate runs/lm --generation;
    oelm evaluate runs/lm --zero-shot sst2 --template '{text} It was' --labels 'negative= bad,positive= good'
    """
    from oelm.inference.generation_quality import Writing
    from oelm.inference.trained import Trained

    given = {"name": task, "data": data, "test_file": test_file, "data_dir": data_dir}
    changes = {key: value for key, value in (given | {"max_length": max_length}).items() if value is not None}
    if zero_shot is None and (template or labels or text or text_pair or label or limit):
        raise UserError(
            "--template, --labels, --text, --text-pair, --label and --limit belong to --zero-shot"
        )
    if zero_shot is not None and template is None:
        raise UserError("--zero-shot needs a --template, for example '{text} It was'")
    trained = Trained(run)
    answer: dict[str, Any] = {}
    if zero_shot is None or generation or task or data:
        answer = trained.evaluate(split, show=True, **changes)
    if generation:
        writing = Writing(prompts, prompt_tokens, tokens, temperature, top_k, seed)
        answer["generation"] = trained.generation(split, writing, **changes)
    if zero_shot is not None:
        assert template is not None
        columns = {"text": text, "text_pair": text_pair, "label": label, "data_dir": data_dir}
        columns = {key: value for key, value in columns.items() if value is not None}
        answer["zero_shot"] = trained.zero_shot(zero_shot, split, template, labels, limit, seed, **columns)
    say(json.dumps(answer, indent=None if as_json else 1))


@app.command()
def predict(
    run: Run,
    file: Annotated[
        typer.FileBinaryRead, typer.Argument(help="One text per line; - is standard input.")
    ] = "-",  # type: ignore[assignment]
    plugin: options.Plugin = None,
) -> None:
    """Labels, numbers, tags, answers or targets for lines of text, as JSONL. Pairs: text, tab, text.

    Example: echo 'a fine film' | oelm predict runs/x
    """
    from oelm.inference.prediction import lines_of
    from oelm.inference.trained import Trained

    for answer in Trained(run).predict(lines_of(file), lambda text: say(text, err=True)):
        say(json.dumps(answer, ensure_ascii=False))


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="How the text begins.")] = "",
    tokens: Tokens = 100,
    temperature: Temperature = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    plugin: options.Plugin = None,
) -> None:
    """Continue a prompt with a language model, or write a target for it with an encoder-decoder.

    Example: oelm generate runs/x 'Once upon a time'
    """
    from oelm.inference.trained import Trained

    trained = Trained(run)
    written = trained.generate(prompt, tokens, temperature, top_k, seed)
    say(written if trained.writes else prompt + written)


@app.command()
def audit(run: Run, plugin: options.Plugin = None, as_json: options.AsJson = False) -> None:
    """Check that a finished run's frozen weights never moved; exit code 1 where they did.

    Example: oelm audit runs/x
    """
    from oelm.inference.trained import Trained

    try:
        checked = Trained(run).audit()  # loading a model audits it, too
    except AuditError as error:
        if as_json:
            say(json.dumps({"problems": [problem.to_dict() for problem in error.problems]}))
        raise AuditError(f"{run}: {error}", error.problems) from None
    if as_json:
        say(json.dumps(checked.to_dict()))
        return
    told = f"{run}: clean. {checked.frozen_parameters:,} parameters in {checked.frozen_tensors} tensors are, "
    told += "bit for bit, what they were"
    if heads := checked.orthonormal_heads:
        within = f"{checked.largest_deviation:.1e} (tolerance {checked.tolerance:.1e})"
        told += f"; {heads} blocks are orthonormal to {within}"
    say(told)


@app.command()
def status(
    folders: Annotated[list[Path] | None, typer.Argument(help="Runs, or folders with runs below.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Which runs there are, how far they are, the time left, and the use of the GPUs.

    Without a terminal, --watch prints a line whenever a run has moved. Example: oelm status runs --watch
    """
    from oelm.training.status import find_runs, gpu_use, run_status

    roots = folders or [Path("runs")]
    if as_json:
        say(json.dumps([vars(run_status(folder)) for folder in find_runs(roots)]))
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def picture() -> Any:
        runs = [run_status(folder) for folder in find_runs(roots)]
        nothing = Text(f"no runs in {', '.join(map(str, roots))} yet")
        return Group(status_table(runs) if runs else nothing, *map(Text, gpu_use()))

    screen = console()
    if not watch:
        screen.print(picture())
    elif screen.is_terminal:
        with Live(picture(), console=screen, refresh_per_second=4) as live:
            while True:
                time.sleep(2)
                live.update(picture())
    else:
        told: dict[str, str] = {}
        while True:
            for run in map(run_status, find_runs(roots)):
                line = " ".join(filter(None, _cells(run, with_task=True)))
                if told.get(run.folder) != line:
                    told[run.folder] = line
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
    from oelm.system.progress import duration

    return [
        re.sub(r"-[0-9a-f]{8}$", "", Path(run.folder).name),  # a study's runs end with their key
        run.status,
        *((run.task,) if with_task else ()),
        run.method,
        f"{run.step}/{run.of}" if run.of else "",
        f"{run.loss:.3g}" if run.loss is not None else "",
        f"{run.best:.4g}" if run.best is not None else "",
        duration(run.left_s) if run.left_s is not None else "",
    ]


@app.command()
def logs(
    run: Run,
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
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in entry["metrics"].items())
            return f"step {entry['step']}: {entry['split']} {numbers}"
        return (
            f"step {entry['step']}/{entry['of']}: loss {entry['loss']:.4f}, lr {entry['lr']:.2e}, "
            f"gradient {entry['grad_norm']:.3g}, {entry['train_time_s']:.1f} s"
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"(a damaged line: {line.strip()[:60]})"
