"""A prepared store: one folder with everything training needs, readable without the original data.

    store.json                what it is: task, kind, labels, tokenizer, counts, warnings, checksums
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

from oelm.data.manifest import AGAIN, WITHOUT_GROUPS, check_values, read_column, read_manifest
from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import notice, read_notice

IGNORE = -100  # a label that torch's cross-entropy leaves out
Array = np.ndarray


class Split:
    """One split: items (texts, pairs, windows of a document) or, for a corpus, one stream of tokens."""

    def __init__(self, folder: Path, name: str, meta: dict[str, Any]) -> None:
        self.folder, self.name, self.meta = folder, name, meta

    def column(self, name: str) -> Array:
        """A column, memory-mapped: `tokens`, `offsets`, `labels`, `ids`, `second`, `tags`, `starts`, ..."""
        return read_column(self.path(name))

    def path(self, column: str) -> Path:
        return self.folder / f"{self.name}.{column}.npy"

    def has(self, name: str) -> bool:
        return name in self.meta["columns"]

    @cached_property
    def tokens(self) -> Array:
        return self.column("tokens")

    @cached_property
    def offsets(self) -> Array:
        """Where each item starts in `tokens`, and, last, where the last one ends."""
        return np.array(self.column("offsets"), dtype=np.int64)

    @cached_property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @cached_property
    def labels(self) -> Array:
        """One label per item (classification)."""
        return np.array(self.column("labels"), dtype=np.int64)

    @cached_property
    def ids(self) -> Array:
        """One number per item: its row in the source (rows of several sources are counted through)."""
        return np.array(self.column("ids"), dtype=np.int64)

    @cached_property
    def groups(self) -> Array | None:
        """One number per item: items with the same number belong together. None in a store without them."""
        return np.array(self.column("groups"), dtype=np.int64) if self.has("groups") else None

    @cached_property
    def second(self) -> Array | None:
        """Where each item's second segment starts, for models with token types; None for others."""
        return np.array(self.column("second"), dtype=np.int64) if self.has("second") else None

    @cached_property
    def tags(self) -> Array:
        """One tag per token, -100 where a token is not the first of its word (token classification)."""
        return self.column("tags")

    @cached_property
    def target_tokens(self) -> Array:
        """All targets end to end (sequence to sequence)."""
        return self.column("target_tokens")

    @cached_property
    def target_offsets(self) -> Array:
        """Where each item's target starts in `target_tokens`, and, last, where the last one ends."""
        return np.array(self.column("target_offsets"), dtype=np.int64)

    @cached_property
    def target_lengths(self) -> Array:
        return np.diff(self.target_offsets)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens (before truncation): for bits per byte."""
        return int(self.meta["bytes"])

    def right_texts(self) -> dict[int, dict[str, Any]]:
        """By id: the texts that an evaluation compares with (question answering, sequence to sequence)."""
        path = self.folder / f"{self.name}.references.jsonl"
        try:
            with path.open(encoding="utf-8") as file:
                return {record["id"]: record for record in map(json.loads, file)}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is missing or damaged ({error}); {AGAIN}") from None

    def __len__(self) -> int:
        return int(self.meta["items"])


class Store:
    """An opened store. `splits` are train, validation and test."""

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
        written = {split.path(name).name for split in self.splits.values() for name in split.meta["columns"]}
        # Its files are known to be as they were written.
        self.sealed = "digest" in meta and written <= meta.get("checksums", {}).keys()
        self.warnings = [read_notice(warning) for warning in meta["warnings"]]
        if meta.get("format") == WITHOUT_GROUPS:
            self.warnings.append(notice("data.no_groups"))
        if not self.sealed:
            self.warnings.append(notice("data.no_checksums"))

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.folder} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.splits[split]

    def used_tokens(self) -> Array:
        """For every number of the vocabulary, whether it occurs in any split or as padding."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for split in self.splits.values():
            columns = [split.tokens, *([split.target_tokens] if split.has("target_tokens") else [])]
            for tokens in columns:
                for start in range(0, len(tokens), 1 << 24):  # a memory map: a piece at a time
                    counts += np.bincount(tokens[start : start + (1 << 24)], minlength=self.vocab_size)
        counts[self.pad_id] += 1
        return counts > 0

    def tokenizer(self) -> Any:
        """The tokenizer the store was made with, as transformers loads it."""
        from transformers import AutoTokenizer

        folder = self.folder / "tokenizer"
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # a broken file fails in many ways inside the libraries
            if is_out_of_memory(error):
                raise
            why = f"the tokenizer in {folder} cannot be loaded: {first_line(error)}"
            raise UserError(f"{why}; {AGAIN}") from None


def open_store(folder: str | Path) -> Store:
    """Open a prepared store, wherever it was copied to; its files are checked when a process first does."""
    folder = Path(folder)
    store = Store(folder, read_manifest(folder))
    if not store.sealed:
        check_values(store)
    return store
