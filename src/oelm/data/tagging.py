"""Token classification: words with one tag each, written as tokens with the tag on each word's first."""

from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.dataset import SPLITS, Dataset, Part
from oelm.data.preparation import item_dtypes, split_chunks
from oelm.data.store import IGNORE
from oelm.data.tokenizer import Encoder
from oelm.data.writer import split_writers
from oelm.errors import UserError


def write_tagged(
    dataset: Dataset, tokenizer: Any, max_length: int, folder: Path, show: bool
) -> dict[str, Any]:
    """Columns: tokens and tags (parallel), offsets, ids, and `words` (words per item before truncation)."""
    encoder = Encoder(tokenizer, max_length)
    dtypes = item_dtypes(encoder, dataset) | {"tags": np.int16, "words": np.uint32}
    counts = {split: np.zeros(len(dataset.label_names), dtype=np.int64) for split in SPLITS}
    number = {name: i for i, name in enumerate(dataset.label_names)}
    with split_writers(folder, dict.fromkeys(SPLITS, dtypes)) as writers:
        for part, split, rows, ids, chunk in split_chunks(dataset, show):
            tags = [
                _tags(part, int(row), words, found, number)
                for row, words, found in zip(rows, chunk["tokens"], chunk["tags"], strict=True)
            ]
            tokens, lengths, firsts, cut = encoder.words(chunk["tokens"])
            flat = np.full(len(tokens), IGNORE, dtype=np.int64)
            item = np.repeat(np.arange(len(lengths)), lengths)
            # `firsts` is the number of the word a token starts, or -1; look it up in all items' tags at once.
            starts = np.cumsum([0, *map(len, tags)])[:-1]
            begins = firsts >= 0
            flat[begins] = np.concatenate(tags)[starts[item[begins]] + firsts[begins]]
            counts[split] += np.bincount(flat[begins], minlength=len(number))
            writers[split].append(
                bytes=sum(len(word.encode()) for words in chunk["tokens"] for word in words),
                truncated=cut,
                tokens=tokens,
                lengths=lengths,
                tags=flat,
                ids=ids,
                groups=part.numbers[rows],
                words=np.array([len(words) for words in chunk["tokens"]]),
            )
        return {
            split: writer.close() | {"class_counts": counts[split].tolist()}
            for split, writer in writers.items()
        }


def _tags(part: Part, row: int, words: list[str], tags: Any, number: dict[str, int]) -> np.ndarray:
    """The tags of one row as numbers, one per word."""
    if not isinstance(tags, list) or len(tags) != len(words):
        count = len(tags) if isinstance(tags, list) else "no"
        raise UserError(
            f"{part.source.where(row)}: {len(words)} words and {count} tags; one per word is needed"
        )
    found = [number.get(tag, -1) if isinstance(tag, str) else tag for tag in tags]
    for tag, value in zip(tags, found, strict=True):
        if not isinstance(value, int) or not 0 <= value < len(number):
            raise UserError(f"{part.source.where(row)}: tag {tag!r} is not one of 0 to {len(number) - 1}")
    return np.array(found, dtype=np.int64)
