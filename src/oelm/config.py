"""The configuration of a run: frozen dataclasses, TOML on disk, the same keys everywhere.

The dataclasses need only the standard library; a user's file or flags are checked by pydantic.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from oelm.errors import UserError
from oelm.models.gpt_sizes import size_name
from oelm.system.files import read_file
from oelm.system.library_errors import first_line
from oelm.system.validation import checked

Role = Literal["q", "k", "v", "o", "ffn_in", "ffn_out", "norms", "embeddings", "head"]
TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".json")  # suffixes of files with rows and columns
SUFFIXES = (*TABLES, ".conll", ".txt")  # of a user's own file
LONGEST = 1 << 20  # tokens of a text, more than any model takes
FORBID = {"extra": "forbid"}  # read by pydantic: an unknown key is an error


class _Table:
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID


@dataclass(frozen=True)
class TaskConfig(_Table):
    """The task: one by name, or a user's file or prepared dataset (`data`)."""

    name: str | None = None
    data: str | None = None
    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    target: str | None = None  # column of the text to write: sequence to sequence
    kind: str | None = None  # of a file; None: seq2seq if there is a target, else classification
    metric: str | None = None  # the deciding metric of a file; None: the one of its kind
    test_file: str | None = None
    train_on: str | None = None
    train_size: int | None = None
    split_seed: int = 0
    hold_out: bool = True  # False: train on the rows that validation would take; for choose_on = "test"
    max_length: int = 512
    max_target_length: int | None = None  # None: max_length
    tokenizer: str | None = None  # None: the model's own, gpt2 or, for a file, train:8192
    data_dir: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_length", LONGEST), ("max_target_length", LONGEST), ("train_size", None)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= (most or value):
                must = f"between 1 and {most:,}" if most else "positive"
                raise UserError(f"task.{name} must be {must}, got {value:,}")


@dataclass(frozen=True)
class ModelConfig(_Table):
    """A named size of the reference GPT, a hub id, or a folder. `None` keeps the model's own value."""

    name: str | None = None  # None: gpt-tiny on a CPU, gpt-medium-512 on a GPU
    dropout: float | None = None
    attention_dropout: float | None = None
    positions: Literal["learned", "rotary"] | None = None
    pooling: Literal["last", "mean"] | None = None

    def __post_init__(self) -> None:
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"model.{name} must be at least 0 and below 1, got {value}")
        if self.name is not None:
            object.__setattr__(self, "name", size_name(self.name))


@dataclass(frozen=True)
class MethodConfig(_Table):
    """A preset's name; the other fields override it (see `oelm.Method`)."""

    name: str = "baseline"
    start: dict[str, str] | None = None
    init: str | None = None
    gain: float | str | None = None
    freeze: dict[str, Any] | None = None  # layers as words, or as a list of numbers
    scores: str | None = None
    lora: int | None = None
    qk_scale: str | None = None
    qk_lora: int | None = None
    freeze_ratio: float | None = None
    freeze_ratio_of: str | None = None
    freeze_schedule: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.freeze_ratio is not None and self.freeze is not None:
            raise UserError("method.freeze and method.freeze_ratio are both given; keep one")
        if self.freeze is not None:
            from oelm.method import spell_layers  # here: the command line starts without numpy

            object.__setattr__(self, "freeze", spell_layers(self.freeze))
            for role, layers in self.freeze.items():
                if not isinstance(layers, str):
                    raise UserError(f"method.freeze.{role} = {layers!r} does not fit: 'all' or [0, 3] would")

    def overrides(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


# Pairs of keys for one quantity, the length of training and the size of a batch; a run has one of each pair.
ALTERNATIVES = (("steps", "epochs"), ("batch_size", "batch_tokens"))

# Range of numbers in [training], in words -> (its test, its keys).
BOUNDS: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "positive": (lambda value: 0 < value < math.inf, ("lr", "lr_scale", "eps", "epochs", "steps", "keep",
                 "batch_size", "batch_tokens", "accumulate", "log_every")),
    "0 or more": (lambda value: 0 <= value < math.inf, ("warmup", "weight_decay", "weight_decay_scale",
                  "clip", "eval_every", "save_every", "early_stopping")),
    "between 0 and 1": (lambda value: 0 <= value <= 1, ("label_smoothing", "chance_after")),
    "above 0 and at most 1": (lambda value: 0 < value <= 1, ("layer_decay",)),
}  # fmt: skip


@dataclass(frozen=True)
class TrainingConfig(_Table):
    """Training. A batch is `batch_size` texts or windows, or `batch_tokens` tokens."""

    lr: float = 3e-4
    epochs: float | None = None  # 3 unless `steps` is given
    steps: int | None = None
    batch_size: int | None = None  # 16 unless `batch_tokens` is given
    batch_tokens: int | None = None
    accumulate: int = 1  # micro-batches per step; the loss is the mean over the whole batch
    warmup: float = 0.06  # steps, or a share of all steps if below 1
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float = 1.0  # 0: no clipping
    layer_decay: float = 1.0  # each layer's learning rate is that of the layer above times this
    lr_scale: dict[Role, float] = field(default_factory=dict)  # role -> factor of its learning rate
    weight_decay_scale: dict[Role, float] = field(default_factory=dict)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    label_smoothing: float = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    gradient_checkpointing: bool = False
    fast: bool = True  # packed texts, CUDA graphs, our own kernels, where the hardware has them
    fallback: bool = True  # if the fast path gives NaN or infinity, continue on the plain path
    deterministic: bool = True  # the same seed gives the same bits on one kind of GPU
    fsdp: bool = False  # shard parameters over the processes (FSDP2) instead of copying them (DDP)
    eval_every: int | Literal["auto"] = 0  # steps; 0: at the end of every epoch; "auto": ten times
    save_every: int | None = None  # steps; None: every minute; evaluations that improve are saved too
    keep: int = 2  # checkpoints, besides the best
    log_every: int = 10
    early_stopping: int = 0  # evaluations without improvement before stopping; 0: never
    choose_on: Literal["validation", "test", "last"] = "validation"  # "test": as some reports did
    chance_after: float = 0.3  # share of the steps after which a run must beat the majority class
    stop_at_chance: bool = False
    test: bool = True  # False: never evaluate the test split, for a trial that chooses a learning rate
    extended_from: tuple[int, ...] = ()  # steps at which a finished run was extended
    trackers: tuple[str, ...] = ()  # tensorboard, wandb, mlflow, trackio
    seed: int = 0

    def __post_init__(self) -> None:
        for one, other in ALTERNATIVES:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise UserError(f"training.{one} and training.{other} are both given; keep one")
        # The only way to give a frozen dataclass a default that depends on another field.
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 3.0)
        if self.batch_size is None and self.batch_tokens is None:
            object.__setattr__(self, "batch_size", 16)
        if self.early_stopping and self.choose_on == "last":
            raise UserError("training.early_stopping needs a best evaluation; choose_on = 'last' has none")
        for must, (fits, names) in BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                numbers = value.values() if isinstance(value, dict) else [value]
                if any(isinstance(n, int | float) and not fits(n) for n in numbers):
                    raise UserError(f"training.{name} must be {must}, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"training.betas must be at least 0 and below 1, got {list(self.betas)}")


@dataclass(frozen=True)
class ArmConfig(_Table):
    """The arm of a study that a run belongs to, if that is more than its method."""

    name: str | None = None  # None: the method's
    differs_in: tuple[str, ...] = ()  # keys in which the study's arms differ, such as training.warmup


@dataclass(frozen=True)
class RunConfig(_Table):
    """One run. `experiment` is the ID of the published experiment it repeats, if any."""

    experiment: str | None = None
    plugins: tuple[str, ...] = ()  # modules to import first: `oelm.system.plugins`
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    arm: ArmConfig = field(default_factory=ArmConfig)

    def to_dict(self) -> dict[str, Any]:
        values = _without_none(asdict(self))
        if self.arm == ArmConfig():
            del values["arm"]
        if not self.plugins:
            del values["plugins"]
        return values

    def identity(self, files: bool = True) -> dict[str, Any]:
        """The keys that decide the result: without the data's folder and how often the run logs or saves.

        `files=False` leaves out the names of a user's files, for files known to hold the same rows.
        """
        values = {key: value for key, value in self.to_dict().items() if key not in ("arm", "plugins")}
        for name in () if files else ("data", "test_file"):
            values["task"].pop(name, None)
        for section, names in INCIDENTAL.items():
            for name in names:
                values[section].pop(name, None)
        for section, defaults in LATER.items():
            for name, default in defaults.items():
                if values[section].get(name) == default:
                    del values[section][name]
        return values


# Keys that do not change what a run computes.
INCIDENTAL = {"task": ("data_dir",), "training": ("save_every", "keep", "log_every", "trackers", "fallback")}

# Keys that older records lack, with their defaults; left out of the identity while they have them, so that
# the identity of such records stays.
LATER: dict[str, dict[str, Any]] = {
    "task": {"hold_out": True},
    "training": {"layer_decay": 1.0, "lr_scale": {}, "weight_decay_scale": {}, "fast": True,
                 "deterministic": True, "extended_from": ()},
}  # fmt: skip

# Flags of the command line: short names for common keys.
FLAGS = {
    **{name: f"{name}.name" for name in ("task", "model", "method")}, "tracker": "training.trackers",
    **{
        name: f"task.{name}"
        for name in ("data", "text", "text_pair", "label", "target", "kind", "test_file", "train_size",
                     "train_on", "max_length", "max_target_length", "tokenizer", "data_dir")
    },
    **{
        name: f"training.{name}"
        for name in ("lr", "epochs", "steps", "batch_size", "batch_tokens", "precision", "seed")
    },
}  # fmt: skip


def make_config(values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
    return checked(RunConfig, values, where)


def rebuild_config(values: Mapping[str, Any]) -> RunConfig:
    """The inverse of `RunConfig.to_dict`, without pydantic, for values that were checked before."""
    sections = {f.name: f.default_factory for f in fields(RunConfig) if f.default_factory is not MISSING}
    values = _tuples(values)
    return RunConfig(**{k: sections[k](**_tuples(v)) if k in sections else v for k, v in values.items()})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tuples in place of the lists of JSON and TOML."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def read_toml(path: str | Path, follow: bool = True) -> dict[str, Any]:
    """A TOML file as nested dictionaries; an error names the wrong line."""
    try:
        return parse_toml(read_file(Path(path), follow).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not a TOML file: {first_line(error)}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as nested dictionaries. Raises TOMLDecodeError, or ValueError if it cannot be a config."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("a number in it has thousands of digits") from None


def flag_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, by their keys: `lr` -> `training.lr`."""
    return {FLAGS[flag]: value for flag, value in given.items() if value is not None}


def resolve_config(
    base: Mapping[str, Any], file: Path | None, flags: Mapping[str, Any], assignments: Iterable[str]
) -> RunConfig:
    """The requested config: `base` (an experiment's values) overridden by a file, flags and --set."""
    values = merge({}, base)
    if file is not None:
        merge(values, read_toml(file))
    requested = overrides(flags, assignments)
    task, model = (values[name] if isinstance(values.get(name), dict) else {} for name in ("task", "model"))
    named = requested.get("model")
    if isinstance(named, dict) and "name" in named and task.get("tokenizer") == model.get("name"):
        task.pop("tokenizer", None)  # drop the previous model's tokenizer
    return make_config(merge(values, requested), "options" if file is None else str(file))


def overrides(flags: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Flags (`training.lr` -> value) and --set assignments in one nested mapping, so that --steps conflicts
    with --set training.epochs instead of replacing it."""
    values: dict[str, Any] = {}
    for part in [*(nest(path, value) for path, value in flags.items()), *map(from_assignment, assignments)]:
        update(values, part)
    return values


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`, in place; naming one of two ALTERNATIVES drops the other."""
    old, new = base.get("training"), over.get("training")
    if isinstance(old, dict) and isinstance(new, Mapping):
        for one, other in ALTERNATIVES:
            for named, dropped in ((one, other), (other, one)):
                if named in new and dropped not in new:
                    old.pop(dropped, None)
    return update(base, over)


def update(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`, table by table, in place."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            update(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value
    return base


def from_assignment(text: str) -> dict[str, Any]:
    """`training.lr=3e-4` as nested dictionaries; the value is TOML, or a plain string where it is not."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
        raise UserError(f"--set {text!r}: write it as section.key=value, for example training.lr=1e-3")
    try:
        parsed = parse_toml(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    except ValueError as error:
        raise UserError(f"--set {key}: the value cannot be used: {error}") from None
    return nest(key.strip(), parsed)


def nest(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def to_toml(values: Mapping[str, Any]) -> str:
    """Nested dictionaries as TOML: plain keys first, then one table per section."""
    tables: dict[str, Mapping[str, Any]]
    tables = {"": {key: value for key, value in values.items() if not isinstance(value, Mapping)}}
    tables |= {f"\n[{key}]": value for key, value in values.items() if isinstance(value, Mapping)}
    lines = []
    for title, table in tables.items():
        lines += [title, *(f"{name} = {_toml_value(value)}" for name, value in table.items())]
    text = "\n".join(lines).strip() + "\n"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text[: error.start].rpartition("\n")[2] + text[error.start :].partition("\n")[0]
        raise UserError(f"{line!r} cannot be written as UTF-8; rename it") from None
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    # TOML writes strings, numbers and booleans as JSON does, except for DEL and surrogate pairs in escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }
