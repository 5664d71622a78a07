"""From a task's name or a user's file to a Dataset: every row read, checked and assigned to a split."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data import dataset as data
from oelm.data.catalogue import CLASSIFICATION, HELD_OUT, LM, SEQ2SEQ, TOKENS, Task, get_task
from oelm.data.dataset import DROPPED, HOLD_OUT_SEED, Dataset, Part
from oelm.data.files import CHUNK_ROWS, Chunk, ParquetSource, Source, content_digest, open_file
from oelm.data.labels import UNLABELLED, all_whole, class_names, known_labels, missing_warning, user_labels
from oelm.errors import UserError
from oelm.system.library_errors import first_line


class HubSource(Source):
    """One split of a data set loaded with `datasets`, read through its arrow table."""

    def __init__(self, name: str, table: Any) -> None:
        self.name = name
        self.table = table

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        self._require(self.table.column_names, columns)
        for batch in self.table.select_columns(columns).with_format("arrow").iter(CHUNK_ROWS):
            yield batch.to_pydict()

    def digest(self) -> str:
        return content_digest([Path(file["filename"]) for file in self.table.cache_files])


def _hub_source(task: Task, split: str) -> Source:
    if task.hub is None:
        raise UserError(f"{task.name} is not on the hub; name the folder that holds it with OELM_DATA_DIR")
    import datasets

    try:
        table = datasets.load_dataset(task.hub.path, task.hub.config, revision=task.hub.revision, split=split)
    except Exception as error:  # whatever the network or the hub may answer
        raise UserError(
            f"{task.name} cannot be loaded from the hub ({first_line(error)}); without a network, "
            "name a folder that holds it with --data-dir or OELM_DATA_DIR"
        ) from None
    return HubSource(f"{task.hub.path}, split {split}", table)


def _source(task: Task, split: str, data_dir: Path | None) -> Source:
    """A split of a task: from the folder where one is given, from the hub otherwise."""
    if data_dir is None:
        return _hub_source(task, split)
    folder = data_dir / task.folder
    paths = [folder / f"{split}.parquet"]
    if not paths[0].is_file():
        paths = sorted(folder.glob(f"{split}-*.parquet"))  # the hub's names for a table in several files
    if not paths:
        raise UserError(f"{task.name} needs {folder / split}.parquet, which is not there")
    for path in paths:
        open_file(path)  # refuses what is not Parquet
    return ParquetSource(*paths)


def find_data_dir(data_dir: str | Path | None) -> Path | None:
    """The folder given, or the one OELM_DATA_DIR names; None means the hub."""
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
) -> Dataset:
    """A catalogued task with its fixed splits, from a folder (given, or OELM_DATA_DIR) or from the hub."""
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
    held = {role: task.held_out for role in ("test", "validation") if getattr(task, role) == HELD_OUT}
    identity: dict[str, Any] = {"held_out": held, "group": task.group, "train_size": train_size}
    dataset = Dataset(name, task.kind, parts, task.metric, list(task.labels or ()), identity)
    if task.kind == LM:
        if train_size is not None:
            raise UserError(f"train_size counts rows of a classification task; {name} is a corpus")
        dataset.separate, dataset.held_out = task.separate, held
        dataset.identity["separate"] = task.separate
        return dataset
    for part in parts:
        data.survey(dataset, part)
        if task.kind == CLASSIFICATION:
            _label_part(dataset, part, task, any(other.drop_unlabelled for other in trained))
    for role in held:
        data.hold_out(dataset, role, task.held_out, HOLD_OUT_SEED, task.group)
    if train_size is not None:
        data.cut_train(dataset, train_size, HOLD_OUT_SEED)
    if task.kind == TOKENS and not dataset.label_names:
        dataset.label_names = _tag_names(dataset)
    data.finish(dataset)
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


def _label_part(dataset: Dataset, part: Part, task: Task, drop_unlabelled: bool) -> None:
    """Numbers for a known task's labels; -1 is dropped and counted where the task says so, else refused."""
    part.labels = known_labels(part.values, tuple(task.labels or ()), part.source)
    unlabelled = part.labels == UNLABELLED
    if unlabelled.any() and not (task.drop_unlabelled or drop_unlabelled):
        row = int(np.flatnonzero(unlabelled)[0])
        raise UserError(f"{part.source.where(row)}: label -1 means unlabelled, and {task.name} has labels")
    dataset.drop(part, unlabelled, "unlabelled")
    part.labels[unlabelled] = 0


def _tag_names(dataset: Dataset) -> list[str]:
    """All tags of a set without a fixed list; one that only test has counts as an error, not as nothing."""
    return sorted(
        {tag for part in dataset.parts for _, chunk in part.rows() for tags in chunk["tags"] for tag in tags}
    )


def load_file(
    path: str | Path,
    *,
    text: str = "text",
    text_pair: str | None = None,
    label: str = "label",
    target: str | None = None,
    test_file: str | Path | None = None,
    train_size: int | None = None,
    split_seed: int = 0,
    validation_share: float = 0.1,
    test_share: float = 0.1,
) -> Dataset:
    """A user's CSV, TSV, JSONL or Parquet file as a classification task or, with `target`, as one of writing
    that column for the text (sequence to sequence).

    Validation and (without a test file) test parts are split off, stratified by class or in whole groups of
    equal sources; which rows they take depends on the texts and `split_seed`, not on the order of the rows.
    """
    columns = _file_columns(text, text_pair, label, target)
    for share in (validation_share, test_share):
        if not 0 < share < 0.5:
            raise UserError(f"a split's share must lie between 0 and 0.5, not {share}")
    parts = [Part(open_file(path), columns, "train")]
    if test_file:
        parts.append(Part(open_file(test_file), columns, "test"))
    held = {"validation": validation_share}
    if not test_file:  # shares are of the whole file, and test is taken first
        held = {"test": test_share, "validation": validation_share / (1 - test_share)}
    identity = {"held_out": held, "split_seed": split_seed, "train_size": train_size}
    kind, metric = (SEQ2SEQ, "f1") if target else (CLASSIFICATION, "accuracy")
    dataset = Dataset(Path(path).stem, kind, parts, metric, [], identity)
    for part in parts:
        data.survey(dataset, part, whole_pairs=text_pair is not None)
        if not len(part.keys):
            raise UserError(f"{part.source.name} has no rows")
    if kind == CLASSIFICATION:
        _label_user_parts(dataset, label)
        _check_class_sizes(dataset, needed=len(held) + 1)
    for role, share in held.items():
        data.hold_out(dataset, role, share, split_seed, "text" if target else None)
    if train_size is not None:
        data.cut_train(dataset, train_size, split_seed)
    data.finish(dataset)
    return dataset


def _file_columns(text: str, text_pair: str | None, label: str, target: str | None) -> dict[str, str]:
    """The columns of a file by role; what contradicts itself is refused."""
    if target and (text_pair or label != "label"):
        other = "text_pair" if text_pair else "label"
        raise UserError(f"target is the column of a text to be written; it does not go with {other}")
    if "," in label:
        raise UserError(f"label names one column, not several ({label}); multi-label tasks are not supported")
    columns = {"text": text} | ({"target": target} if target else {"label": label})
    columns |= {"text_pair": text_pair} if text_pair else {}
    if len(set(columns.values())) < len(columns):
        *names, last = ("text", "target") if target else ("text", "text_pair", "label")
        given = list(columns.values())
        raise UserError(f"{', '.join(names)} and {last} must be different columns, not {given}")
    return columns


def _label_user_parts(dataset: Dataset, column: str) -> None:
    """Classes from the training file; a label only the test file has is refused."""
    train = dataset.parts[0]
    names = user_labels(train.values, train.source, column)
    kept = [name for name, code in zip(names, train.split, strict=True) if code != DROPPED]
    classes = class_names(kept, train.source, column)
    if len(classes) < 2:
        raise UserError(
            f"{train.source.name}: column {column!r} holds only {classes[0] if classes else None!r}; "
            "a classifier needs at least two classes"
            + (" (-1 marks hidden labels in GLUE's test splits)" if classes == ["-1"] else "")
        )
    dataset.label_names = classes
    number = {name: i for i, name in enumerate(classes)}
    used: list[str] = []
    named = not all_whole(names)  # then so are the test file's, whatever they look like
    for part in dataset.parts:
        found = names if part is train else user_labels(part.values, part.source, column, named)
        for row, name in enumerate(found):
            if name not in number and part.split[row] != DROPPED:
                hidden = " (-1 marks hidden labels, as in GLUE's test splits)" if name == "-1" else ""
                raise UserError(
                    f"{part.source.where(row)}: no training text has the label {name!r}{hidden}; "
                    f"known: {', '.join(classes[:20])}"
                )
        part.labels = np.array([number.get(name, 0) for name in found], dtype=np.int64)
        used += [name for name, code in zip(found, part.split, strict=True) if code != DROPPED]
    if warning := missing_warning(used):
        dataset.warnings.append(warning)


def _check_class_sizes(dataset: Dataset, needed: int) -> None:
    part = dataset.parts[0]
    counts = np.bincount(part.labels[part.split != DROPPED], minlength=len(dataset.label_names))
    for name, count in zip(dataset.label_names, counts.tolist(), strict=True):
        if count < needed:
            raise UserError(
                f"{part.source.name}: label {name!r} has {count} row{'s' * (count != 1)}; at least {needed} "
                "are needed so that every split has one. Add rows, or remove that class"
            )
