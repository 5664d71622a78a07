"""Sequence to sequence: a source and the target to be written for it, each in a flat array of its own.

The splits that are measured also keep both texts (`references`): what a model writes is compared with the
target as the file has it, not with what was left of it after tokenising and cutting.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.dataset import SPLITS, Dataset
from oelm.data.preparation import item_dtypes, split_chunks
from oelm.data.tokenizer import Encoder
from oelm.data.writer import reference_files, split_writers


def write_sequences(
    dataset: Dataset, tokenizer: Any, max_length: int, max_target_length: int, folder: Path, show: bool
) -> dict[str, Any]:
    """Columns: tokens, offsets and ids of the sources, target_tokens and target_offsets."""
    encoder = Encoder(tokenizer, max_length)
    writing = Encoder(tokenizer, max_target_length, target=True)
    targets = {"target_tokens": encoder.dtype, "target_offsets": np.uint64}
    dtypes = dict.fromkeys(SPLITS, item_dtypes(encoder, dataset) | targets)
    with split_writers(folder, dtypes) as writers, reference_files(folder, SPLITS[1:]) as references:
        for part, split, rows, ids, chunk in split_chunks(dataset, show):
            tokens, lengths, cut = encoder.texts(chunk["text"])
            size = sum(len(text.encode()) for text in chunk["text"])
            items = {"ids": ids, "groups": part.numbers[rows]}
            writers[split].append(bytes=size, truncated=cut, tokens=tokens, lengths=lengths, **items)
            tokens, lengths, cut = writing.texts(chunk["target"])
            size = _kept_bytes(writing, chunk["target"], tokens, lengths)
            writers[split].append_targets(bytes=size, truncated=cut, tokens=tokens, lengths=lengths)
            if split in references:
                for row, source, target in zip(ids.tolist(), chunk["text"], chunk["target"], strict=True):
                    record = {"id": row, "source": source, "target": target}
                    references[split].write(json.dumps(record, ensure_ascii=False) + "\n")
        return {split: writer.close() for split, writer in writers.items()}


def _kept_bytes(encoder: Encoder, texts: list[str], tokens: np.ndarray, lengths: np.ndarray) -> int:
    """Bytes behind the targets' tokens: what was cut off is not predicted, and no bits are spent on it."""
    size, end = 0, 0
    for text, length in zip(texts, lengths.tolist(), strict=True):
        end += length
        full = length < encoder.max_length
        size += len((text if full else encoder.decode(tokens[end - length : end].tolist())).encode())
    return size
