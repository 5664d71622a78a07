"""A study's folder: what it holds, which runs belong to it, and how records of other machines come in."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from oelm.config import ArmConfig, MethodConfig, RunConfig, read_toml
from oelm.data.tasks.metrics import LOWER_IS_BETTER
from oelm.errors import UserError
from oelm.study.design import INCIDENTAL, Study, make_study
from oelm.study.matrix import Cell, Matrix, Scores, unfold
from oelm.study.records import FILES, Identity, Record, find_records, identify, read_record
from oelm.system.files import (
    check_name,
    copy_file,
    delete,
    folder_beside,
    folder_name,
    lock_file,
    read_json,
    write_json,
    write_text,
)
from oelm.system.messages import Notice
from oelm.system.version import NUMERICS
from oelm.training.folder import difference
from oelm.training.predictions import is_published, write_predictions

if TYPE_CHECKING:
    from oelm.data import Store

LARGEST = 1 << 30  # bytes of one file of a record that is imported


@dataclass
class Setting:
    """One task of a study with its data: everything its runs share."""

    study: Study
    config: RunConfig
    store: "Store"
    precision: str
    scores: Scores = field(default_factory=dict)  # on validation
    tests: dict[Cell, float] = field(default_factory=dict)
    # (seed, whether it serves a choice) whose runs take the plain path in every arm: in one of them the fast
    # path gave out, and pairs have the same arithmetic.
    plain: set[tuple[int, bool]] = field(default_factory=set)

    @property
    def task(self) -> str:
        return self.store.task

    def run_config(self, cell: Cell) -> RunConfig:
        entry, settings = self.study.arms[cell.method], self.study.differs_in
        config = entry.applied_to(self.config)
        training = replace(config.training, lr=cell.lr, seed=cell.seed, test=not cell.choosing)
        if (cell.seed, cell.choosing) in self.plain:
            training = replace(training, fast=False)
        arm = ArmConfig(cell.method if cell.method != entry.label else None, settings)
        return replace(config, method=MethodConfig(**entry.method), training=training, arm=arm)

    def take_plain_path(self, cell: Cell) -> None:
        """Have all runs of a cell's seed made by the plain path; those by the fast one no longer count."""
        self.plain.add((cell.seed, cell.choosing))
        for known in (self.scores, self.tests):
            for other in [c for c in known if (c.seed, c.choosing) == (cell.seed, cell.choosing)]:
                del known[other]

    def identity(self, cell: Cell) -> Identity:
        return identify(self.run_config(cell), self.store.fingerprint, self.precision, NUMERICS)

    def fits(self, record: Record) -> bool:
        """Whether a record, perhaps of another machine, is of this setting; "auto" fits any precision."""
        precision = record.results.get("precision", self.precision)
        if self.config.training.precision not in ("auto", precision):
            return False
        seen = record.seen_by(self.study.differs_in)
        return replace(self, precision=precision).key == seen.identity.setting

    @property
    def key(self) -> str:
        """What all runs of the setting share, whatever their method, rate and seed."""
        return self.identity(self.any_cell).setting

    @property
    def any_cell(self) -> Cell:
        return Cell(next(iter(self.study.methods)), self.study.table.lrs[0], self.study.seeds[0], False)

    def folder(self, root: Path, cell: Cell) -> Path:
        return root / run_folder(self.task, cell, self.identity(cell).key)

    @property
    def larger_is_better(self) -> bool:
        return self.store.metric not in LOWER_IS_BETTER

    def unfold(self) -> Matrix:
        table = self.study.table
        return unfold(
            list(self.study.methods), table.lrs, self.study.choice_seeds, self.study.seeds, table.widen,
            self.scores, self.larger_is_better,
        )  # fmt: skip


def run_folder(task: str, cell: Cell, key: str) -> Path:
    """Where a run lies in its study: readable, and its own whatever else changes."""
    part = "choice" if cell.choosing else "measured"
    names = (folder_name(name, 80, also="-_.=") for name in (task, cell.method))
    return Path("runs", *names, f"{part}-lr{cell.lr:g}-s{cell.seed}-{key[:8]}")


class StudyFolder:
    """A study's folder, held by one process at a time: study.toml, study.json, runs/, log/."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    @contextlib.contextmanager
    def opened(self, study: Study) -> Iterator[None]:
        """Take the folder for this study: new, or one of the same runs' common configuration.

        Methods, tasks, rates and seeds may have been added or taken away; what is done is used again.
        """
        self.check(study)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / "study.lock")
        except BlockingIOError:
            raise UserError(f"{self.path} is in use by another process; wait for it") from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            yield
        finally:
            if not (self.path / "study.toml").exists():  # it could not start: nothing is left behind
                (self.path / "study.lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            self._lock.close()

    def save(self, study: Study, settings: list[Setting]) -> None:
        """Write the study down, and what it changes in one whose test results are known already."""
        if (self.path / "study.toml").exists():
            self._check_data(study, settings)
            before, now = asdict(self.read().table), asdict(study.table)
            changed = [key for key in now if key not in INCIDENTAL and before[key] != now[key]]
            tested = (
                [r for r in find_records(self.path / "runs", []) if r.test is not None] if changed else []
            )
            if tested:
                new = [
                    {"key": key, "from": before[key], "to": now[key], "measured_runs": len(tested)}
                    for key in changed
                ]
                self._write(changes=[*self.changes(), *new])
        write_text(self.path / "study.toml", study.to_toml())

    def changes(self) -> list[dict[str, Any]]:
        """What was changed in the study after runs had been tested, in that order."""
        return list(self._read().get("changes", []))

    def check(self, study: Study) -> None:
        """Refuse a folder that holds something else, or a study of other settings."""
        check_name(self.path)
        if not (self.path / "study.toml").exists():
            strangers = (
                [p for p in self.path.iterdir() if p.name != "study.lock"] if self.path.is_dir() else []
            )
            if strangers or self.path.is_file():
                raise UserError(f"{self.path} is not a study; name a new folder")
            return
        before = self.read()
        for task in study.tasks:
            if task in before.tasks:
                # A file may have moved: what it holds is looked at once it is known, in `_check_data`.
                there, here = (s.task_config(task).identity(files=False) for s in (before, study))
                if there != here:
                    raise UserError(
                        f"{self.path} holds a study with other settings ({difference(there, here)}); "
                        "name another folder"
                    )

    def _check_data(self, study: Study, settings: list[Setting]) -> None:
        """Refuse a user's other file in place of the one whose runs lie here."""
        before = self.read()
        if study.tasks != before.tasks or study.table.tasks:
            return
        there, here = (s.task_config(None).identity() for s in (before, study))
        made = self._read().get("made", [])
        if there != here and made and settings[0].key not in made:
            raise UserError(
                f"{self.path} holds a study of other data ({difference(there, here)}); name another folder"
            )

    def read(self) -> Study:
        if not (self.path / "study.toml").is_file():
            raise UserError(f"{self.path} is not a study: it has no study.toml")
        return make_study(read_toml(self.path / "study.toml"), str(self.path / "study.toml"))

    def _read(self) -> dict[str, Any]:
        path = self.path / "study.json"
        found = read_json(path) if path.exists() else {}
        if (
            not isinstance(found, dict)
            or not _is_list_of(dict, found.get("changes", []))
            or not all(_is_list_of(str, found.get(name, [])) for name in ("made", "imported"))
        ):
            raise UserError(
                f"{path} is damaged; delete it, and start the study again to have it written anew"
            )
        return found

    def _write(self, **values: list[Any]) -> None:
        write_json(self.path / "study.json", self._read() | values)

    def belong(self, made: list[str]) -> None:
        """Runs of these settings are what the study consists of, besides what was imported."""
        self._write(made=made)

    def records(self, damaged: list[Notice] | None = None) -> tuple[list[Record], int]:
        """The study's records, and how many others lie in its folder: of data or numerics of the past."""
        known = {*self._read().get("made", []), *self._read().get("imported", [])}
        differs_in = self.read().differs_in if (self.path / "study.toml").is_file() else []
        found = [record.seen_by(differs_in) for record in find_records(self.path / "runs", damaged)]
        ours = [record for record in found if record.identity.setting in known]
        return ours, len(found) - len(ours)

    def bring_in(self, source: Path, settings: list[Setting]) -> tuple[int, dict[str, int]]:
        """Copy the records of another machine's runs; how many came, and how many did not, by the reason."""
        if not source.is_dir():
            raise UserError(f"{source} is not a folder" if source.exists() else f"{source}: no such folder")
        came, refused, known = 0, Counter[str](), set()
        damaged: list[Notice] = []
        for record in find_records(source, damaged, follow=False):
            fits = [s for s in settings if s.fits(record)]
            if fits:
                record = record.seen_by(fits[0].study.differs_in)
            if not record.evaluated:
                refused[f"{record.results['status']}"] += 1
            elif not fits:
                refused["of another configuration, data or numerics version"] += 1
            else:
                known.add(record.identity.setting)
                cell = Cell(record.method, record.lr, record.seed, record.choosing)
                try:
                    copied = self._copy(record, run_folder(fits[0].task, cell, record.identity.key))
                except UserError as error:
                    damaged.append(error.notice)
                    continue
                came += copied
                refused["there already"] += not copied
        if damaged:
            refused[f"damaged, such as {damaged[0]}"] = len(damaged)
        if not came and not refused:
            raise UserError(f"{source} holds no run that has ended")
        self._write(imported=sorted({*self._read().get("imported", []), *known}))
        return came, {reason: count for reason, count in refused.items() if count}

    def _copy(self, record: Record, name: Path) -> bool:
        """A record into the study's folder, whole or not at all; False where it is there already."""
        to = self.path / name
        try:
            there = read_record(to)
        except UserError:
            self._set_aside(to)
            there = None
        if there is not None and there.evaluated:
            return False
        to.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(to) as beside:
            for file in FILES:
                path = record.folder / file
                if path.exists() or path.is_symlink():
                    copy_file(path, beside / file, LARGEST)
            if is_published(record.folder) and (arrays := record.predictions()) is not None:
                write_predictions(beside, arrays)  # a part of them lies elsewhere
            delete(to)
            beside.rename(to)
        return True

    def _set_aside(self, folder: Path) -> None:
        """Keep a damaged run apart, under a name of its own."""
        aside = self.path / "damaged" / f"{folder.name}-{secrets.token_hex(4)}"
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
