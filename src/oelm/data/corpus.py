"""Corpora for language modelling: documents in, one stream of tokens per split out, with bounded memory.

A stream starts with the boundary token, so that the first real token is predicted like any other; where
rows are documents, each ends with it. Boundaries have no bytes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.dataset import HOLD_OUT_SEED, SPLITS, Dataset, check_values
from oelm.data.progress import progress
from oelm.data.shuffle import shuffle_keys, text_key
from oelm.data.tokenizer import Encoder, boundary_id
from oelm.data.writer import SplitWriter, split_writers
from oelm.errors import UserError

PIECE = 1 << 16  # characters tokenised as one string
BLOCK = 1 << 20  # characters handed to the tokenizer at once: this bounds memory


def documents(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """(split, text) for every row that is not empty; held-out documents are chosen by their text."""
    for part in dataset.parts:
        for first, chunk in part.rows():
            check_values(part, "text", chunk["text"], first)
            texts = [text for text in chunk["text"] if text]
            if part.role == "train" and dataset.held_out:
                yield from zip(_choose(texts, dataset.held_out), texts, strict=True)
            else:
                yield from ((part.role, text) for text in texts)


def _choose(texts: list[str], held_out: dict[str, float]) -> list[str]:
    keys = shuffle_keys(np.array([text_key(text) for text in texts], dtype=np.uint64), HOLD_OUT_SEED)
    bounds = np.cumsum(list(held_out.values()))
    names = [*held_out, "train"]
    return [names[i] for i in np.searchsorted(bounds, keys / 2.0**64, side="right")]


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """A text in parts of at most `size` characters, cut before a space that starts a word.

    Byte-level BPE never joins a word to what is before its space, so there the cut changes no token.
    """
    start = 0
    while len(text) - start > size:
        cut = start + size
        while (cut := text.rfind(" ", start + 1, cut)) > 0:
            if not text[cut - 1].isspace() and not text[cut + 1].isspace():
                break
        if cut <= start:
            cut = start + size  # no such place: one endless word
        yield text[start:cut]
        start = cut
    yield text[start:]


class _Stream:
    """One split's stream: collects pieces and writes them out a block at a time."""

    def __init__(self, writer: SplitWriter, encoder: Encoder, boundary: int, separate: bool) -> None:
        self.writer, self.encoder, self.separate = writer, encoder, separate
        self.boundary = np.array([boundary], dtype=encoder.dtype)
        self.pending: list[tuple[str, bool]] = []  # piece, and whether a document ends after it
        self.size = 0
        self.line = ""  # rows of a stream are joined before they are cut: they are not units of text
        self.inside = False  # of a document: its first piece has been written, its last has not
        writer.append(bytes=0, tokens=self.boundary)

    def add(self, text: str) -> None:
        self.writer.meta["items"] += 1
        if self.separate:
            parts = list(pieces(text))
            self._extend([(part, i == len(parts) - 1) for i, part in enumerate(parts)])
            return
        self.line += text
        if len(self.line) > 2 * PIECE:
            *parts, self.line = pieces(self.line)
            self._extend([(part, False) for part in parts])

    def _extend(self, parts: list[tuple[str, bool]]) -> None:
        self.pending += parts
        self.size += sum(len(part) for part, _ in parts)
        if self.size >= BLOCK:
            self._write()

    def _write(self) -> None:
        size = sum(len(part.encode()) for part, _ in self.pending)
        arrays: list[np.ndarray] = []
        starts: list[int] = []
        place = self.writer.meta["tokens"]
        for ids, (_, ends) in zip(
            self.encoder.ids([part for part, _ in self.pending]), self.pending, strict=True
        ):
            if not self.inside:
                starts.append(place)
            arrays.append(np.array(ids, dtype=self.encoder.dtype))
            if ends:
                arrays.append(self.boundary)
            self.inside = not ends
            place += len(ids) + ends
        if arrays:
            self.writer.append(
                bytes=size, tokens=np.concatenate(arrays), documents=np.array(starts, np.int64)
            )
        self.pending, self.size = [], 0

    def close(self) -> dict[str, Any]:
        if self.line:
            self._extend([(part, False) for part in pieces(self.line)])
        self._write()
        return self.writer.close()


def write_corpus(dataset: Dataset, tokenizer: Any, folder: Path, show: bool) -> dict[str, Any]:
    """Columns: tokens, and documents (where in them each one starts; a stream of lines is one document)."""
    encoder = Encoder(tokenizer, max_length=1 << 30)
    boundary = boundary_id(tokenizer)
    dtypes = {"tokens": encoder.dtype, "documents": np.uint64}
    with split_writers(folder, dict.fromkeys(SPLITS, dtypes)) as writers:
        streams = {
            split: _Stream(writer, encoder, boundary, dataset.separate) for split, writer in writers.items()
        }
        with progress(f"tokenising {dataset.name}", None, "rows", show) as advance:
            for split, text in documents(dataset):
                streams[split].add(text)
                advance(1)
        splits = {split: stream.close() for split, stream in streams.items()}
    for split, meta in splits.items():
        if not meta["bytes"]:
            raise UserError(f"{dataset.name}: the {split} split is empty; nothing can be trained or measured")
    return splits
