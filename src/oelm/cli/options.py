"""Options that several verbs share, each declared once, and a decorator for groups of them."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from oelm.errors import UserError
from oelm.system.files import check_name
from oelm.system.plugins import load_plugins
from oelm.training.request import as_list

Group = Mapping[str, tuple[Any, Any]]  # an option's name -> its annotation and its default
LONGEST = 366 * 24 * 3600  # seconds; the system's timers have a limit


def load(plugins: list[str] | None) -> list[str] | None:
    """Callback of every --plugin: load plugins before other options are parsed, which may name their
    entries."""
    load_plugins(plugins or ())
    return plugins


def new_folder(path: Path | None) -> Path | None:
    """Callback of every --out: refuse an invalid name before any work is done."""
    if path is not None:
        check_name(path)
    return path


def seed_in_64_bits(seed: int) -> int:
    """Callback of --seed: refuse a seed that PyTorch does not accept."""
    if not -(1 << 63) <= seed < 1 << 63:
        raise UserError(f"--seed {seed} has {len(str(abs(seed)))} digits, which is too large")
    return seed


def use_gpus(numbers: str | None) -> str | None:
    """Callback of every --gpu: make only these GPUs visible to this process, by number among the visible
    ones."""
    if numbers is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            chosen = [int(number) for number in as_list(numbers)]
            names = [as_list(visible)[number] for number in chosen] if visible else list(map(str, chosen))
        except (ValueError, IndexError):
            names = []
        if not names:
            raise UserError(
                f"--gpu {numbers}: name GPUs by number, such as 0 or 0,1, among those visible here"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        import torch  # only now, as it reads the variable once

        if torch.cuda.device_count() != len(names):
            raise UserError(f"--gpu {numbers}: there is no such GPU here; see nvidia-smi")
    return numbers


def seconds_of(text: str | None, option: str = "--stop-after") -> float | None:
    """The seconds of a time such as 90s, 9m, 1.5h, or a plain number."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < seconds <= LONGEST:
        raise UserError(f"{option} {text[:40]!r} is not a time of at most a year; write 90s, 9m or 2h")
    return seconds


def option(kind: Any, help: str, *names: str, default: Any = None, **settings: Any) -> tuple[Any, Any]:
    """An option of a group: its annotation and its default; without a default its value may be None."""
    annotation = kind | None if default is None else kind
    return Annotated[annotation, typer.Option(*names, help=help, **settings)], default


Gpu = Annotated[
    str | None, typer.Option(help="Use this GPU, by number: 0, or 0,1.", callback=use_gpus, is_eager=True)
]


def study_out(default: str = "") -> Any:
    """`--out` of a study; `default` is a sentence on its default, where typer does not show it."""
    help = f"The study's folder; an unfinished one is resumed. {default}".strip()
    return typer.Option(help=help, callback=new_folder)


StopAfter = Annotated[str | None, typer.Option(help="Save and leave after 90s, 9m or 2h; resumable.")]
Lang = Annotated[str, typer.Option(help="Language: en or zh.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        help="A module with task kinds, families, methods or launchers: docs/extending.md.",
        callback=load,
        is_eager=True,
    ),
]
Tokens = Annotated[int, typer.Option(help="New tokens, at most; never beyond the length of training.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token every time.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

COLUMNS = {
    "text": option(str, "Column of the text; default: text."),
    "text_pair": option(str, "Column of the second text."),
    "label": option(str, "Column of the label; default: label."),
}
# How data is read: `oelm train`, `oelm study` and `oelm data`. Names are those of config.FLAGS.
DATA = COLUMNS | {
    "target": option(str, "Column of the text to write for each text (T5, BART)."),
    "kind": option(
        str, "Kind of task of a file: classification (the default), regression, token-classification, ..."
    ),
    "lm": option(bool, "A language model of a file's texts; of .txt files anyway.", "--lm"),
    "test_file": option(str, "A file of test rows; default: a tenth of the file."),
    "train_size": option(int, "Train on so many rows, stratified; default: all."),
    "train_on": option(str, "xnli: mnli or snli+mnli."),
    "max_length": option(int, "Tokens of a text or window; longer ones are cut. Default: 512."),
    "max_target_length": option(int, "Tokens of a target; default: --max-length."),
    "tokenizer": option(
        str, "gpt2 (a task's default), a hub id, a folder, or train:8192 (a file's default)."
    ),
    "data_dir": option(
        str, "Folder of NAME/SPLIT.parquet, or of prepared tasks; default: OELM_DATA_DIR, or hub."
    ),
}
# Options of a run, and of all runs of a study.
RUN = {
    "data": option(
        str, "Your own CSV, TSV, JSONL, Parquet or .txt file, a folder of .txt, a prepared dataset."
    ),
    **DATA,
    "model": option(
        str,
        "gpt-tiny (default on a CPU), gpt-medium-512 (on a GPU), ..., a hub id, a model's, run's or "
        "study's folder.",
    ),
    "epochs": option(float, "Passes over the training data; default: 3."),
    "steps": option(int, "Optimizer steps, instead of epochs."),
    "batch_size": option(int, "Texts or windows in a batch; default: 16."),
    "batch_tokens": option(int, "Tokens in a batch, instead of texts."),
    "precision": option(str, "auto (the default), fp32, bf16 or fp16."),
    "tracker": option(list[str], "Also log to tensorboard, wandb, mlflow, ...; docs/training.md."),
}


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for verbs: each named parameter is replaced by a group of options, and gets a dict of those
    that have a value."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = []
        for parameter in signature.parameters.values():
            parameters += [
                inspect.Parameter(name, kind, default=default, annotation=annotation)
                for name, (annotation, default) in groups.get(parameter.name, {}).items()
            ] or [parameter.replace(kind=kind)]

        @functools.wraps(verb)
        def wrapper(**values: Any) -> None:
            for group, names in groups.items():
                given = {name: values.pop(name) for name in names}
                values[group] = {name: value for name, value in given.items() if value not in (None, [])}
            verb(**values)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate
