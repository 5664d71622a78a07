"""Prepare a choice of data: tokenise every row once and write a store, or open the one in the cache."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oelm.data.catalogue import HELD_OUT, TASKS
from oelm.data.dataset import SPLITS, Dataset, Part
from oelm.data.documents import holds_texts
from oelm.data.files import Chunk
from oelm.data.manifest import MANIFEST, digest
from oelm.data.sources import find_data_dir, load_file, load_task
from oelm.data.store import Store, open_store
from oelm.data.tasks import task_kind
from oelm.data.token_bins import holds_bins, prepare_bins
from oelm.data.tokenizer import (
    encoding_digest,
    load_tokenizer,
    pad_id,
    tokenizer_digest,
    train_tokenizer,
    trained_size,
)
from oelm.data.writer import cached_store, split_writers
from oelm.errors import UserError
from oelm.system.files import cache_dir, folder_name, read_object
from oelm.system.messages import notice
from oelm.system.progress import Display

VERSION = 1  # of the encoders' output; part of every fingerprint


class Lengths(NamedTuple):
    """The lengths, in tokens, at which texts are cut: `max_length` and `max_target_length`."""

    text: int
    target: int


def prepare(
    dataset: Dataset,
    *,
    tokenizer: str = "train:8192",
    max_length: int = 512,
    max_target_length: int | None = None,
    cache: str | Path | None = None,
    show_progress: bool = False,
) -> Store:
    """The store of a dataset with a tokenizer, from the cache if it is there, made otherwise.

    `tokenizer` is a name ("gpt2"), a folder, a hub id, or "train:8192" (learned from the train split).
    Targets are cut at `max_target_length` or, if that is None, at `max_length` as their sources are.
    """
    max_target_length = max_length if max_target_length is None else max_target_length
    size = trained_size(tokenizer)
    loaded = None if size else load_tokenizer(tokenizer)
    options: dict[str, Any] = {"version": VERSION, "data": dataset.fingerprint()}
    options["tokenizer"] = tokenizer if loaded is None else tokenizer_digest(loaded)
    kind = task_kind(dataset.kind)
    lengths = Lengths(max_length, max_target_length)
    options |= kind.lengths(lengths)

    def make(folder: Path) -> dict[str, Any]:
        used = loaded
        if used is None:
            used = train_tokenizer(kind.training_texts(dataset, show_progress), size or 0)
        used.save_pretrained(folder / "tokenizer")
        splits = kind.write(dataset, used, folder, lengths, show_progress)
        return _manifest(dataset, tokenizer, used, {"max_length": max_length} | kind.lengths(lengths), splits)

    return cached_store(cache_dir(cache), folder_name(dataset.name, 60), digest(options), make)


class Rows(NamedTuple):
    """Some rows of a part that belong to one split, with the columns that their kind reads."""

    part: Part
    split: str
    numbers: np.ndarray  # in the part
    ids: np.ndarray  # a row's number in its source, counted on through all sources of one role
    columns: Chunk

    def bytes(self, *roles: str) -> int:
        """UTF-8 bytes of the texts."""
        return sum(len(text.encode()) for role in roles for text in self.columns.get(role, ()))


def split_chunks(dataset: Dataset, show: bool) -> Iterator[Rows]:
    """All rows that belong to a split, in the order of the sources."""
    counted = dict.fromkeys(SPLITS, 0)
    total = sum(len(part.split) for part in dataset.parts)
    done = 0
    with contextlib.closing(Display(f"tokenising {dataset.name}", total, 0, show, "row")) as display:
        for part in dataset.parts:
            for first, chunk in part.rows():
                for role in chunk.keys() & {"text", "text_pair", "question", "context", "target"}:
                    chunk[role] = [value or "" for value in chunk[role]]
                size = len(next(iter(chunk.values())))
                codes = part.split[first : first + size]
                for code, split in enumerate(SPLITS):
                    indices = np.flatnonzero(codes == code)
                    if len(indices):
                        picked = {role: [values[i] for i in indices] for role, values in chunk.items()}
                        rows = first + indices
                        yield Rows(part, split, rows, counted[part.role] + rows, picked)
                done += size
                display.advance(done)
            counted[part.role] += len(part.split)


def write_items(
    dataset: Dataset,
    folder: Path,
    dtypes: dict[str, Any],
    encode: Callable[[Rows], dict[str, Any]],
    show: bool,
    only_measured: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Write the items of every split. `dtypes` are this kind's columns besides the common ones, and
    `only_measured` those that train does not have. `encode` returns the arguments of `SplitWriter.append`
    and, for splits that are evaluated on, `right_texts`."""
    common = {"offsets": np.uint64, "ids": np.uint32, "groups": np.uint32}
    columns = dict.fromkeys(dataset.splits, common | dtypes | (only_measured or {}))
    columns["train"] = common | dtypes
    with split_writers(folder, columns) as writers:
        for rows in split_chunks(dataset, show):
            items = {"ids": rows.ids, "groups": rows.part.numbers[rows.numbers]} | encode(rows)
            if rows.split != "train" and "right_texts" in items:
                writers[rows.split].append_texts(items["right_texts"])
            writers[rows.split].append(**items)
        return {split: writer.close() for split, writer in writers.items()}


def _manifest(
    dataset: Dataset, name: str, tokenizer: Any, lengths: dict[str, int], splits: dict[str, Any]
) -> dict[str, Any]:
    warnings = list(dataset.warnings)
    for split, meta in splits.items():
        for prefix, code in (("", "data.truncated"), ("target_", "data.targets_truncated")):
            if cut := meta.get(f"{prefix}truncated"):
                length = lengths[f"max_{prefix}length"]
                share = cut / meta["items"]
                warnings.append(notice(code, share=share, split=split, length=length))
    return {
        "task": dataset.name,
        "kind": dataset.kind,
        "metric": dataset.metric,
        "label_names": dataset.label_names,
        **lengths,
        "pairs": "text_pair" in dataset.parts[0].columns,
        "tokenizer": {
            "name": name,
            "vocab_size": len(tokenizer),
            "pad_id": pad_id(tokenizer),
            "digest": encoding_digest(tokenizer),
        },
        "splits": splits,
        "dropped": dataset.dropped,
        "duplicates": dataset.duplicates,
        "warnings": [warning.to_dict() for warning in warnings],
    }


@dataclass(frozen=True)
class Choice:
    """A choice of data: `data` is a task's name, a file, or a folder of .txt files, token files or a prepared
    store; the other fields say how to read it.

    `tokenizer=None` means gpt2 for a task and train:8192 for a file.
    """

    data: str
    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    test_file: str | Path | None = None
    train_size: int | None = None
    split_seed: int = 0
    train_on: str | None = None
    data_dir: str | Path | None = None
    tokenizer: str | None = None
    max_length: int = 512
    target: str | None = None
    max_target_length: int | None = None
    kind: str | None = None
    metric: str | None = None
    hold_out: bool = True

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split: held out, or with the data; known before it is prepared."""
        if self.data in TASKS:
            return self.hold_out or TASKS[self.data].validation != HELD_OUT
        if (folder := Path(self.data)).is_dir() and not holds_texts(folder):
            return holds_bins(folder) or "validation" in open_store(folder).splits
        return self.hold_out

    def load(self) -> Dataset:
        """The rows, checked and assigned to splits."""
        if self.data in TASKS:
            for name in ("text", "label", "text_pair", "test_file", "target", "kind", "metric"):
                if getattr(self, name) != getattr(type(self), name):
                    raise UserError(
                        f"{self.data} is a task with fixed columns and splits; {name} is for files"
                    )
            names = ("data_dir", "train_on", "train_size", "hold_out")
            return load_task(self.data, **{name: getattr(self, name) for name in names})
        if not Path(self.data).suffix and not Path(self.data).exists():
            raise UserError(f"{self.data!r} is neither a task (see `oelm data list`) nor a file")
        if self.train_on is not None:
            raise UserError(f"train_on is for the task xnli; {self.data} is a file of its own")
        columns = ("text", "text_pair", "label", "target", "kind", "metric", "test_file")
        rest = {name: getattr(self, name) for name in (*columns, "train_size", "split_seed", "hold_out")}
        return load_file(self.data, **rest)

    def store(self, cache: str | Path | None = None, show_progress: bool = False) -> Store:
        """The prepared store: opened, found in the cache, or made."""
        folder = Path(self.data)
        if folder.is_dir() and self.data not in TASKS and not holds_texts(folder):
            if holds_bins(folder):
                return prepare_bins(folder, self.tokenizer, self.max_length, cache)
            return open_store(folder)
        tokenizer = self.tokenizer or ("gpt2" if self.data in TASKS else "train:8192")
        if (prepared := self._prepared(tokenizer)) is not None:
            return prepared
        lengths: dict[str, Any] = {"max_length": self.max_length, "max_target_length": self.max_target_length}
        return prepare(self.load(), tokenizer=tokenizer, **lengths, cache=cache, show_progress=show_progress)

    def named(self) -> dict[str, Any] | None:
        """The values that, besides the tokenizer, decide a named task's prepared dataset; None for a file."""
        if self.data not in TASKS:
            return None
        names = ("data", "train_on", "train_size", "hold_out", "max_length", "max_target_length")
        return {name: getattr(self, name) for name in names}

    def _prepared(self, tokenizer: str) -> Store | None:
        """The dataset that `oelm data prepare --out` made of this choice, in the data folder; None if the
        original files are there. Training then needs neither these nor a network."""
        wanted, root = self.named(), find_data_dir(self.data_dir)
        if wanted is None or root is None or any((root / TASKS[self.data].folder).glob("*.parquet")):
            return None
        others = []
        for path in sorted(root.glob(f"*/{MANIFEST}")):
            meta = read_object(path)
            tokens, known = meta["tokenizer"], meta.get("prepared_as") or {}
            if known.get("data") != self.data:
                continue
            compared = [(key, known.get(key), value) for key, value in wanted.items()]
            if not _same_tokenizer(tokens, tokenizer):
                compared.append(("tokenizer", tokens["name"], tokenizer))
            differ = [
                f"{key} {_or_none(has)}, not {_or_none(requested)}"
                for key, has, requested in compared
                if has != requested
            ]
            if not differ:
                return open_store(path.parent)
            others.append((len(differ), f"{path.parent} was prepared with {' and '.join(differ)}"))
        if others:
            raise UserError(f"{min(others)[1]}; prepare {self.data} again, where its original files are")
        return None


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)


def _same_tokenizer(recorded: dict[str, Any], name: str) -> bool:
    """Whether a dataset was prepared with this tokenizer, whose folder may have had another path."""
    if recorded["name"] == name or trained_size(name):
        return bool(recorded["name"] == name)
    with contextlib.suppress(UserError):
        return bool(recorded["digest"] == encoding_digest(load_tokenizer(name)))
    return False
