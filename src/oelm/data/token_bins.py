"""Flat token files, as many training scripts write them: train.bin, val.bin and, if there is one, test.bin.

Token ids in two or four bytes, little-endian, every document ended by the tokenizer's end token. Without a
test.bin, the second half of val.bin is the test split.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.store import Array, Split, Store
from oelm.data.tasks import task_kind
from oelm.data.tokenizer import boundary_id, load_tokenizer, pad_id, tokenizer_digest, trained_size
from oelm.data.writer import SplitWriter, cached_store, split_writers
from oelm.errors import UserError
from oelm.system.files import cache_dir, folder_beside, folder_name
from oelm.system.messages import Notice, notice

FILES = {"train": ("train.bin",), "validation": ("val.bin", "validation.bin"), "test": ("test.bin",)}
BLOCK = 1 << 24  # tokens read at once


def holds_bins(folder: Path) -> bool:
    return (folder / "train.bin").is_file()


def prepare_bins(folder: Path, tokenizer: str | None, max_length: int, cache: str | Path | None) -> Store:
    """The prepared dataset of a folder of token files, checked."""
    if tokenizer is None or trained_size(tokenizer):
        raise UserError(f"{folder} holds token files; name their tokenizer, for example --tokenizer gpt2")
    used = load_tokenizer(tokenizer)
    if "ByteLevel" not in str(used.backend_tokenizer.decoder):  # else bytes depend on neighbours
        raise UserError(f"{folder}: token files need a byte-level tokenizer such as gpt2, not {tokenizer}")
    files = {split: _find(folder, names) for split, names in FILES.items()}
    if files["validation"] is None:
        raise UserError(f"{folder} has a train.bin but no val.bin; split one off")
    digest = hashlib.sha256(f"{tokenizer_digest(used)} bins 1".encode())
    for file in filter(None, files.values()):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())

    def make(store: Path) -> dict[str, Any]:
        used.save_pretrained(store / "tokenizer")
        tokens = {split: _read(file, len(used)) for split, file in files.items() if file is not None}
        if "test" not in tokens:
            tokens["validation"], tokens["test"] = _halves(tokens["validation"], boundary_id(used))
        dtypes = {split: {"tokens": array.dtype, "documents": np.uint64} for split, array in tokens.items()}
        warnings: list[Notice] = []
        with split_writers(store, dtypes) as writers:
            splits = {s: _copy(s, tokens[s], writer, used, warnings) for s, writer in writers.items()}
        made_with = {"name": tokenizer, "vocab_size": len(used), "pad_id": pad_id(used)}
        return {
            "task": folder.resolve().name, "kind": "lm", "metric": "perplexity", "label_names": [],
            "max_length": max_length, "pairs": False, "splits": splits, "dropped": {}, "duplicates": {},
            "tokenizer": made_with | {"digest": tokenizer_digest(used)},
            "warnings": [warning.to_dict() for warning in warnings],
        }  # fmt: skip

    return cached_store(cache_dir(cache), folder_name(folder.resolve().name, 60), digest.hexdigest(), make)


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(file: Path, vocabulary: int) -> Array:
    """A file's token ids, memory-mapped. Ids below 65,536 in four bytes are detected by their zero halves."""
    size = file.stat().st_size
    start = np.fromfile(file, "<u2", count=1 << 20)
    four = vocabulary > 1 << 16 or (len(start) > 1 and not start[1::2].any())
    if not size or size % (4 if four else 2):
        problem = "is empty" if not size else f"has {size:,} bytes, no whole number of tokens"
        raise UserError(f"{file} {problem}; it must hold token ids as uint16 or uint32")
    tokens = np.memmap(file, "<u4" if four else "<u2", mode="r")
    if four and len(tokens) > 1 and not tokens[1 : 1 << 20 : 2].any():
        raise UserError(f"{file} seems to hold eight bytes a token; write its token ids as uint16 or uint32")
    largest = max(int(tokens[i : i + BLOCK].max()) for i in range(0, len(tokens), BLOCK))
    if largest >= vocabulary:
        raise UserError(
            f"{file} holds the token {largest:,}, but this tokenizer has {vocabulary:,}; name the one that "
            "made the file"
        )
    return tokens


def _halves(tokens: Array, boundary: int) -> tuple[Array, Array]:
    """Two parts, cut after the document that contains the middle; without a document's end, in the middle."""
    ends = np.flatnonzero(tokens == boundary) + 1
    later = ends[(ends >= len(tokens) // 2) & (ends < len(tokens))]
    middle = int(later[0]) if len(later) else len(tokens) // 2
    return tokens[:middle], tokens[middle:]


def _copy(split: str, tokens: Array, writer: SplitWriter, tokenizer: Any, warnings: list[Notice]) -> Any:
    """Write tokens as a split that starts with a boundary, with the position of each document's start."""
    boundary = boundary_id(tokenizer)
    lengths = np.array([len(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))])
    lengths[tokenizer.all_special_ids] = 0  # a character of a byte-level token is a byte of text
    last, position = boundary, 0
    for start in range(0, len(tokens), BLOCK):
        block = np.array(tokens[start : start + BLOCK])
        if start == 0 and block[0] != boundary:
            block = np.concatenate([np.array([boundary], block.dtype), block])
        before = np.concatenate([[last], block[:-1]])
        starts = position + np.flatnonzero((before == boundary) & (block != boundary))
        writer.append(tokens=block, documents=starts, bytes=int(lengths[block].sum()))
        writer.meta["items"] += len(starts)
        last, position = int(block[-1]), position + len(block)
    if not writer.meta["items"]:
        raise UserError(f"the {split} tokens hold no text, only end tokens; write them again")
    if writer.meta["items"] == 1:
        warnings.append(notice("data.no_documents", split=split))
    return writer.close()


def check_bins(task: str, kind: str, folder: Path) -> None:
    """Raise unless a task of this kind can be written as token files to this folder."""
    if not task_kind(kind).stream:
        raise UserError(f"token files hold one stream of tokens; {task} is for {kind}")
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder")


def write_bins(store: Store, folder: Path) -> None:
    """Write a corpus as train.bin, val.bin and test.bin to a new folder, with two bytes a token if these
    suffice."""
    check_bins(store.task, store.kind, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(folder) as beside:
        for split in store.splits.values():
            _write(split, beside / FILES[split.name][0])
        beside.rename(folder)


def _write(split: Split, file: Path) -> None:
    with file.open("wb") as stream:
        for start in range(1, len(split.tokens), BLOCK):  # without the boundary before the first document
            np.asarray(split.tokens[start : start + BLOCK]).tofile(stream)
