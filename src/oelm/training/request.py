"""The requests of `oelm train` and `oelm.train`: options by name become a config, which is trained.

Nothing heavy is imported here, as `import oelm` imports this module.
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
SHORT = {"lm": "lm"}  # options that are short for a task kind
OPTIONS = (*FLAGS, *SHORT)


def normalized_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, in one form: `lm` becomes `kind="lm"`, one tracker a list of one."""
    given = {name: _plain(name, value) for name, value in options.items() if value is not None}
    given = {name: value for name, value in given.items() if value != []}
    if unknown := [name for name in given if name not in OPTIONS]:
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(OPTIONS)}")
    for option, kind in SHORT.items():
        if given.pop(option, False) and given.setdefault("kind", kind) != kind:
            raise UserError(f"{option} and kind {given['kind']!r} contradict each other; keep one")
    if isinstance(tracker := given.get("tracker"), str):
        given["tracker"] = [tracker]
    return given


def _plain(name: str, value: Any) -> Any:
    """A path as text, a number of NumPy's as Python's; a table is refused, as options name files."""
    if hasattr(value, "columns"):
        raise UserError(
            f"{name} is a table in memory, but must name a file: write it to one, as with "
            f"to_csv('my.csv', index=False), and give {name}='my.csv'"
        )
    if name == "method" and not isinstance(value, str):
        raise UserError(
            "method is the name of a method; its fields are keys, such as set={'method.freeze_ratio': 0.25}"
        )
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def as_list(value: Any) -> list[Any]:
    """The value as a list: of its parts if it is text with commas, of one entry if it is a single number."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, Iterable) else [value]
    return [part.strip() for part in value.split(",") if part.strip()]


def takes_options(*without: str) -> Callable[[F], F]:
    """A decorator that lists every option, except those in `without`, in the signature of a function that
    takes **options."""

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
    from oelm.models.initial_values import drawing_ahead
    from oelm.training.run_result import RunResult

    flags = flag_keys(normalized_options(options))
    flags |= {"training.stop_at_chance": True} if stop_at_chance else {}
    flags |= {"task.hold_out": True, "training.choose_on": "validation"} if fair else {}
    flags |= {"plugins": as_list(plugin)} if plugin else {}
    file = None if config is None else Path(config)
    base: dict[str, Any] = {"training": {"eval_every": "auto"}} if file is None else {}
    if experiment is not None:
        from oelm.study.catalogue import experiment_config

        base = experiment_config(experiment).to_dict()
    resolved = resolve_config(base, file, *split_assignments(flags, set))
    load_plugins(resolved.plugins)
    if fair and out is None and resolved.experiment:  # the folder without -fair is that of the exact repeat
        out = Path("runs", f"{resolved.experiment}-fair")

    def on_entry(entry: dict[str, Any]) -> None:
        callback = on_step if entry["kind"] == "train" else on_evaluation
        if callback is not None:
            callback(entry)

    with drawing_ahead(resolved):
        results, folder = run_training(resolved, out, overwrite, stop_after, show, on_entry)
    return RunResult(folder, results, resolved)


def run_training(
    config: RunConfig, out: PathLike | None, overwrite: bool, stop_after: float | None, show: bool,
    on_entry: Callback,
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    """Prepare the data (in one process, while the others wait), then train. Returns the values of
    results.json, and the run's folder."""
    from oelm.system.startup import without_collection

    with without_collection():
        from oelm.method import Method
        from oelm.training.folder import read_config
        from oelm.training.loop import train as train_run
        from oelm.training.parallel import process_state
        from oelm.training.resolve import default_folder, prepare_data
        from oelm.training.results import check_trackers
        from oelm.training.stopping import stopping

    Method.from_dict(config.method.overrides())  # a wrong name is refused before data is prepared
    check_trackers(config.training.trackers)
    folder, state, began = Path(out or default_folder(config)), process_state(), time.monotonic()
    if config.training.eval_every == "auto" and (folder / "config.toml").is_file() and not overwrite:
        own = read_config(folder).training.eval_every  # a run that is resumed or extended keeps its interval
        config = replace(config, training=replace(config.training, eval_every=own))
    with stopping(stop_after), state.main_process_first():
        config, store = prepare_data(config, state.device, show=show and bool(state.is_main_process))
    if stop_after is not None:  # the preparation counts, too
        stop_after = max(0.001, stop_after - (time.monotonic() - began))
    options: dict[str, Any] = {"overwrite": overwrite, "stop_after": stop_after, "show": show}
    return train_run(config, store, folder, **options, on_entry=on_entry), folder


def split_assignments(flags: dict[str, Any], assignments: Assignments) -> tuple[dict[str, Any], list[str]]:
    """The flags with assignments given as a mapping, and the assignments given as text, key=value."""
    if isinstance(assignments, Mapping):
        return flags | dict(assignments), []
    return flags, [assignments] if isinstance(assignments, str) else list(assignments)
