"""The folder that a run's weights come from if it starts from a trained model: a model's folder, a run, or a
study, which has a model for every method and seed."""

from dataclasses import dataclass
from pathlib import Path

from oelm.config import RunConfig, make_config, read_toml
from oelm.errors import UserError
from oelm.method import Method
from oelm.system.files import read_object


@dataclass(frozen=True)
class Start:
    """A tested model of a study."""

    folder: str
    method: str
    seed: int
    lr: float


def is_study(folder: Path) -> bool:
    return (folder / "study.toml").is_file()


def model_folder(name: str) -> str:
    """`runs/x/model` for a run's folder `runs/x`; any other name, also a study's folder, unchanged."""
    run = Path(name)
    if not (run / "config.toml").is_file():
        return name
    if not (run / "model" / "config.json").is_file():
        raise UserError(f"model {name!r} is a run that holds no model: let it finish, or name another")
    return str(run / "model")


def start_folder(config: RunConfig) -> str:
    """The folder, hub id or size that this run starts from. Of a study, its model of the same method and
    seed; seeds of trials, which it lacks, take its models in turn."""
    name = str(config.model.name)
    if not is_study(Path(name)):
        return name
    method = Method.from_dict(config.method.overrides()).name
    starts, seed = starts_of(name, method), config.training.seed
    of_seed = (start for start in starts if start.seed == seed)
    return next(of_seed, starts[(seed - 1) % len(starts)]).folder


def any_start(name: str) -> str:
    """The first model of a study, as all have the same tokenizer and shape; any other name unchanged."""
    return starts_of(name)[0].folder if is_study(Path(name)) else name


def starts_of(name: str, method: str | None = None) -> list[Start]:
    """The models of a study's measured runs by seed, perhaps of one method; at least one."""
    measured = sorted(Path(name).glob("runs/*/*/measured-*"))
    starts = [_read(run) for run in measured if (run / "model").is_dir()]
    if not starts and any((run / "results.json").is_file() for run in measured):
        raise UserError(
            f"model {name!r} is a study whose runs have no models, as records that were imported: delete the "
            "folders of its measured runs and make them again, with --set study.models=all"
        )
    if not starts:
        raise UserError(
            f"model {name!r} is a study without models to start from: let it finish, with "
            "--set study.models=all"
        )
    of_method = [start for start in starts if method in (None, start.method)]
    if not of_method:
        known = ", ".join(sorted({start.method for start in starts}))
        raise UserError(f"model {name!r} is a study without a model of method {method}; it has {known}")
    if method and len({start.lr for start in of_method}) > 1:
        raise UserError(
            f"model {name!r} is a study with models of {method} at several learning rates; make it with "
            "--set study.measure=best"
        )
    if method and len({start.seed for start in of_method}) < len(of_method):
        raise UserError(
            f"model {name!r} is a study with several models of {method} for one seed; start from a study of "
            "one task that has each method once"
        )
    return sorted(of_method, key=lambda start: (start.method, start.seed))


def _read(run: Path) -> Start:
    file = run / "config.toml"
    training = make_config(read_toml(file), str(file)).training
    method = str(read_object(run / "results.json").get("method"))
    return Start(str(run / "model"), method, training.seed, training.lr)
