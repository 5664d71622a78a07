"""From a Dataset to a store: tokenise every row once and write it down, or find that it was done before."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oelm.data.dataset import SPLITS, Dataset, Part
from oelm.data.files import Chunk
from oelm.data.progress import progress
from oelm.data.store import Store
from oelm.data.tasks import task_kind
from oelm.data.tokenizer import load_tokenizer, pad_id, train_tokenizer, trained_size
from oelm.data.writer import cache_dir, cached_store
from oelm.system.files import folder_name
from oelm.system.messages import notice

VERSION = 1  # of what the encoders write: part of every fingerprint


class Lengths(NamedTuple):
    """Where texts are cut, in tokens: `max_length` and `max_target_length`."""

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
    """The store of a data set under a tokenizer: from the cache where it is there, made otherwise.

    `tokenizer` is a name ("gpt2"), a folder, a hub id, or "train:8192" (learned from the train split).
    Targets are cut at `max_target_length`, or where that is None at `max_length` as their sources are.
    """
    max_target_length = max_length if max_target_length is None else max_target_length
    size = trained_size(tokenizer)
    loaded = None if size else load_tokenizer(tokenizer)
    options: dict[str, Any] = {"version": VERSION, "data": dataset.fingerprint()}
    options["tokenizer"] = tokenizer if loaded is None else _tokenizer_digest(loaded)
    kind = task_kind(dataset.kind)
    lengths = Lengths(max_length, max_target_length)
    options |= kind.lengths(lengths)
    fingerprint = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def make(folder: Path) -> dict[str, Any]:
        used = loaded
        if used is None:
            used = train_tokenizer(kind.training_texts(dataset, show_progress), size or 0)
        used.save_pretrained(folder / "tokenizer")
        splits = kind.write(dataset, used, folder, lengths, show_progress)
        return _manifest(dataset, tokenizer, used, {"max_length": max_length} | kind.lengths(lengths), splits)

    return cached_store(cache_dir(cache), folder_name(dataset.name, 60), fingerprint, make)


class Rows(NamedTuple):
    """Some rows of a part that belong to one split, with the columns that their kind reads."""

    part: Part
    split: str
    numbers: np.ndarray  # in the part
    ids: np.ndarray  # a row's number in its source; sources of one role are counted through
    columns: Chunk

    def bytes(self, *roles: str) -> int:
        """UTF-8 bytes of the texts."""
        return sum(len(text.encode()) for role in roles for text in self.columns.get(role, ()))


def split_chunks(dataset: Dataset, show: bool) -> Iterator[Rows]:
    """All rows that belong to a split, in the order of the sources."""
    counted = dict.fromkeys(SPLITS, 0)
    total = sum(len(part.split) for part in dataset.parts)
    with progress(f"tokenising {dataset.name}", total, "rows", show) as advance:
        for part in dataset.parts:
            for first, chunk in part.rows():
                for role in chunk.keys() & {"text", "text_pair", "question", "context", "target"}:
                    chunk[role] = [value or "" for value in chunk[role]]
                size = len(next(iter(chunk.values())))
                codes = part.split[first : first + size]
                for code, split in enumerate(SPLITS):
                    places = np.flatnonzero(codes == code)
                    if len(places):
                        picked = {role: [values[i] for i in places] for role, values in chunk.items()}
                        rows = first + places
                        yield Rows(part, split, rows, counted[part.role] + rows, picked)
                advance(size)
            counted[part.role] += len(part.split)


def _tokenizer_digest(tokenizer: Any) -> str:
    text = tokenizer.backend_tokenizer.to_str() + str(sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(
    dataset: Dataset, name: str, tokenizer: Any, lengths: dict[str, int], splits: dict[str, Any]
) -> dict[str, Any]:
    warnings = list(dataset.warnings)
    for split, meta in splits.items():
        if meta["truncated"]:
            share = meta["truncated"] / meta["items"]
            warnings.append(notice("data.truncated", share=share, split=split, length=lengths["max_length"]))
        if meta.get("target_truncated"):
            share = meta["target_truncated"] / meta["items"]
            values = {"split": split, "length": lengths["max_target_length"]}
            warnings.append(notice("data.targets_truncated", share=share, **values))
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
            "digest": _tokenizer_digest(tokenizer),
        },
        "splits": splits,
        "dropped": dataset.dropped,
        "duplicates": dataset.duplicates,
        "warnings": [warning.to_dict() for warning in warnings],
    }
