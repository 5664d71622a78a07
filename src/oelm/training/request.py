"""What a user asks for with `oelm train` or `oelm.train`: options by name, made a config, trained.

Nothing heavy is imported here: `import oelm` brings the function.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from oelm.config import FLAGS, RunConfig, flag_keys, resolve_config
from oelm.errors import UserError
from oelm.system.plugins import load_plugins

if TYPE_CHECKING:
    from oelm.training.run_result import RunResult

F = TypeVar("F", bound=Callable[..., Any])
PathLike = str | Path
Assignments = Mapping[str, Any] | Iterable[str]  # {"training.clip": 0.5}, ["training.clip=0.5"], or that one
Callback = Callable[[dict[str, Any]], None]
SHORT = {"lm": "lm"}  # options that stand for a kind
OPTIONS = (*FLAGS, *SHORT)


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, each in one form: `lm` is `kind="lm"`, one tracker is a list of one."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    if unknown := [name for name in given if name not in OPTIONS]:
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(OPTIONS)}")
    for option, kind in SHORT.items():
        if given.pop(option, False) and given.setdefault("kind", kind) != kind:
            raise UserError(f"{option} and kind {given['kind']!r} contradict each other; keep one")
    if isinstance(tracker := given.get("tracker"), str):
        given["tracker"] = [tracker]
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def listed(value: Any) -> list[Any]:
    """A list, the parts of one written with commas, or a single number as a list of one."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, Iterable) else [value]
    return [part.strip() for part in value.split(",") if part.strip()]


def takes_options(*without: str) -> Callable[[F], F]:
    """Show every option in the signature of a function that takes them as **options."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [name for name in OPTIONS if name not in (*without, *signature.parameters)]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate


@takes_options()
def train(
    experiment: str | None = None,
    *,
    out: PathLike | None = None,
    config: PathLike | None = None,
    set: Assignments = (),
    overwrite: bool = False,
    stop_after: float | None = None,
    stop_at_chance: bool = False,
    fair: bool = False,
    plugin: str | Iterable[str] = (),
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    show: bool = True,
    **options: Any,
) -> "RunResult":
    """Train one model and record everything: `oelm train`, whose options have the same names here.

    `oelm.train(data="d.csv", text="body", label="topic", model="gpt-tiny", steps=20, out="x")`; any other key
    as `set={"training.clip": 0.5}`. `on_step` is called with what metrics.jsonl gets at every logged step
    (`training.log_every`), `on_evaluation` with every evaluation. An unfinished run in `out` is resumed.
    Raises `oelm.UserError` where the run cannot start; `show=False` prints nothing.
    """
    from oelm.models.initial_values import drawn_ahead
    from oelm.training.run_result import RunResult

    flags = flag_keys(spelled_out(options))
    flags |= {"training.stop_at_chance": True} if stop_at_chance else {}
    flags |= {"task.hold_out": True, "training.choose_on": "validation"} if fair else {}
    flags |= {"plugins": listed(plugin)} if plugin else {}
    file = None if config is None else Path(config)
    base: dict[str, Any] = {"training": {"eval_every": "auto"}} if file is None else {}
    if experiment is not None:
        from oelm.study.catalogue import experiment_config

        base = experiment_config(experiment).to_dict()
    asked = resolve_config(base, file, *split_assignments(flags, set))
    load_plugins(asked.plugins)
    if fair and out is None and asked.experiment:  # the folder without -fair is that of the exact repeat
        out = Path("runs", f"{asked.experiment}-fair")

    def heard(entry: dict[str, Any]) -> None:
        callback = on_step if entry["kind"] == "train" else on_evaluation
        if callback is not None:
            callback(entry)

    with drawn_ahead(asked):
        results, folder = run_training(asked, out, overwrite, stop_after, show, heard)
    return RunResult(folder, results, asked)


def run_training(
    config: RunConfig, out: PathLike | None, overwrite: bool, stop_after: float | None, show: bool,
    heard: Callback,
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    """Prepare the data (one process does, the others wait), then train: what results.json says, and where."""
    from oelm.system.startup import without_collection

    with without_collection():
        from oelm.method import Method
        from oelm.training.folder import read_config
        from oelm.training.loop import train as train_run
        from oelm.training.parallel import process_state
        from oelm.training.resolve import default_folder, prepare_data
        from oelm.training.results import check_trackers
        from oelm.training.stopping import stopping

    Method.from_dict(config.method.overrides())  # a wrong name costs no data preparation
    check_trackers(config.training.trackers)
    folder, state, began = Path(out or default_folder(config)), process_state(), time.monotonic()
    if config.training.eval_every == "auto" and (folder / "config.toml").is_file() and not overwrite:
        there = read_config(folder).training.eval_every  # a run that is resumed or extended keeps its own
        config = replace(config, training=replace(config.training, eval_every=there))
    with stopping(stop_after), state.main_process_first():
        config, store = prepare_data(config, state.device, show=show and bool(state.is_main_process))
    if stop_after is not None:  # preparing took some of it
        stop_after = max(0.001, stop_after - (time.monotonic() - began))
    options: dict[str, Any] = {"overwrite": overwrite, "stop_after": stop_after, "show": show}
    return train_run(config, store, folder, **options, heard=heard), folder


def split_assignments(flags: dict[str, Any], assignments: Assignments) -> tuple[dict[str, Any], list[str]]:
    """Keys with their values, and those that are still text: key=value."""
    if isinstance(assignments, Mapping):
        return flags | dict(assignments), []
    return flags, [assignments] if isinstance(assignments, str) else list(assignments)
