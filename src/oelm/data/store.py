"""A prepared store: one folder with everything training needs, readable without the original data.

    store.json                its manifest: task, kind, labels, tokenizer, counts, warnings, checksums
    tokenizer/                as transformers saves it
    <split>.tokens.npy        all texts end to end, two bytes a token where the vocabulary fits
    <split>.<column>.npy      offsets, labels, ids, groups, ... one value per item (or per token)

Only json and numpy are needed to open one, and nothing is unpickled. Tokens are memory-mapped.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.manifest import Damaged, read_manifest
from oelm.data.tokenizer import load_tokenizer
from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import notice, read_notice

IGNORE = -100  # a label that torch's cross-entropy leaves out
COUNTED = 1 << 24  # tokens of a memory map counted at once
Array = np.ndarray


def _mapped(column: str) -> "cached_property[Array]":
    return cached_property(lambda split: split.column(column))


def _in_memory(column: str) -> "cached_property[Array]":
    return cached_property(lambda split: np.array(split.column(column), dtype=np.int64))


class Split:
    """One split: items (texts, pairs, windows of a document) or, for a corpus, one stream of tokens."""

    tokens = _mapped("tokens")
    offsets = _in_memory("offsets")  # where each item starts in `tokens`; last, where the last one ends
    labels = _in_memory("labels")  # one class per item (classification)
    values = _mapped("values")  # one number per item (regression)
    ids = _in_memory("ids")  # per item its row in the source, counted on through several sources
    groups = _in_memory("groups")  # one number per item: items with the same number belong together
    tags = _mapped("tags")  # one per token, IGNORE where it is not the first of its word
    target_tokens = _mapped("target_tokens")  # all targets end to end (sequence to sequence)
    target_offsets = _in_memory("target_offsets")

    def __init__(self, folder: Path, name: str, meta: dict[str, Any]) -> None:
        self.folder, self.name, self.meta = folder, name, meta

    def column(self, name: str) -> Array:
        """A column, memory-mapped: `tokens`, `offsets`, `labels`, `ids`, `second`, `tags`, `starts`, ..."""
        path = self.folder / f"{self.name}.{name}.npy"
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            if is_out_of_memory(error):
                raise MemoryError(f"there is not enough memory to open {path}") from None
            raise Damaged(notice("file.damaged", path=path, problem=first_line(error))) from None

    def has(self, name: str) -> bool:
        return name in self.meta["columns"]

    @cached_property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @cached_property
    def target_lengths(self) -> Array:
        return np.diff(self.target_offsets)

    @cached_property
    def second(self) -> Array | None:
        """Where each item's second segment starts, for models with token types; None for others."""
        return np.array(self.column("second"), dtype=np.int64) if self.has("second") else None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens (before truncation): for bits per byte."""
        return int(self.meta["bytes"])

    def right_texts(self) -> dict[int, dict[str, Any]]:
        """Item id -> the reference texts of an evaluation (question answering, sequence to sequence)."""
        with (self.folder / f"{self.name}.references.jsonl").open(encoding="utf-8") as file:
            return {record["id"]: record for record in map(json.loads, file)}

    def __len__(self) -> int:
        return int(self.meta["items"])


class Store:
    """An opened store. `splits` are train, validation (unless nothing was held out for it) and test."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.splits = {name: Split(folder, name, split) for name, split in meta["splits"].items()}
        self.task: str = meta["task"]
        self.kind: str = meta["kind"]
        self.metric: str = meta["metric"]
        self.label_names: list[str] = meta["label_names"]
        self.max_length: int = meta["max_length"]
        self.max_target_length: int | None = meta.get("max_target_length")  # sequence to sequence
        self.vocab_size: int = meta["tokenizer"]["vocab_size"]
        self.pad_id: int = meta["tokenizer"]["pad_id"]
        self.fingerprint: str = meta["fingerprint"]
        self._tokenizer: Any = None
        self.warnings = [read_notice(warning) for warning in meta["warnings"]]

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.folder} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.splits[split]

    def used_tokens(self) -> Array:
        """For every token of the vocabulary, whether it occurs in any split or as padding."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for split in self.splits.values():
            for column in ("tokens", "target_tokens"):
                if split.has(column):
                    counts += count_tokens(split.column(column), self.vocab_size)
        counts[self.pad_id] += 1
        return counts > 0

    def tokenizer(self) -> Any:
        """The tokenizer the store was made with; one shared object, which must not be changed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self.folder / "tokenizer"))
        return self._tokenizer


def count_tokens(tokens: Array, vocabulary: int) -> Array:
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), COUNTED):
        counts += np.bincount(tokens[start : start + COUNTED], minlength=vocabulary)
    return counts


def open_store(folder: str | Path) -> Store:
    """Open a prepared store from any folder; its files are checked at the first opening in a process."""
    return Store(Path(folder), read_manifest(Path(folder)))
