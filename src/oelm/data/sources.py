"""Load a named task or a user's file as a Dataset: read and check every row and assign it to a split."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oelm.data import dataset as data
from oelm.data.catalogue import HELD_OUT, Task, get_task
from oelm.data.dataset import HOLD_OUT_SEED, Dataset, Part
from oelm.data.documents import is_text
from oelm.data.files import CHUNK_ROWS, Chunk, ParquetSource, Source, open_file
from oelm.data.tasks import task_kind
from oelm.errors import UserError
from oelm.system.hub import hub_host, hub_reachable
from oelm.system.library_errors import first_line

SHARE = 0.1  # of a user's file for validation and, without a test file, for test


class HubSource(Source):
    """One split of a dataset loaded with `datasets`, read through its arrow table."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self.table = name, table
        self.paths = tuple(Path(file["filename"]) for file in table.cache_files)

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        self._require(self.table.column_names, columns)
        for batch in self.table.select_columns(columns).with_format("arrow").iter(CHUNK_ROWS):
            yield batch.to_pydict()


def split_files(data_dir: Path, task: Task, split: str) -> list[Path]:
    """The files of a task's split below a data folder; empty if it is not there."""
    whole = data_dir / task.folder / f"{split}.parquet"
    # The hub's names for a table in several files.
    return [whole] if whole.is_file() else sorted(whole.parent.glob(f"{split}-*.parquet"))


def _source(task: Task, split: str, data_dir: Path | None) -> Source:
    """A split of a task, from the data folder if one is given, otherwise from the hub."""
    if data_dir is not None:
        if paths := split_files(data_dir, task, split):
            return ParquetSource(*paths)
        path = data_dir / task.folder / f"{split}.parquet"
        raise UserError(
            f"{task.name} needs {path}, which is not there, and no dataset in {data_dir} is prepared for it"
        )
    if task.hub is None:
        raise UserError(f"{task.name} is not on the hub; name the folder that holds it with OELM_DATA_DIR")
    if not (online := hub_reachable()):
        os.environ["HF_DATASETS_OFFLINE"] = "1"  # read at the import: use the cache without network timeouts
    import datasets

    try:
        table = datasets.load_dataset(task.hub.path, task.hub.config, revision=task.hub.revision, split=split)
    except Exception as error:  # the network, the hub and datasets raise many kinds
        why = first_line(error) if online else f"it is not in the cache, and {hub_host()} cannot be reached"
        hint = "name a folder that holds it with --data-dir or OELM_DATA_DIR"
        raise UserError(f"{task.name} cannot be loaded from the hub: {why}; {hint}") from None
    return HubSource(f"{task.hub.path}, split {split}", table)


def find_data_dir(data_dir: str | Path | None) -> Path | None:
    """The given data folder, or the one in OELM_DATA_DIR; None: load from the hub."""
    value = data_dir or os.environ.get("OELM_DATA_DIR")
    if not value:
        return None
    if not Path(value).is_dir():
        raise UserError(f"the data folder {value} does not exist (--data-dir or OELM_DATA_DIR)")
    return Path(value)


def load_task(
    name: str,
    *,
    data_dir: str | Path | None = None,
    train_on: str | None = None,
    train_size: int | None = None,
    hold_out: bool = True,
) -> Dataset:
    """A catalogued task with its fixed splits, from a folder (given, or OELM_DATA_DIR) or from the hub.
    Without `hold_out` the rows that would be held out for validation stay in train."""
    task = get_task(name)
    folder = find_data_dir(data_dir)
    trained = _trained_on(task, train_on)
    parts = [
        Part(_source(other, split, folder), other.columns, "train")
        for other in trained
        for split in other.train
    ]
    for role, split in (("validation", task.validation), ("test", task.test)):
        if split not in (HELD_OUT, None):
            parts.append(Part(_source(task, str(split), folder), task.columns, role))
    taken = ("test", "validation") if hold_out else ("test",)
    held = {role: task.held_out for role in taken if getattr(task, role) == HELD_OUT}
    identity: dict[str, Any] = {"held_out": held, "group": task.group, "train_size": train_size}
    dataset = Dataset(name, task.kind, parts, task.metric, list(task.labels or ()), identity, held_out=held)
    kind = task_kind(task.kind)
    if kind.stream:  # its documents are assigned to splits when they are written
        if train_size is not None:
            raise UserError(f"train_size counts rows of a classification task; {name} is a corpus")
        dataset.separate = task.separate
        dataset.identity["separate"] = task.separate or "articles"
        return dataset
    for part in parts:
        data.read_rows(dataset, part)
    drop = any(other.drop_unlabelled for other in (task, *trained))
    kind.read_task(dataset, replace(task, drop_unlabelled=drop))
    for role in held:
        data.hold_out(dataset, role, task.held_out, HOLD_OUT_SEED, task.group)
    if train_size is not None:
        data.take_train_subset(dataset, train_size, HOLD_OUT_SEED)
    data.check_and_number(dataset)
    return dataset


def _trained_on(task: Task, train_on: str | None) -> list[Task]:
    if not task.train_on:
        if train_on:
            raise UserError(f"{task.name} trains on its own split; train_on is for xnli")
        return [task]
    choice = train_on or next(iter(task.train_on))
    if choice not in task.train_on:
        raise UserError(f"{task.name} cannot train on {choice!r}; choose from: {', '.join(task.train_on)}")
    return [get_task(name) for name in task.train_on[choice]]


def load_file(
    path: str | Path,
    *,
    text: str = "text",
    text_pair: str | None = None,
    label: str = "label",
    target: str | None = None,
    kind: str | None = None,
    metric: str | None = None,
    test_file: str | Path | None = None,
    train_size: int | None = None,
    split_seed: int = 0,
    hold_out: bool = True,
) -> Dataset:
    """A user's file as a task of a `kind`. Default: lm (language modelling) of plain text, seq2seq where a
    `target` is to be written for the text, else classification. `metric`: another than the kind's usual one
    decides.

    Validation and (without a test file) test parts are split off, stratified by class or in whole groups of
    equal sources; which rows they take depends on the texts and `split_seed`, not on the order of the rows.
    Without `hold_out` the rows of the validation part stay in train.
    """
    plain = "lm" if is_text(Path(path)) else "classification"
    chosen = task_kind(kind or ("seq2seq" if target else plain))
    if target and not chosen.writes:
        raise UserError(
            f"target is the column of a text to be written (seq2seq); it does not go with {chosen.name}"
        )
    columns = chosen.file_columns(text, text_pair, label, target)
    tagged = "tokens" in columns
    parts = [Part(open_file(path, tagged), columns, "train")]
    names = parts[0].source.names()
    if kind is None and text in names and columns.get("label", text) not in names:
        has = f"{path} has no column {label!r}; it has: {', '.join(names)}"
        raise UserError(f"{has}; name the labels with --label, or train a language model with --lm")
    if test_file:
        parts.append(Part(open_file(test_file, tagged), columns, "test"))
    held = {"validation": SHARE}
    if not test_file:  # shares are of the whole file, and test is taken first
        held = {"test": SHARE, "validation": SHARE / (1 - SHARE)}
    if not hold_out:
        del held["validation"]
    identity: dict[str, Any] = {"held_out": held, "split_seed": split_seed, "train_size": train_size}
    if metric not in (None, *chosen.metrics):
        raise UserError(f"{chosen.name} has no metric {metric!r}; it has: {', '.join(chosen.metrics)}")
    if metric not in (None, chosen.metric):
        identity["metric"] = metric
    dataset = Dataset(
        Path(path).stem, chosen.name, parts, metric or chosen.metric, [], identity, held_out=held
    )
    for part in parts:
        data.read_rows(
            dataset, part, whole_pairs=text_pair is not None or (chosen.by_source and not chosen.writes)
        )
        if not len(part.keys):
            raise UserError(
                f"{part.source.name} has no {'text' if is_text(part.source.paths[0]) else 'rows'}"
            )
    chosen.read_file(dataset, len(held) + 1)
    for role, share in held.items():
        data.hold_out(dataset, role, share, split_seed, "text" if chosen.by_source else None)
    if train_size is not None:
        data.take_train_subset(dataset, train_size, split_seed)
    data.check_and_number(dataset)
    return dataset
