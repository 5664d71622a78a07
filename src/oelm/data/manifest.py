"""What store.json says of a prepared dataset, and whether its files are still what it says.

`checksums` holds the SHA-256 of every file and `digest` that of store.json itself, so a changed label, token
or class name is found when a process first opens the dataset. SHA-256 is the fastest of hashlib's where the
processor knows it, as most do: benchmarks/data.json has the time it takes.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.errors import UserError
from oelm.system.files import read_json
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import Notice, notice

if TYPE_CHECKING:
    from oelm.data.store import Split, Store

FORMAT = 3
WITH_TEXTS = 2  # its warnings are English sentences: still read, also from the cache
WITHOUT_GROUPS = 1  # still read where a user names its folder
MANIFEST = "store.json"
AGAIN = "prepare the data again"
PER_ITEM = ("labels", "values", "ids", "second", "starts", "ends", "context")
PER_TOKEN = ("tags", "words", "chars_from", "chars_to")
REAL = ("values",)  # columns of real numbers
SPLIT_COUNTS = ("items", "tokens", "bytes", "truncated", "longest")
KINDS = {
    "task": str, "kind": str, "metric": str, "label_names": list, "max_length": int, "tokenizer": dict,
    "fingerprint": str, "warnings": list, "splits": dict, "pairs": bool, "dropped": dict, "duplicates": dict,
}  # fmt: skip

TYPES = {str: "text", int: "count", list: "list", dict: "object", bool: "boolean"}  # words of messages.toml

_verified: set[tuple[Any, ...]] = set()  # what this process has checked, with the sizes and times it then had


class Damaged(UserError):
    """A prepared dataset that cannot be used and can be made again."""

    def __init__(self, problem: Notice) -> None:
        super().__init__(f"{problem}; {AGAIN}")
        self.notice = problem


def seal(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest with the checksums of the folder's files and its own."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    meta = meta | {"checksums": {str(path.relative_to(folder)): _sha256(path) for path in files}}
    return meta | {"digest": _digest(meta)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What store.json says, where the dataset is whole: every file as it was written."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder} is not a prepared data set: it has no {MANIFEST}")
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise Damaged(notice("file.damaged", path=path, problem=notice("value.not_object")))
    if meta.get("format") not in (FORMAT, WITH_TEXTS, WITHOUT_GROUPS):
        found = repr(meta.get("format"))
        raise Damaged(notice("file.other_format", path=folder, found=found, known=FORMAT))
    if "digest" in meta and meta["digest"] != _digest(meta):
        raise Damaged(notice("file.changed", path=path))
    if problem := _problem(meta):
        raise Damaged(notice("file.damaged", path=path, problem=problem))
    if "checksums" in meta:
        _verify(folder, meta["checksums"])
    return meta


def _problem(meta: dict[str, Any]) -> Notice | None:
    """The first thing in a manifest that nothing could be done with."""
    for key, kind in KINDS.items():
        if not isinstance(meta.get(key), kind):
            return notice("value.wrong_type", key=key, type=TYPES[kind])
    if not all(isinstance(name, str) for name in meta["label_names"]):
        return notice("value.wrong_type", key="label_names", type="text")
    tokenizer = meta["tokenizer"]
    counts = [("max_length", meta["max_length"]), ("tokenizer.vocab_size", tokenizer.get("vocab_size"))]
    counts.append(("tokenizer.pad_id", tokenizer.get("pad_id")))
    if "max_target_length" in meta:
        counts.append(("max_target_length", meta["max_target_length"]))
    for name, split in meta["splits"].items():
        if not isinstance(split, dict) or not isinstance(split.get("columns"), list):
            return notice("value.no_columns", split=name)
        written = [key for key in split if key.startswith("target_")]
        counts += [(f"{name}.{key}", split.get(key)) for key in (*SPLIT_COUNTS, *written)]
        classes = split.get("class_counts", None if "labels" in split["columns"] else meta["label_names"])
        if not isinstance(classes, list) or len(classes) != len(meta["label_names"]):
            return notice("value.no_class_counts", split=name)
        counts += [(f"{name}.class_counts", count) for count in split.get("class_counts", [])]
    for name in ("dropped", "duplicates"):
        counts += [(f"{name}.{key}", count) for key, count in meta[name].items()]
    if not isinstance(tokenizer.get("name"), str):
        return notice("value.wrong_type", key="tokenizer.name", type="text")
    for name, count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 1 << 62:
            return notice("value.wrong_type", key=name, type="count")
    if tokenizer["pad_id"] >= max(1, tokenizer["vocab_size"]):
        return notice("value.outside_vocabulary", key="tokenizer.pad_id")
    if not isinstance(meta.get("checksums", {}), dict):
        return notice("value.wrong_type", key="checksums", type="object")
    return None


def _verify(folder: Path, checksums: dict[str, str]) -> None:
    """Compare every file with its checksum; once in a process, unless a size or a time has changed."""
    now = [_state(folder / name) for name in checksums]
    key = (str(folder.resolve()), tuple(checksums.items()), *now)
    if key in _verified:
        return
    for name, recorded in checksums.items():
        try:
            found = _sha256(folder / name)
        except OSError as error:
            raise Damaged(notice("file.unreadable", path=folder / name, error=error.strerror)) from None
        if found != recorded:
            raise Damaged(notice("file.changed", path=folder / name))
    _verified.add(key)


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        raise Damaged(notice("file.missing", path=path)) from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(notice("file.irregular", path=path))
    return found.st_size, found.st_mtime_ns, found.st_ino


def _digest(meta: dict[str, Any]) -> str:
    rest = {key: value for key, value in meta.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_column(path: Path) -> np.ndarray:
    """A column, memory-mapped; nothing is unpickled."""
    try:
        _state(path)
        column = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"there is not enough memory to open {path}") from None
        if isinstance(error, UserError):
            raise
        raise Damaged(notice("file.damaged", path=path, problem=first_line(error))) from None
    if column.ndim != 1 or column.dtype.kind not in ("f" if path.name.split(".")[-2] in REAL else "iu"):
        raise Damaged(notice("file.damaged", path=path, problem=notice("value.not_numbers")))
    return column


def check_values(store: "Store") -> None:
    """Refuse a dataset without checksums whose columns contradict each other or its manifest."""
    for split in store.splits.values():
        if problem := _contradiction(store, split):
            column, what = problem
            raise Damaged(notice("file.damaged", path=split.path(column), problem=what))


def _contradiction(store: "Store", split: "Split") -> tuple[str, Notice] | None:
    items, tokens = split.meta["items"], split.meta["tokens"]
    lengths = dict.fromkeys(PER_ITEM, items) | dict.fromkeys(PER_TOKEN, tokens)
    lengths |= {"tokens": tokens, "offsets": items + 1, "target_offsets": items + 1}
    bounds = {"tokens": (0, store.vocab_size), "target_tokens": (0, store.vocab_size)}
    bounds |= {"labels": (0, len(store.label_names)), "tags": (-100, len(store.label_names))}
    for name in split.meta["columns"]:
        if not isinstance(name, str) or not name.isidentifier():
            return "tokens", notice("value.bad_column", file=MANIFEST, column=repr(str(name)[:40]))
        column = split.column(name)
        if name in lengths and len(column) != lengths[name]:
            return name, notice("value.wrong_length", found=len(column), written=lengths[name])
        if name in bounds and len(column):
            low, high = bounds[name]
            if not (low <= column.min() and column.max() < high):
                return name, notice("value.out_of_range", low=low, high=high - 1)
    for offsets, of in (("offsets", "tokens"), ("target_offsets", "target_tokens")):
        if offsets in split.meta["columns"]:
            places, last = split.column(offsets).astype(np.int64), len(split.column(of))
            if not (len(places) and places[0] == 0 and places[-1] == last and (np.diff(places) >= 0).all()):
                return offsets, notice("value.unordered")
    return None
