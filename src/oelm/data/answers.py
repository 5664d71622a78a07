"""Extractive question answering: a question and a window of its document per item, the answer's place in it.

A document longer than max_length becomes several items that overlap, so that every answer stands whole in
one of them. Items of one question share its id. The splits that are measured also keep, for every token,
the characters it came from, and the documents and right answers themselves (`references`).
"""

import json
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from oelm.data.dataset import SPLITS, Dataset, Part
from oelm.data.preparation import item_dtypes, split_chunks
from oelm.data.store import IGNORE, Split
from oelm.data.tokenizer import Encoder
from oelm.data.writer import reference_files, split_writers
from oelm.errors import UserError

OVERLAP = 128  # tokens two neighbouring windows share
QUESTION = 64  # a question is cut after so many tokens


def write_questions(
    dataset: Dataset, tokenizer: Any, max_length: int, folder: Path, show: bool
) -> dict[str, Any]:
    """Columns per window: starts, ends, context (first context token); per token: characters from, to."""
    encoder = Encoder(tokenizer, max_length)
    per_window = {"starts": np.int32, "ends": np.int32, "context": np.uint32}
    base = item_dtypes(encoder, dataset) | per_window | ({"second": np.uint32} if encoder.typed else {})
    measured = base | {"chars_from": np.uint32, "chars_to": np.uint32}
    dtypes = {split: base if split == "train" else measured for split in SPLITS}
    with split_writers(folder, dtypes) as writers, reference_files(folder, SPLITS[1:]) as references:
        for part, split, rows, ids, chunk in split_chunks(dataset, show):
            given = zip(rows.tolist(), chunk["context"], chunk["answers"], strict=True)
            answers = [_answers(part, row, context, right) for row, context, right in given]
            found = windows(encoder, chunk["question"], chunk["context"], ids, answers)
            found["groups"] = part.numbers[rows][np.searchsorted(ids, found["ids"])]
            if split in references:
                _write_references(references[split], ids, chunk, answers)
            else:
                del found["chars_from"], found["chars_to"]
            size = sum(len(text.encode()) for role in ("question", "context") for text in chunk[role])
            writers[split].append(bytes=size, **found)
        return {split: writer.close() for split, writer in writers.items()}


def _write_references(
    file: TextIO, ids: np.ndarray, chunk: dict[str, list[Any]], answers: list[list[tuple[int, int]]]
) -> None:
    for row, name, context, spans in zip(ids, chunk["id"], chunk["context"], answers, strict=True):
        texts = [context[start:end] for start, end in spans]
        record = {"id": int(row), "name": name, "context": context, "answers": texts}
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _answers(part: Part, row: int, context: str, answers: Any) -> list[tuple[int, int]]:
    """Where the right answers stand in the document, in characters; empty for a question without one."""
    try:
        texts, starts = answers["text"], answers["answer_start"]
        spans = [(int(start), int(start) + len(text)) for text, start in zip(texts, starts, strict=True)]
    except (TypeError, KeyError, ValueError):
        raise UserError(
            f"{part.source.where(row)}: answers must hold two lists, text and answer_start"
        ) from None
    for text, (start, end) in zip(texts, spans, strict=True):
        if context[start:end] != text:
            raise UserError(f"{part.source.where(row)}: the answer {text[:40]!r} does not stand at {start}")
    return spans


def windows(
    encoder: Encoder,
    questions: list[str],
    contexts: list[str],
    ids: np.ndarray,
    answers: list[list[tuple[int, int]]],
) -> dict[str, Any]:
    """The columns of all windows: each question with as much of its document as there is room for."""
    before, between, after = encoder.pair
    absent = (
        0 if before else IGNORE
    )  # a window without the answer points at [CLS], or is left out of the loss
    columns: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "lengths", "ids", "second", "starts", "ends", "context", "chars")
    }
    for question, (tokens, chars), row, spans in zip(
        encoder.ids(questions), encoder.seconds_with_places(contexts), ids, answers, strict=True
    ):
        room = encoder.max_length - len(before) - len(between) - len(after)
        question = question[: min(QUESTION, room // 2)]
        room -= len(question)
        head = [*before, *question, *between]
        first, last = _token_span(chars, spans[0]) if spans else (-1, -1)
        for start in range(0, max(1, len(tokens) - min(OVERLAP, room // 2)), room - min(OVERLAP, room // 2)):
            end = min(start + room, len(tokens))
            inside = spans and start <= first and last < end
            columns["starts"].append(len(head) + first - start if inside else absent)
            columns["ends"].append(len(head) + last - start if inside else absent)
            item = [*head, *tokens[start:end], *after]
            columns["tokens"].append(item)
            columns["lengths"].append(len(item))
            columns["ids"].append(row)
            columns["second"].append(len(head))
            columns["context"].append(len(head))
            places = np.zeros((len(item), 2), dtype=np.int64)
            places[len(head) : len(head) + end - start] = chars[start:end]
            columns["chars"].append(places)
    chars = np.concatenate(columns.pop("chars"))
    flat = np.concatenate([np.array(item, dtype=encoder.dtype) for item in columns.pop("tokens")])
    if not encoder.typed:
        del columns["second"]
    rest = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    return rest | {"tokens": flat, "chars_from": chars[:, 0], "chars_to": chars[:, 1]}


def _token_span(chars: np.ndarray, span: tuple[int, int]) -> tuple[int, int]:
    """First and last token that touch a span of characters."""
    touching = np.flatnonzero((chars[:, 1] > span[0]) & (chars[:, 0] < span[1]))
    return (int(touching[0]), int(touching[-1])) if len(touching) else (-1, -1)


def read_references(split: Split) -> dict[int, dict[str, Any]]:
    """By id: what the texts of a measured split are compared with (`write_questions`, `write_sequences`)."""
    path = split.folder / f"{split.name}.references.jsonl"
    try:
        with path.open(encoding="utf-8") as file:
            return {record["id"]: record for record in map(json.loads, file)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); prepare the data again") from None


def answer_text(split: Split, item: int, start: int, end: int, references: dict[int, dict[str, Any]]) -> str:
    """The words of the document between two token places of an item (as the model counts them)."""
    base = int(split.offsets[item])
    first, last = int(split.column("chars_from")[base + start]), int(split.column("chars_to")[base + end])
    return references[int(split.ids[item])]["context"][first:last].strip()
