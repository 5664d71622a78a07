"""What a study compares: tasks x methods x learning rates x seeds, as one value and as a TOML file."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from oelm.config import ALTERNATIVES, FORBID, RunConfig, checked, make_config, merge, read_toml, to_toml
from oelm.errors import UserError
from oelm.method import Method
from oelm.study.launchers import LAUNCHERS
from oelm.study.matrix import Matrix, Scores, plan_runs

# Measured runs have the seeds 1, 2, ...; the rate is chosen with seeds that no measured run uses.
FIRST_SEED, FIRST_CHOICE_SEED = 1, 1001


@dataclass
class StudyConfig:
    """The `[study]` table. What is not about the comparison itself is at the end."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    tasks: list[str] = field(default_factory=list)  # none: the one of the [task] table
    methods: list[str | dict[str, Any]] = field(default_factory=lambda: ["baseline", "oelm"])
    reference: str | None = None  # what the others are compared with; None: the first method
    lrs: list[float] = field(default_factory=lambda: [1e-4, 3e-4, 1e-3])
    seeds: int = 5  # measured runs of each method, at its chosen rate
    choose_seeds: int = 1  # runs of each method at each rate that the choice is made on
    widen: int = 2  # rates added to a side of the grid, for all methods, while the best is at its edge
    margin: float = 1.0  # differences below it are equivalent: points, or per cent of the perplexity
    models: Literal["best", "all", "none"] = "best"  # which trained models are kept, by validation
    jobs: int = 0  # runs side by side; 0: as many as there is room for
    threads: int = 1  # of the CPU, for each run
    memory_gb: float = 0.0  # for all runs together; 0: four fifths of what is free
    gpus_per_run: int = 1  # processes of each run; each has a GPU of its own where there are GPUs
    launcher: str = "local"  # where runs are trained: a name of `oelm.study.launchers`

    def __post_init__(self) -> None:
        for name in ("seeds", "choose_seeds", "threads", "gpus_per_run", "margin"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"study.{name} must be positive, not {getattr(self, name)}")
        for name in ("widen", "jobs", "memory_gb"):
            if getattr(self, name) < 0:
                raise UserError(f"study.{name} must not be negative, but is {getattr(self, name)}")
        if self.seeds >= FIRST_CHOICE_SEED:
            raise UserError(f"study.seeds must be below {FIRST_CHOICE_SEED}: the choice's seeds start there")
        if not self.lrs or not all(0 < lr < float("inf") for lr in self.lrs):
            raise UserError(f"study.lrs needs positive learning rates, not {self.lrs}")
        if len(self.methods) < 2:
            raise UserError("study.methods needs at least two methods to compare")
        self.lrs = sorted(set(map(float, self.lrs)))
        if self.launcher not in LAUNCHERS:
            raise UserError(f"study.launcher must be one of {', '.join(LAUNCHERS)}, got {self.launcher!r}")
        if len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"study.tasks names a task twice: {', '.join(self.tasks)}")


# Keys that decide how runs are made and kept, not what the study compares.
INCIDENTAL = ("models", "jobs", "threads", "memory_gb", "gpus_per_run", "launcher")


# What the arms of a study may differ in besides their method; the data is the same for all.
ARM_TABLES = ("training", "model")
# Set by the study, needed for the data of all arms, or for runs that can be a pair.
SAME_FOR_ALL = (
    "training.lr", "training.seed", "training.test", "training.precision", "training.fast",
    "training.fallback", "training.deterministic", "model.name",
)  # fmt: skip


@dataclass(frozen=True)
class StudyArm:
    """One of the methods that a study compares, perhaps with settings of its own."""

    method: dict[str, Any]  # its [method] table
    label: str  # what the method is called
    settings: dict[str, dict[str, Any]]  # table -> keys, such as {"training": {"warmup": 0}}

    @property
    def keys(self) -> list[str]:
        return [f"{table}.{key}" for table, values in self.settings.items() for key in values]

    def applied_to(self, config: RunConfig, where: str = "study.methods") -> RunConfig:
        """The configuration that all share with the settings of this arm."""
        return make_config(merge(config.to_dict(), self.settings), where) if self.settings else config


@dataclass(frozen=True)
class Study:
    """A comparison: `table` says what, `base` is the run configuration everything shares, `per_task` what
    single tasks change in it."""

    table: StudyConfig
    base: dict[str, Any]
    per_task: dict[str, dict[str, Any]] = field(default_factory=dict)
    title: str = ""

    @cached_property
    def arms(self) -> dict[str, StudyArm]:
        """An arm's name in tables -> what it is. An entry of `study.methods` is a method's name, or a table
        of its fields, of `arm` (a name) and of `training` and `model` keys that this arm has otherwise."""
        found: dict[str, StudyArm] = {}
        for entry in self.table.methods:
            values: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
            if "name" not in values:
                raise UserError("study.methods: an entry needs the name of a method: name = ...")
            for table in set(ARM_TABLES) & values.keys():
                if not isinstance(values[table], Mapping):
                    raise UserError(f"study.methods: {table} must be a table, not {values[table]!r}")
            settings = {table: dict(values.pop(table)) for table in ARM_TABLES if table in values}
            name = values.pop("arm", None)
            if name is not None and (not isinstance(name, str) or not name.strip()):
                raise UserError(f"study.methods: arm must be a name, not {name!r}")
            label = Method.from_dict(values).name
            arm = StudyArm(values, label, settings)
            if settings and name is None:
                raise UserError(f"study.methods: {label} with {arm.keys[0]} needs a name: arm = ...")
            for key in set(arm.keys) & set(SAME_FOR_ALL):
                raise UserError(f"study.methods: {key} of {name} must be the same for all arms; leave it out")
            if (name := str(name or label)) in found:
                raise UserError(f"study.methods names {name} twice")
            found[name] = arm
        return found

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """An arm's name in tables -> its `[method]` table."""
        return {name: arm.method for name, arm in self.arms.items()}

    @property
    def differs_in(self) -> list[str]:
        """The keys, besides the method's, in which the arms differ."""
        keys = {key for arm in self.arms.values() for key in arm.keys}
        for pair in ALTERNATIVES:
            names = {f"training.{name}" for name in pair}
            keys |= names if names & keys else set()
        return sorted(keys)

    @property
    def reference_arm(self) -> str:
        """The name of the arm that the others are compared with."""
        if self.table.reference is None:
            return next(iter(self.methods))
        if self.table.reference in self.arms:
            return self.table.reference
        label = Method.from_dict({"name": self.table.reference}).name
        if label not in self.methods:
            raise UserError(f"study.reference {label!r} is not among the methods: {', '.join(self.methods)}")
        return label

    @property
    def tasks(self) -> list[str | None]:
        """Names of tasks; `None` is the one of the [task] table."""
        return [*self.table.tasks] or [None]

    @property
    def seeds(self) -> list[int]:
        return list(range(FIRST_SEED, FIRST_SEED + self.table.seeds))

    @property
    def choice_seeds(self) -> list[int]:
        return list(range(FIRST_CHOICE_SEED, FIRST_CHOICE_SEED + self.table.choose_seeds))

    def task_config(self, task: str | None) -> RunConfig:
        """The run configuration of a task, before method, rate and seed."""
        values = deepcopy(self.base)
        if task is not None:
            merge(values, {"task": {"name": task}})
            merge(values, self.per_task.get(task, {}))
        return make_config(values, self.title or "study")

    def matrix(self, scores: Scores, larger_is_better: bool, partial: bool = False) -> Matrix:
        """The runs of one task that are needed, given these validation scores; see `plan_runs`."""
        table, names = self.table, list(self.methods)
        return plan_runs(
            names, table.lrs, self.choice_seeds, self.seeds, table.widen, scores, larger_is_better, partial
        )

    def to_dict(self) -> dict[str, Any]:
        table = {key: value for key, value in asdict(self.table).items() if value is not None}
        per_task = {"per_task": self.per_task} if self.per_task else {}
        return {"title": self.title, "study": table, **deepcopy(self.base), **deepcopy(per_task)}

    def to_toml(self) -> str:
        return to_toml(self.to_dict())


def make_study(values: Mapping[str, Any], where: str = "study") -> Study:
    """Check a nested mapping and make a Study of it."""
    base = deepcopy(dict(values))
    for name in ("study", "per_task", "task", "model", "training"):
        if not isinstance(base.get(name, {}), Mapping):
            raise UserError(f"{where}: {name} must be a table, [{name}], not {base[name]!r}")
    title = str(base.pop("title", ""))
    per_task = base.pop("per_task", {})
    asked = base.pop("study", {})
    for key, value in asked.items():
        if isinstance(value, bool):  # which would pass for the number 1
            raise UserError(f"{where}: study.{key} is neither true nor false, but {str(value).lower()} here")
    table = checked(StudyConfig, asked, f"{where}: [study]")
    if strange := sorted(set(per_task) - set(table.tasks)):
        raise UserError(f"{where}: per_task.{strange[0]} is not among study.tasks")
    _check_foreign(base, where, "")
    for task, values in per_task.items():
        _check_foreign(values, where, f"per_task.{task}.")
    study = Study(table, base, per_task, title)
    for task in study.tasks:  # checked before anything is spent
        config = study.task_config(task)
        arms = [arm.applied_to(config, f"{where}: study.methods, {name}") for name, arm in study.arms.items()]
        if any(arm.training.choose_on == "test" for arm in arms) and len(table.lrs) > 1:
            raise UserError(
                f"{where}: training.choose_on = 'test' repeats a published habit at one rate; "
                "several study.lrs are chosen on validation"
            )
    assert study.reference_arm
    return study


def _check_foreign(values: Any, where: str, place: str) -> None:
    """Refuse what the study itself decides for every run."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: {place[:-1]} must be a table, [{place[:-1]}], not {values!r}")
    found = values.get("method") or {}
    for key in found if isinstance(found, Mapping) else ("name",):
        example = "" if key == "name" else f', such as {{name = "oelm", {key} = ...}}'
        raise UserError(f"{where}: {place}method.{key} is set by study.methods{example}; leave it out")
    for key, instead in (
        ("lr", "study.lrs"),
        ("seed", "study.seeds"),
        ("test", "a study, which tests each measured run once"),
    ):
        if key in values.get("training", {}):
            raise UserError(f"{where}: {place}training.{key} is set by {instead}; leave it out")


def shipped_studies() -> dict[str, Any]:
    """The studies inside the package: name -> file."""
    found = {}
    for file in (files("oelm") / "experiments").iterdir():
        if file.name.endswith(".toml") and "\n[study]" in "\n" + file.read_text(encoding="utf-8"):
            found[file.name.removesuffix(".toml")] = file
    return dict(sorted(found.items()))


def read_study(name: str) -> dict[str, Any]:
    """The values of a study by its shipped name, or of a TOML file."""
    shipped = shipped_studies()
    if name in shipped:
        values = read_toml(str(shipped[name]))
        if name == "demo":
            from oelm.data.demo import demo_file

            values["task"]["data"] = str(demo_file())
        return values
    if not Path(name).is_file():
        raise UserError(f"{name!r} is neither a file nor a shipped study; shipped: {', '.join(shipped)}")
    values = read_toml(name)
    if "study" not in values:
        raise UserError(f"{name} is not a study: it has no [study] table")
    return values
