"""A study's folder: what it holds, which runs belong to it, and the import of other machines' records."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.config import ArmConfig, MethodConfig, RunConfig, merge, read_toml, to_toml
from oelm.errors import UserError
from oelm.models.gpt_sizes import numerics_of
from oelm.study.design import Study, make_study
from oelm.study.matrix import Cell, Matrix, Scores
from oelm.study.record_checks import type_problem
from oelm.study.records import (
    FILES,
    Identity,
    Record,
    cut_path,
    digest,
    find_records,
    identity_values,
    read_record,
)
from oelm.system import files
from oelm.system.messages import Notice
from oelm.training.folder import difference
from oelm.training.predictions import is_published, larger_is_better, write_predictions

if TYPE_CHECKING:
    from oelm.data import Store

LARGEST = 1 << 30  # bytes: the largest file that an import copies


@dataclass
class Setting:
    """One task of a study with its prepared dataset: everything its runs share."""

    study: Study
    config: RunConfig
    store: "Store"
    precision: str
    scores: Scores = field(default_factory=dict)  # on validation
    tests: dict[Cell, float] = field(default_factory=dict)
    # `Cell.pairing` of runs that take the plain path in every arm, because the fast path failed in one arm
    # and pairs must have the same arithmetic.
    plain: set[tuple[int, float | None]] = field(default_factory=set)
    _values: dict[Any, tuple[str, dict[str, Any]]] = field(default_factory=dict, init=False, repr=False)

    @property
    def task(self) -> str:
        return self.store.task

    def run_config(self, cell: Cell) -> RunConfig:
        """The task's config with the method and settings of the run's arm, its learning rate and its seed."""
        arm = self.study.arms[cell.method]
        config = arm.applied_to(self.config)
        training = replace(config.training, lr=cell.lr, seed=cell.seed, test=not cell.choosing)
        if cell.pairing in self.plain:
            training = replace(training, fast=False)
        name = cell.method if cell.method != arm.label else None
        labels = ArmConfig(name, self.study.differs_in)
        return replace(config, method=MethodConfig(**arm.method), training=training, arm=labels)

    def take_plain_path(self, cell: Cell) -> None:
        """Make the cell and its pairs by the plain path; results of the fast path are dropped."""
        self.plain.add(cell.pairing)
        for results in (self.scores, self.tests):
            for other in [c for c in results if c.pairing == cell.pairing]:
                del results[other]

    def identity(self, cell: Cell) -> Identity:
        """The identity of a cell's run; what runs of one arm share is computed once, as there may be
        thousands of them."""
        kind = (cell.method, cell.choosing, cell.pairing in self.plain)
        if kind not in self._values:
            config = self.run_config(cell)
            numerics = numerics_of(str(config.model.name))
            self._values[kind] = identity_values(config, self.store.fingerprint, self.precision, numerics)
        setting, values = self._values[kind]
        return Identity(setting, digest(values | {"lr": cell.lr, "seed": cell.seed})[:16])

    def matching_record(self, record: Record) -> Record | None:
        """A record, perhaps of another machine, as one of this setting; None if it belongs to another.

        Precision "auto" accepts any. A published record names its model's folder without the path, which is
        filled in here.
        """
        precision, name = record.results.get("precision", self.precision), str(self.config.model.name)
        if self.config.training.precision not in ("auto", precision):
            return None
        if record.config.model.name == cut_path(name) != name:
            record = record.with_model_name(name)
        adapted = record.with_differing_keys(self.study.differs_in)
        return adapted if replace(self, precision=precision).key == adapted.identity.setting else None

    @property
    def key(self) -> str:
        """The digest of what all runs of the setting share, whatever their method, learning rate and seed."""
        return self.identity(self.any_cell).setting

    @property
    def any_cell(self) -> Cell:
        return Cell(next(iter(self.study.arms)), self.study.table.lrs[0], self.study.seeds[0], False)

    def folder(self, root: Path, cell: Cell) -> Path:
        return root / run_folder(self.task, cell, self.identity(cell).key)

    @property
    def metric(self) -> str:
        """What the study compares."""
        return self.study.table.metric or self.store.metric

    @property
    def larger_is_better(self) -> bool:
        return larger_is_better(self.metric)

    def matrix(self) -> Matrix:
        return self.study.matrix(self.scores, self.larger_is_better)


def run_folder(task: str, cell: Cell, key: str) -> Path:
    """The folder of a run inside its study's folder: readable, and unique by the digest at its end."""
    part = "choice" if cell.choosing else "measured"
    names = (files.folder_name(name, 80, also="-_.=") for name in (task, cell.method))
    return Path("runs", *names, f"{part}-lr{cell.lr:g}-s{cell.seed}-{key[:8]}")


@dataclass(frozen=True)
class StudyFolder:
    """A study's folder, held by one process at a time: study.toml, study.json, runs/, log/."""

    path: Path

    @contextlib.contextmanager
    def lock(self, study: Study) -> Iterator[None]:
        """Lock the folder, which is new or of the same study; refused if its shared config differs. Methods,
        tasks, learning rates and seeds may have been added or removed: finished runs are reused."""
        self.check(study)
        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = files.lock_file(self.path / "study.lock")
        except BlockingIOError:
            raise UserError(f"{self.path} is in use by another process; wait for it") from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            yield
        finally:
            if not (self.path / "study.toml").exists():  # the study could not start: leave nothing behind
                (self.path / "study.lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    for path in created:
                        path.rmdir()
            lock.close()

    def save(self, study: Study, settings: list[Setting]) -> None:
        """Write study.toml and, as long as no run has been tested, the plan into study.json."""
        if (self.path / "study.toml").exists():
            self._check_data(study, settings)
        records = find_records(self.path / "runs", []) if (self.path / "runs").exists() else ()
        if all(record.test is None for record in records):
            self.write_plan(study)
        files.write_text(self.path / "study.toml", to_toml(study.as_written()))

    def write_plan(self, study: Study) -> None:
        self.write(plan=study.plan, plan_digest=digest(study.plan))

    def plan(self) -> dict[str, Any] | None:
        """The plan recorded before the first test result; None if there is none."""
        values = self._read()
        if "plan" in values and values.get("plan_digest") != digest(values["plan"]):
            raise UserError(f"the plan in {self.path / 'study.json'} was edited; a plan cannot be changed")
        return values.get("plan")

    def planned(self) -> Study:
        """The study as it was planned, with the methods and tasks that were added later."""
        study, plan = self.read(), dict(self.plan() or {})
        for key in ("methods", "tasks") if plan else ():
            plan[key] = [*plan[key], *(entry for entry in study.plan[key] if entry not in plan[key])]
        values = study.to_dict()
        for key in ("metric", "reference") if plan else ():  # a plan lacks keys that were not set
            values["study"].pop(key, None)
        return make_study(merge(values, {"study": plan}), f"the plan of {self.path}")

    def check(self, study: Study) -> None:
        """Refuse a folder that is not a study, or whose study has other settings."""
        files.check_name(self.path)
        if not (self.path / "study.toml").exists():
            entries = self.path.iterdir() if self.path.is_dir() else ()
            if self.path.is_file() or any(entry.name != "study.lock" for entry in entries):
                raise UserError(f"{self.path} is not a study; name a new folder")
            return
        before = self.read()
        for task in study.tasks:
            if task in before.tasks:
                # A data file may have moved: `_check_data` compares what it holds once it is prepared.
                old, new = (s.task_config(task).identity(files=False) for s in (before, study))
                if old != new:
                    raise UserError(
                        f"{self.path} holds a study with other settings ({difference(old, new)}); "
                        "name another folder"
                    )

    def _check_data(self, study: Study, settings: list[Setting]) -> None:
        """Refuse a data file whose content differs from what the runs in this folder were trained on."""
        before = self.read()
        if study.tasks != before.tasks or study.table.tasks:
            return
        old, new = (s.task_config(None).identity() for s in (before, study))
        made = self._read().get("made", [])
        if old != new and made and settings[0].key not in made:
            raise UserError(
                f"{self.path} holds a study of other data ({difference(old, new)}); name another folder"
            )

    def read(self) -> Study:
        if not (self.path / "study.toml").is_file():
            raise UserError(f"{self.path} is not a study: it has no study.toml")
        return make_study(read_toml(self.path / "study.toml"), str(self.path / "study.toml"))

    def _read(self) -> dict[str, Any]:
        path = self.path / "study.json"
        values = files.read_json(path) if path.exists() else {}
        if type_problem(values, {"list": ("made", "imported")}):
            raise UserError(f"{path} is damaged; delete it, and start the study again to write a new one")
        return values

    def write(self, **values: Any) -> None:
        """Update study.json: `made` and `imported` (keys of the settings whose runs belong to the study),
        `plan` and its digest."""
        files.write_json(self.path / "study.json", self._read() | values)

    def records(self, damaged: list[Notice] | None = None) -> tuple[list[Record], int]:
        """The study's records, and how many records in its folder are of other data or numerics versions."""
        values = self._read()
        keys = {*values.get("made", []), *values.get("imported", [])}
        differs_in = self.read().differs_in if (self.path / "study.toml").is_file() else ()
        records = [
            record.with_differing_keys(differs_in) for record in find_records(self.path / "runs", damaged)
        ]
        belonging = [record for record in records if record.identity.setting in keys]
        return belonging, len(records) - len(belonging)

    def import_records(self, source: Path, settings: list[Setting]) -> tuple[int, dict[str, int]]:
        """Copy records of another machine into this study; returns the number of records that were copied,
        and reason -> number of records that were not."""
        check_folder(source)
        imported, refused, keys = 0, Counter[str](), set()
        damaged: list[Notice] = []
        for record in find_records(source, damaged, follow=False):
            candidates = ((s.matching_record(record), s.task) for s in settings)
            match = next(((own, task) for own, task in candidates if own is not None), None)
            if not record.evaluated:
                refused[f"{record.results['status']}"] += 1
            elif match is None:
                refused["of another configuration, data or numerics version"] += 1
            else:
                own, task = match
                keys.add(own.identity.setting)
                try:
                    renamed = own.config != record.config
                    copied = self._copy(own, run_folder(task, own.cell, own.identity.key), renamed)
                except UserError as error:
                    damaged.append(error.notice)
                    continue
                imported += copied
                refused["there already"] += not copied
        if damaged:
            refused[f"damaged, such as {damaged[0]}"] = len(damaged)
        if not imported and not refused:
            raise no_runs(source, [])
        self.write(imported=sorted({*self._read().get("imported", []), *keys}))
        return imported, {reason: count for reason, count in refused.items() if count}

    def _copy(self, record: Record, name: Path, renamed: bool) -> bool:
        """Copy a whole record into the study's folder, or nothing; False if the run already has a result.
        `renamed`: its model has another name here, so that its config and results are written anew."""
        to = self.path / name
        try:
            existing = read_record(to)
        except UserError:
            set_aside(self.path, to)
            existing = None
        if existing is not None and existing.evaluated:
            return False
        to.parent.mkdir(parents=True, exist_ok=True)
        with files.folder_beside(to) as beside:
            for file in FILES:
                path = record.folder / file
                if path.exists() or path.is_symlink():
                    files.copy_file(path, beside / file, LARGEST)
            if renamed:
                files.write_text(beside / "config.toml", to_toml(record.config.to_dict()))
                files.write_json(beside / "results.json", record.results)
            if is_published(record.folder) and (arrays := record.predictions()) is not None:
                write_predictions(beside, arrays)  # published records share labels and ids in one file
            files.delete(to)
            beside.rename(to)
        return True


def set_aside(root: Path, folder: Path) -> Path:
    """Move a damaged run to the study's folder `damaged`, so that it can be made again; returns the new
    path."""
    moved = root / "damaged" / f"{folder.name}-{secrets.token_hex(4)}"
    moved.parent.mkdir(exist_ok=True)
    folder.rename(moved)
    return moved


def records_below(folder: Path) -> tuple[list[Record], int, list[Notice]]:
    """The records of a study, or of all runs below a folder; the number of records in the study's folder that
    do not belong to it; the problems of records that cannot be read."""
    damaged: list[Notice] = []
    if (folder / "study.toml").is_file():
        return *StudyFolder(folder).records(damaged), damaged
    return list(find_records(folder, damaged)), 0, damaged


def no_runs(folder: Path, damaged: list[Notice]) -> UserError:
    why = f": {damaged[0]}" if damaged else ""
    return UserError(f"{folder} holds no run that has ended{why}")


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder" if folder.exists() else f"{folder}: no such folder")
