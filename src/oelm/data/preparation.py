"""From a Dataset to a store: tokenise every row once and write it down, or find that it was done before."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.catalogue import CLASSIFICATION, LM, QA, SEQ2SEQ, TOKENS
from oelm.data.dataset import SPLITS, Dataset, Part, item_texts
from oelm.data.files import Chunk
from oelm.data.progress import progress
from oelm.data.store import Store
from oelm.data.tokenizer import Encoder, load_tokenizer, pad_id, train_tokenizer, trained_size
from oelm.data.writer import cache_dir, cached_store, split_writers
from oelm.system.files import folder_name
from oelm.system.messages import notice

VERSION = 1  # of what the encoders write: part of every fingerprint


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
    if dataset.kind != LM:  # a corpus is cut into windows only when it is read
        options["max_length"] = max_length
    if dataset.kind == SEQ2SEQ:
        options["max_target_length"] = max_target_length
    fingerprint = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def make(folder: Path) -> dict[str, Any]:
        used = loaded
        if used is None:
            used = train_tokenizer(training_texts(dataset, show_progress), size or 0)
        used.save_pretrained(folder / "tokenizer")
        splits = _write(dataset, used, max_length, max_target_length, folder, show_progress)
        return _manifest(dataset, tokenizer, used, max_length, max_target_length, splits)

    return cached_store(cache_dir(cache), folder_name(dataset.name, 60), fingerprint, make)


def _write(
    dataset: Dataset, tokenizer: Any, max_length: int, max_target_length: int, folder: Path, show: bool
) -> dict[str, Any]:
    if dataset.kind == LM:
        from oelm.data.corpus import write_corpus

        return write_corpus(dataset, tokenizer, folder, show)
    if dataset.kind == TOKENS:
        from oelm.data.tagging import write_tagged

        return write_tagged(dataset, tokenizer, max_length, folder, show)
    if dataset.kind == QA:
        from oelm.data.answers import write_questions

        return write_questions(dataset, tokenizer, max_length, folder, show)
    if dataset.kind == SEQ2SEQ:
        from oelm.data.sequences import write_sequences

        return write_sequences(dataset, tokenizer, max_length, max_target_length, folder, show)
    return write_classified(dataset, tokenizer, max_length, folder, show)


def write_classified(
    dataset: Dataset, tokenizer: Any, max_length: int, folder: Path, show: bool
) -> dict[str, Any]:
    """Texts or pairs with one label each."""
    encoder = Encoder(tokenizer, max_length)
    pairs = "text_pair" in dataset.parts[0].columns
    dtypes = item_dtypes(encoder, dataset) | ({"second": np.uint32} if pairs and encoder.typed else {})
    counts = {split: np.zeros(len(dataset.label_names), dtype=np.int64) for split in SPLITS}
    with split_writers(folder, dict.fromkeys(SPLITS, dtypes)) as writers:
        for part, split, rows, ids, chunk in split_chunks(dataset, show):
            labels = part.labels[rows]
            counts[split] += np.bincount(labels, minlength=len(counts[split]))
            columns: dict[str, Any] = {"labels": labels, "ids": ids, "groups": part.numbers[rows]}
            if pairs:
                tokens, lengths, second, cut = encoder.pairs(chunk["text"], chunk["text_pair"])
                columns |= {"second": second} if encoder.typed else {}
            else:
                tokens, lengths, cut = encoder.texts(chunk["text"])
            size = sum(len(text.encode()) for role in ("text", "text_pair") for text in chunk.get(role, ()))
            writers[split].append(bytes=size, truncated=cut, tokens=tokens, lengths=lengths, **columns)
        return {
            split: writer.close() | {"class_counts": counts[split].tolist()}
            for split, writer in writers.items()
        }


def item_dtypes(encoder: Encoder, dataset: Dataset) -> dict[str, Any]:
    """The columns every set of items has."""
    small = np.uint8 if len(dataset.label_names) <= 1 << 8 else np.uint32
    labels = {"labels": small} if dataset.kind == CLASSIFICATION else {}
    counts = {"offsets": np.uint64, "ids": np.uint32, "groups": np.uint32}
    return {"tokens": encoder.dtype, **counts, **labels}


def split_chunks(dataset: Dataset, show: bool) -> Iterator[tuple[Part, str, np.ndarray, np.ndarray, Chunk]]:
    """All rows that belong to a split, in the order of the sources: part, split, rows, ids, columns.

    An id is a row's number in its source; sources of one role are counted through.
    """
    counted = dict.fromkeys(SPLITS, 0)
    total = sum(len(part.split) for part in dataset.parts)
    with progress(f"tokenising {dataset.name}", total, "rows", show) as advance:
        for part in dataset.parts:
            for first, chunk in part.rows():
                for role, values in chunk.items():
                    if role in ("text", "text_pair", "question", "context", "target"):
                        chunk[role] = [value or "" for value in values]
                size = len(next(iter(chunk.values())))
                codes = part.split[first : first + size]
                for code, split in enumerate(SPLITS):
                    places = np.flatnonzero(codes == code)
                    if len(places):
                        picked = {role: [values[i] for i in places] for role, values in chunk.items()}
                        rows = first + places
                        yield part, split, rows, counted[part.role] + rows, picked
                advance(size)
            counted[part.role] += len(part.split)


def training_texts(dataset: Dataset, show: bool) -> Iterator[str]:
    """The texts of the train split, from which a tokenizer may learn."""
    if dataset.kind == LM:
        from oelm.data.corpus import documents

        yield from (text for split, text in documents(dataset) if split == "train")
        return
    for _, split, _, _, chunk in split_chunks(dataset, show):
        if split == "train":
            for row in zip(*chunk.values(), strict=True):
                yield from item_texts(dataset.kind, dict(zip(chunk, row, strict=True)))


def _tokenizer_digest(tokenizer: Any) -> str:
    text = tokenizer.backend_tokenizer.to_str() + str(sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(
    dataset: Dataset,
    name: str,
    tokenizer: Any,
    max_length: int,
    max_target_length: int,
    splits: dict[str, Any],
) -> dict[str, Any]:
    warnings = list(dataset.warnings)
    for split, meta in splits.items():
        if meta["truncated"]:
            share = meta["truncated"] / meta["items"]
            warnings.append(notice("data.truncated", share=share, split=split, length=max_length))
        if meta.get("target_truncated"):
            share = meta["target_truncated"] / meta["items"]
            values = {"split": split, "length": max_target_length}
            warnings.append(notice("data.targets_truncated", share=share, **values))
    return {
        "task": dataset.name,
        "kind": dataset.kind,
        "metric": dataset.metric,
        "label_names": dataset.label_names,
        "max_length": max_length,
        **({"max_target_length": max_target_length} if dataset.kind == SEQ2SEQ else {}),
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
