"""Extractive question answering: an item is a question and a window of its document, with the answer's span.

A document longer than max_length becomes several overlapping items, so that every answer is completely inside
one of them. Items of one question share its id. The splits that are evaluated on also keep, for every token,
the characters it came from, and the documents and reference answers (`Split.right_texts`).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.assemble import PADDED, Array, Batch, Layout
from oelm.data.dataset import Dataset, Part
from oelm.data.preparation import Lengths, Rows, write_items
from oelm.data.store import IGNORE, Split, Store
from oelm.data.tasks.base import Columns, Items, Measured, Objective, Reader, Splits, TaskKind, pair_fault
from oelm.data.tokenizer import Encoder
from oelm.errors import UserError

OVERLAP = 128  # tokens two neighbouring windows share
QUESTION = 64  # a question is cut after so many tokens
LONGEST_ANSWER = 30  # tokens

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerObjective(Objective):
    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        batch = super().batch(split, items, layout)
        context = self.store[split].column("context")[items].astype(np.int64)
        batch.targets |= {"context": torch.from_numpy(context), "items": torch.from_numpy(np.asarray(items))}
        return batch

    def count(self, split: str, items: Array) -> int:
        return max(1, int((self.store[split].column("starts")[items] != IGNORE).sum()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model(**batch.inputs), batch)

    def _loss(self, out: Any, batch: Batch) -> Tensor:
        start, end = (
            F.cross_entropy(
                out[f"{side}_logits"].float(), batch.targets[side], ignore_index=IGNORE, reduction="sum"
            )
            for side in ("start", "end")
        )
        return (start + end) / 2

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        out = model(**batch.inputs)
        mask, context = batch.inputs["attention_mask"], batch.targets["context"]
        score, _, start, end = best_spans(out, mask, context)
        items = batch.targets["items"]
        return self._loss(out, batch), {"items": items, "scores": score, "starts": start, "ends": end}

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        """Reduce the arrays to one entry per question, its window with the highest score, and score them."""
        part = self.store[split]
        references = part.right_texts()
        best: dict[int, int] = {}
        for row, question in enumerate(arrays["ids"].tolist()):
            if question not in best or arrays["scores"][row] > arrays["scores"][best[question]]:
                best[question] = row
        rows = [row for _, row in sorted(best.items())]
        kept = {name: values[rows] for name, values in arrays.items()}
        spans = zip(kept["items"].tolist(), kept["starts"].tolist(), kept["ends"].tolist(), strict=True)
        answers = [answer_text(part, item, start, end, references) for item, start, end in spans]
        scores = answer_scores([references[question]["answers"] for question in sorted(best)], answers)
        return Measured({"loss": loss_sum / count, **means(scores)}, kept | scores)


class AnswerReader(Reader):
    """The span of a document that answers a question, and its probability."""

    says = ("answer", "score")
    reads = ("question", "context")

    def problem(self, line: str) -> str:
        fault = pair_fault(line.split("\t", 1))
        return f"is no question: this model reads question, tab, document, and here {fault}" if fault else ""

    def encode(self, lines: list[str]) -> Items:
        questions, contexts = zip(*(line.split("\t", 1) for line in lines), strict=True)
        rows = np.arange(len(lines))
        columns = windows(self.encoder, [*questions], [*contexts], rows, [[] for _ in lines])
        spans = {name: columns[name] for name in ("chars_from", "chars_to")}
        spans["begins"] = np.cumsum(columns["lengths"]) - columns["lengths"]
        template = sum(map(len, self.encoder.pair))
        return Items(
            columns["tokens"], columns["lengths"], template, 0, columns["context"], columns["ids"], spans
        )

    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        starts = torch.from_numpy(second).to(self.model.device)
        return best_spans(self.model(**inputs), inputs["attention_mask"], starts)

    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        best = int(np.argmax([score for score, *_ in said]))
        _, probability, start, end = said[best]
        begin = items.more["begins"][mine[best]]
        first, last = items.more["chars_from"][begin + start], items.more["chars_to"][begin + end]
        return {"answer": line.split("\t", 1)[1][first:last].strip(), "score": float(probability)}


class QuestionAnswering(TaskKind):
    name = "question-answering"
    does = "answer questions"
    auto_class = "AutoModelForQuestionAnswering"
    metrics = {"f1": True, "exact_match": True, "loss": False}
    metric = "f1"
    objective = AnswerObjective
    reader = AnswerReader
    by_source = True
    smooths = False

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        if (text, text_pair, label) != ("text", None, "label"):
            raise UserError(
                "question answering reads the columns question, context and answers; name no others"
            )
        return {"question": "question", "context": "context", "answers": "answers"}

    def item_texts(self, row: dict[str, Any]) -> tuple[str, ...]:
        return (row["context"], row["question"])

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """Columns per window: starts, ends, context (the first context token); per token: its first character
        and the one after its last."""
        encoder = Encoder(tokenizer, lengths.text)

        def encode(rows: Rows) -> dict[str, Any]:
            questions, contexts = rows.columns["question"], rows.columns["context"]
            given = zip(rows.numbers.tolist(), contexts, rows.columns["answers"], strict=True)
            answers = [_answers(rows.part, row, context, right) for row, context, right in given]
            items = windows(encoder, questions, contexts, rows.ids, answers)
            groups = rows.part.numbers[rows.numbers][np.searchsorted(rows.ids, items["ids"])]
            names = rows.columns.get("id") or map(str, rows.ids.tolist())
            named = zip(rows.ids.tolist(), names, contexts, answers, strict=True)
            records = [
                {"id": row, "name": name, "context": context, "answers": [context[a:b] for a, b in spans]}
                for row, name, context, spans in named
            ]
            size = rows.bytes("question", "context")
            return items | {"groups": groups, "bytes": size, "right_texts": records}

        dtypes = {"tokens": encoder.dtype, "starts": np.int32, "ends": np.int32, "context": np.uint32}
        dtypes |= {"second": np.uint32} if encoder.typed else {}
        characters = {"chars_from": np.uint32, "chars_to": np.uint32}
        return write_items(dataset, folder, dtypes, encode, show, only_measured=characters)

    def config_fields(self, store: Store) -> dict[str, Any]:
        return {"num_labels": 2}  # logits for the start and the end of the answer


KIND = QuestionAnswering()


def answer_scores(right: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, Array]:
    """Per question: SQuAD's exact match (1 or 0) and F1 over words, each for the best of its reference
    answers. A question without any has the reference answer ""."""
    exact, overlap = [], []
    for texts, answer in zip(right, predictions, strict=True):
        words = _answer_words(answer)
        pairs = [(_answer_words(text), words) for text in texts or [""]]
        exact.append(float(max(expected == predicted for expected, predicted in pairs)))
        overlap.append(max(word_f1(expected, predicted) for expected, predicted in pairs))
    return {"exact_match": np.array(exact), "f1": np.array(overlap)}


def means(items: dict[str, Array]) -> dict[str, float]:
    """The mean of every array, summed in the order of the items."""
    return {name: sum(values.tolist()) / len(values) for name, values in items.items()}


def _answer_words(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles, normalised as SQuAD does."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def word_f1(expected: list[str], predicted: list[str]) -> float:
    """F1 over words, counted with repetitions."""
    if not expected or not predicted:
        return float(expected == predicted)
    common = (Counter(expected) & Counter(predicted)).total()
    return 2 * common / (len(expected) + len(predicted))


def best_spans(out: Any, mask: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every window, the most likely answer within the document, which begins at token `context`: score,
    probability, first and last token, (B,) each."""
    position = torch.arange(out.start_logits.shape[1], device=out.start_logits.device)
    in_context = (position >= context[:, None]) & mask.bool()
    start = out.start_logits.float().masked_fill(~in_context, -1e9)
    end = out.end_logits.float().masked_fill(~in_context, -1e9)
    both = start[:, :, None] + end[:, None, :]
    width = position[None, :] - position[:, None]
    both = both.masked_fill((width < 0) | (width >= LONGEST_ANSWER), -2e9).flatten(1)
    score, index = both.max(1)
    probability = (score - start.logsumexp(1) - end.logsumexp(1)).exp()
    return score, probability, index // start.shape[1], index % start.shape[1]


def answer_text(split: Split, item: int, start: int, end: int, known: dict[int, dict[str, Any]]) -> str:
    """The text of the document from token `start` to token `end` of an item; `known` are the split's
    `right_texts`."""
    base = int(split.offsets[item])
    first, last = int(split.column("chars_from")[base + start]), int(split.column("chars_to")[base + end])
    return known[int(split.ids[item])]["context"][first:last].strip()


def _answers(part: Part, row: int, context: str, answers: Any) -> list[tuple[int, int]]:
    """The reference answers as spans of characters in the document; empty for a question without one."""
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
    ids: Array,
    answers: list[list[tuple[int, int]]],
) -> dict[str, Any]:
    """The columns of all windows: each question with as much of its document as fits."""
    before, between, after = encoder.pair
    absent = 0 if before else IGNORE  # without the answer: points at [CLS] or has no loss
    texts = zip(encoder.ids(questions), encoder.seconds_with_spans(contexts), ids, answers, strict=True)
    made: list[tuple[Any, ...]] = []
    for question, (tokens, chars), row, spans in texts:
        room = encoder.max_length - len(before) - len(between) - len(after)
        question = question[: min(QUESTION, room // 2)]
        room -= len(question)
        head = [*before, *question, *between]
        first, last = _token_span(chars, spans[0]) if spans else (-1, -1)
        overlap = min(OVERLAP, room // 2)
        for start in range(0, max(1, len(tokens) - overlap), room - overlap):
            end = min(start + room, len(tokens))
            inside = spans and start <= first and last < end
            answer = (len(head) + first - start, len(head) + last - start) if inside else (absent, absent)
            item = np.array([*head, *tokens[start:end], *after], dtype=encoder.dtype)
            token_chars = np.zeros((len(item), 2), dtype=np.int64)
            token_chars[len(head) : len(head) + end - start] = chars[start:end]
            made.append((item, token_chars, len(item), row, len(head), len(head), *answer))
    items, characters, *columns = zip(*made, strict=True)
    names = ("lengths", "ids", "second", "context", "starts", "ends")
    values = {name: np.array(column, dtype=np.int64) for name, column in zip(names, columns, strict=True)}
    all_chars = np.concatenate(characters)
    return values | {
        "tokens": np.concatenate(items), "chars_from": all_chars[:, 0], "chars_to": all_chars[:, 1]
    }  # fmt: skip


def _token_span(chars: Array, span: tuple[int, int]) -> tuple[int, int]:
    """First and last token that touch a span of characters."""
    touching = np.flatnonzero((chars[:, 1] > span[0]) & (chars[:, 0] < span[1]))
    return (int(touching[0]), int(touching[-1])) if len(touching) else (-1, -1)
