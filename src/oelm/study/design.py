"""What a study compares: tasks x methods x learning rates x seeds, as one value and as a TOML file."""

import shlex
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from oelm.config import ALTERNATIVES, FORBID, RunConfig, make_config, merge, read_toml
from oelm.errors import UserError
from oelm.method import Method
from oelm.study.decide import LOOKS
from oelm.study.matrix import Matrix, Scores, plan_runs
from oelm.system.messages import named
from oelm.system.validation import checked

# Measured runs have the seeds 1, 2, ...; trials have seeds that no measured run uses.
FIRST_SEED, FIRST_CHOICE_SEED = 1, 1001


@dataclass(frozen=True)
class SlurmConfig:
    """The `[study.slurm]` table: the resources each worker requests. Empty: the cluster's default."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    workers: int = 4  # at most so many at a time; each takes as many runs side by side as fit
    partition: str = ""
    account: str = ""
    time: str | int = ""  # of a worker: "04:00:00", or minutes; when it is over, the worker is queued again
    gpus: int = 0
    cpus: int = 0
    memory: str = ""  # "32G"
    lead: int = 120  # seconds before the time limit at which runs save
    idle: int = 60  # seconds without a run after which a worker leaves
    extra: list[str] = field(default_factory=list)  # further options of sbatch: "--constraint=a100"
    setup: list[str] = field(default_factory=list)  # lines of shell before the worker: "module load cuda"

    def __post_init__(self) -> None:
        for name, least in {"workers": 1, "gpus": 0, "cpus": 0, "lead": 1, "idle": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"study.slurm.{name} must be at least {least}, got {getattr(self, name)}")
        for line in self.extra:
            if not line.startswith("-"):
                raise UserError(f"study.slurm.extra: {line!r} must be an option of sbatch, such as '--nice'")


@dataclass(frozen=True)
class StudyConfig:
    """The `[study]` table: what is compared, then how runs are made and kept."""

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    tasks: list[str] = field(default_factory=list)  # empty: the task of the [task] table
    methods: list[str | dict[str, Any]] = field(default_factory=lambda: ["baseline", "oelm"])
    reference: str | None = None  # the reference arm, which the others are compared with; None: the first
    metric: str | None = None  # chooses the learning rate and is compared on test; None: the task's own
    lrs: list[float] = field(default_factory=lambda: [1e-4, 3e-4, 1e-3])
    seeds: int = 5  # measured runs of each method, at its chosen learning rate
    choose_seeds: int = 3  # trials of each method at each learning rate
    measure: Literal["near-ties", "best", "all"] = "near-ties"  # learning rates that are measured
    contrasts: list[str] = field(default_factory=list)  # "oelm - frozen": besides those with the reference
    widen: int = 2  # how often the grid may grow at each side while a best learning rate is at its edge
    until_decided: bool = False  # look at 5, 10, ... seeds, up to `max_seeds`, each time at a quarter of 5 %
    max_seeds: int = 20
    margin: float = 1.0  # a smaller difference does not matter: points, or per cent of the perplexity
    models: Literal["best", "all", "none"] = "best"  # which trained models are kept, by validation
    jobs: int = 0  # runs side by side; 0: as many as there is room for
    threads: int = 1  # of the CPU, for each run
    memory_gb: float = 0.0  # for all runs together; 0: four fifths of what is free
    gpus_per_run: int = 1  # processes of each run; each has a GPU of its own where there are GPUs
    launcher: str = "local"  # where runs are trained: a name of `oelm.study.launchers`
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def __post_init__(self) -> None:
        for name in ("seeds", "choose_seeds", "threads", "gpus_per_run", "margin"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"study.{name} must be positive, got {getattr(self, name)}")
        for name in ("widen", "jobs", "memory_gb"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"study.{name} must be 0 or more, got {getattr(self, name)}")
        if self.until_decided and self.max_seeds < LOOKS[0]:
            raise UserError(f"study.max_seeds must be at least {LOOKS[0]}, got {self.max_seeds}")
        if max(self.seeds, self.max_seeds) >= FIRST_CHOICE_SEED:
            raise UserError(f"study.seeds must be below {FIRST_CHOICE_SEED}, where the seeds of trials start")
        if self.launcher == "slurm" and 0 < self.slurm.gpus < self.gpus_per_run:
            raise UserError(
                f"study.gpus_per_run is {self.gpus_per_run}, but a worker asks for {self.slurm.gpus}: raise "
                "study.slurm.gpus"
            )
        if not self.lrs or not all(0 < lr < float("inf") for lr in self.lrs):
            raise UserError(f"study.lrs needs positive learning rates, got {self.lrs}")
        if len(self.methods) < 2:
            raise UserError("study.methods needs at least two methods to compare")
        object.__setattr__(self, "lrs", sorted(map(float, self.lrs)))
        for what, entries in (("tasks", self.tasks), ("lrs", [f"{lr:g}" for lr in self.lrs])):
            if twice := sorted({entry for entry in entries if entries.count(entry) > 1}):
                raise UserError(f"study.{what} names {twice[0]} twice; leave one out")


# Keys that do not change what the study compares.
INCIDENTAL = ("models", "jobs", "threads", "memory_gb", "gpus_per_run", "launcher", "slurm")


# The tables in which the arms of a study may differ besides their method.
ARM_TABLES = ("training", "model")
# Keys that must be the same for all arms: set by the study, or needed for shared data and for pairs.
SAME_FOR_ALL = (
    "training.seed", "training.test", "training.precision", "training.fast",
    "training.fallback", "training.deterministic", "model.name",
)  # fmt: skip


@dataclass(frozen=True)
class StudyArm:
    """A method that a study compares, perhaps with training or model settings of its own."""

    method: dict[str, Any]  # its [method] table
    label: str  # what the method is called
    settings: dict[str, dict[str, Any]]  # table -> keys, such as {"training": {"warmup": 0}}
    lr: float | None = None  # its own learning rate, which is not chosen; None: the study's

    @property
    def keys(self) -> list[str]:
        return [f"{table}.{key}" for table, values in self.settings.items() for key in values]

    def applied_to(self, config: RunConfig, where: str = "study.methods") -> RunConfig:
        """The shared configuration with the settings of this arm."""
        return make_config(merge(config.to_dict(), self.settings), where) if self.settings else config


@dataclass(frozen=True)
class Study:
    """A study: its `[study]` table, the run configuration that all runs share, and the changes of it for
    single tasks."""

    table: StudyConfig
    base: dict[str, Any]
    per_task: dict[str, dict[str, Any]] = field(default_factory=dict)
    title: str = ""

    @cached_property
    def arms(self) -> dict[str, StudyArm]:
        """The arms by name. An entry of `study.methods` is a method's name, or a table with fields of the
        method, the name of the `arm`, and `training` and `model` keys that differ in this arm."""
        arms: dict[str, StudyArm] = {}
        for entry in self.table.methods:
            values: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
            if "name" not in values:
                raise UserError("study.methods: an entry needs the name of a method: name = ...")
            for table in set(ARM_TABLES) & values.keys():
                if not isinstance(values[table], Mapping):
                    raise UserError(f"study.methods: {table} must be a table, got {values[table]!r}")
            settings = {table: dict(values.pop(table)) for table in ARM_TABLES if table in values}
            lr = self._own_lr(settings)
            name = values.pop("arm", None)
            if name is not None and (not isinstance(name, str) or not name.strip()):
                raise UserError(f"study.methods: arm must be a name, got {name!r}")
            label = Method.from_dict(values).name
            arm = StudyArm(values, label, settings, lr)
            if (settings or lr) and name is None:
                key = "training.lr" if lr else arm.keys[0]
                example = f'{{name = ..., method = "{label}", {key} = ...}}'
                raise UserError(f"an arm with {key} of its own needs a name: study.arms = [{example}]")
            for key in set(arm.keys) & set(SAME_FOR_ALL):
                raise UserError(f"study.arms: {key} of {name} must be the same for all arms; leave it out")
            if (name := str(name or label)) in arms:
                raise UserError(f"study.methods names {name} twice")
            arms[name] = arm
        return arms

    def _own_lr(self, settings: dict[str, dict[str, Any]]) -> float | None:
        """Remove an arm's own learning rate from its settings and return it; the matrix sets that of a
        run."""
        lr = settings.get("training", {}).pop("lr", None)
        if lr is None:
            return None
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < float("inf"):
            raise UserError(f"study.arms: training.lr must be a positive number, got {lr!r}")
        if len(self.table.lrs) > 1:
            raise UserError(
                f"study.arms: an arm has training.lr = {lr:g} of its own, the others {len(self.table.lrs)} "
                "to choose from; leave it out, or give study.lrs one rate"
            )
        if not settings["training"]:
            del settings["training"]
        return float(lr)

    @property
    def differs_in(self) -> tuple[str, ...]:
        """The keys, besides the method's and the learning rate, in which the arms differ."""
        keys = {key for arm in self.arms.values() for key in arm.keys}
        for pair in ALTERNATIVES:
            names = {f"training.{name}" for name in pair}
            keys |= names if names & keys else set()
        return tuple(sorted(keys))

    @property
    def reference_arm(self) -> str:
        name = self.table.reference or next(iter(self.arms))
        if name not in self.arms:
            known = ", ".join(map(named, self.arms))
            raise UserError(f"study.reference {name!r} is not among the methods: {known}")
        return name

    @property
    def plan(self) -> dict[str, Any]:
        """The part of the [study] table that must not change once a run is tested: without INCIDENTAL
        keys."""
        left_out = (*INCIDENTAL, "seeds") if self.table.until_decided else INCIDENTAL
        table = {key: value for key, value in asdict(self.table).items() if key not in left_out}
        return {key: value for key, value in table.items() if value is not None}

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds after which the results are looked at: one, unless `until_decided`."""
        if not self.table.until_decided:
            return (self.table.seeds,)
        return tuple(seeds for seeds in LOOKS if seeds <= self.table.max_seeds)

    @property
    def next_look(self) -> int:
        """The first look of the plan at or after the current number of seeds."""
        return min((seeds for seeds in self.looks if seeds >= self.table.seeds), default=self.table.seeds)

    @property
    def contrasts(self) -> list[tuple[str, str]]:
        """The pairs of arms that are compared: every arm with the reference arm, then `study.contrasts`."""
        pairs = [(name, self.reference_arm) for name in self.arms if name != self.reference_arm]
        for text in self.table.contrasts:
            pair = tuple(name.strip() for name in text.split(" - "))
            if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= self.arms.keys():
                raise UserError(
                    f"study.contrasts: {text!r} must be two of the arms, as in 'oelm - frozen'; the arms are "
                    f"{', '.join(map(named, self.arms))}"
                )
            pairs.append((pair[0], pair[1]))
        return list(dict.fromkeys(pairs))

    @property
    def tasks(self) -> list[str | None]:
        """Names of tasks; `None` is the task of the [task] table."""
        return [*self.table.tasks] or [None]

    @property
    def seeds(self) -> list[int]:
        return list(range(FIRST_SEED, FIRST_SEED + self.table.seeds))

    @property
    def choice_seeds(self) -> list[int]:
        return list(range(FIRST_CHOICE_SEED, FIRST_CHOICE_SEED + self.table.choose_seeds))

    def task_config(self, task: str | None) -> RunConfig:
        """The run configuration of a task, without method, learning rate and seed."""
        values = deepcopy(self.base)
        if task is not None:
            merge(values, {"task": {"name": task}})
            merge(values, self.per_task.get(task, {}))
        return make_config(values, self.title or "study")

    def matrix(self, scores: Scores, larger_is_better: bool, partial: bool = False) -> Matrix:
        """The runs of one task that are needed, given these validation scores; see `plan_runs`."""
        table, names = self.table, list(self.arms)
        own = {name: arm.lr for name, arm in self.arms.items() if arm.lr is not None}
        return plan_runs(
            names, table.lrs, self.choice_seeds, self.seeds, table.widen, scores, larger_is_better, partial,
            table.measure, own,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        table = {key: value for key, value in asdict(self.table).items() if value is not None}
        if self.table.slurm == SlurmConfig():
            del table["slurm"]
        per_task = {"per_task": self.per_task} if self.per_task else {}
        return {"title": self.title, "study": table, **deepcopy(self.base), **deepcopy(per_task)}

    def as_written(self) -> dict[str, Any]:
        """The values as a user writes them in a file: with `arms` in place of `methods` where arms are
        named."""
        values = self.to_dict()
        entries = values["study"]["methods"]
        if any(isinstance(entry, Mapping) and "arm" in entry for entry in entries):
            values["study"]["arms"] = [
                _renamed(entry, {"arm": "name", "name": "method"}) for entry in entries
            ]
            del values["study"]["methods"]
        return values


def _renamed(entry: Any, names: Mapping[str, str]) -> Any:
    return {names.get(key, key): entry[key] for key in entry} if isinstance(entry, Mapping) else entry


def _arms_as_methods(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The [study] table with its `arms`, which have a name and a method, as entries of `methods`."""
    table = dict(given)
    if "arms" not in table:
        return table
    if "methods" in table:
        raise UserError(f"{where}: study.arms and study.methods say the same; leave one of them out")
    arms = table.pop("arms")
    if not isinstance(arms, list):
        raise UserError(f"{where}: study.arms must be a list, got {arms!r}")
    for entry in arms:
        if isinstance(entry, Mapping) and "method" not in entry:
            raise UserError(f'{where}: study.arms: {entry} needs its method, such as method = "baseline"')
    return table | {"methods": [_renamed(entry, {"name": "arm", "method": "name"}) for entry in arms]}


def make_study(values: Mapping[str, Any], where: str = "study") -> Study:
    base = deepcopy(dict(values))
    for name in ("study", "per_task", "task", "model", "training"):
        if not isinstance(base.get(name, {}), Mapping):
            raise UserError(f"{where}: {name} must be a table, [{name}], got {base[name]!r}")
    title = str(base.pop("title", ""))
    base.pop("title_zh", None)
    per_task = base.pop("per_task", {})
    given = _arms_as_methods(base.pop("study", {}), where)
    table = checked(StudyConfig, given, where, "study")
    if unknown := sorted(set(per_task) - set(table.tasks)):
        raise UserError(f"{where}: per_task.{unknown[0]} is not among study.tasks")
    _refuse_study_keys(base, where, "")
    for task, values in per_task.items():
        _refuse_study_keys(values, where, f"per_task.{task}.")
    study = Study(table, base, per_task, title)
    for task in study.tasks:
        config = study.task_config(task)
        if not config.task.hold_out:
            raise UserError(
                f"{where}: a study chooses on validation rows, so task.hold_out = false is for `oelm train` "
                "only; leave it out"
            )
        arms = [arm.applied_to(config, f"{where}: study.methods, {name}") for name, arm in study.arms.items()]
        if any(arm.training.choose_on == "test" for arm in arms) and len(table.lrs) > 1:
            raise UserError(
                f"{where}: training.choose_on = 'test' repeats a published habit at one learning rate; "
                "several study.lrs are chosen on validation"
            )
    assert study.reference_arm
    return study


def _refuse_study_keys(values: Any, where: str, place: str) -> None:
    """Refuse keys that the study itself sets for every run."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: {place[:-1]} must be a table, [{place[:-1]}], got {values!r}")
    method = values.get("method") or {}
    for key in method if isinstance(method, Mapping) else ("name",):
        example = "" if key == "name" else f', such as {{name = "oelm", {key} = ...}}'
        raise UserError(f"{where}: {place}method.{key} is set by study.methods{example}; leave it out")
    testing = "the study, which tests each measured run once"
    for key, setter in {"lr": "study.lrs", "seed": "study.seeds", "test": testing}.items():
        if key in values.get("training", {}):
            raise UserError(f"{where}: {place}training.{key} is set by {setter}; leave it out")


def shipped_studies() -> dict[str, Any]:
    """The studies inside the package: name -> file."""
    studies = {
        file.name.removesuffix(".toml"): file
        for file in (files("oelm") / "experiments").iterdir()
        if file.name.endswith(".toml") and "\n[study]" in "\n" + file.read_text(encoding="utf-8")
    }
    return dict(sorted(studies.items()))


def title_in(lang: str, title: str) -> str:
    """The title of a shipped study in another language; any other title as it is."""
    known = (read_toml(str(file)) for file in shipped_studies().values()) if lang != "en" else ()
    return next((str(v[f"title_{lang}"]) for v in known if v["title"] == title), title)


def read_study(name: str) -> dict[str, Any]:
    """The values of a shipped study by its name, or of a TOML file."""
    shipped = shipped_studies()
    if name in shipped:
        values = read_toml(str(shipped[name]))
        if name == "demo":
            from oelm.data.demo import demo_files

            values["task"] |= dict(zip(("data", "test_file"), map(str, demo_files()), strict=True))
        return values
    if Path(name, "study.toml").is_file():
        again = f"oelm study --out {shlex.quote(name)}"
        raise UserError(f"{name} is the folder of a study: {again} goes on with it")
    if not Path(name).is_file():
        raise UserError(f"{name!r} is neither a file nor a shipped study; shipped: {', '.join(shipped)}")
    values = read_toml(name)
    if "study" not in values:
        raise UserError(f"{name} is not a study: it has no [study] table")
    return values
