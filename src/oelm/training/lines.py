"""Answers for lines of text: labels, tags of words, answers to questions, or what a model writes for them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oelm.data.answers import windows
from oelm.data.tokenizer import Encoder, pad_id
from oelm.errors import UserError
from oelm.training.objective import Questions, best_spans
from oelm.training.seq2seq import write

TEXTS = 32  # per batch
Line = tuple[int, str]  # its number, counted from 1, and what it says


def answer_lines(
    model: Any, tokenizer: Any, max_length: int, lines: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """For every line one answer; for an empty line one that says nothing."""
    reader = _reader_of(model)(model, tokenizer, max_length)
    remaining, first = iter(lines), 1
    while group := [*islice(remaining, TEXTS)]:
        asked = [line for line in enumerate(group, first) if reader.reads(line[1])]
        found = dict(
            zip([number for number, _ in asked], reader.answers(asked) if asked else (), strict=True)
        )
        for number, line in enumerate(group, first):
            yield {"text": line, **found.get(number, dict.fromkeys(reader.says))}
        first += len(group)


class Reader(ABC):
    """One kind of model."""

    says: tuple[str, ...]  # the keys of its answers

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.encoder = Encoder(tokenizer, max_length)

    def reads(self, line: str) -> bool:
        """Whether anything stands there, for a reader and for the tokenizer."""
        return bool(line.strip() and self.encoder.ids([line])[0])

    @abstractmethod
    def answers(self, lines: list[Line]) -> Iterable[dict[str, Any]]: ...

    def inputs(self, tokens: np.ndarray, lengths: np.ndarray, second: Any = None) -> dict[str, Tensor]:
        """Texts that lie end to end as a padded batch; `second`: where the second segment of each begins."""
        place = np.arange(lengths.max())
        real = place < lengths[:, None]
        ids = np.full(real.shape, pad_id(self.tokenizer), dtype=np.int64)
        ids[real] = tokens
        arrays = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if second is not None and self.encoder.typed:
            arrays["token_type_ids"] = ((place >= second[:, None]) & real).astype(np.int64)
        return {name: torch.from_numpy(array).to(self.model.device) for name, array in arrays.items()}

    def halves(self, lines: list[Line], what: str) -> tuple[list[str], list[str]]:
        """The two texts of every line, which have a tab between them."""
        parts = [line.split("\t") for _, line in lines]
        for (number, _), part in zip(lines, parts, strict=True):
            if len(part) != 2 or not part[1].strip():
                raise UserError(f"line {number}: this model reads {what}")
        return [part[0] for part in parts], [part[1] for part in parts]


class Labels(Reader):
    """The most likely label of a text, or of a pair, its probability, and those of the others."""

    says = ("label", "score", "scores")

    @torch.no_grad()
    def answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        second = None
        if getattr(self.model.config, "text_pairs", False):
            halves = self.halves(lines, "pairs: text, tab, text")
            tokens, lengths, second, _ = self.encoder.pairs(*halves)
        else:
            tokens, lengths, _ = self.encoder.texts([line for _, line in lines])
        logits = self.model(**self.inputs(tokens, lengths, second)).logits
        names = self.model.config.id2label
        for row in logits.float().softmax(-1).cpu().numpy():
            best = int(row.argmax())
            scores = {names[i]: float(value) for i, value in enumerate(row)}
            yield {"label": names[best], "score": float(row[best]), "scores": scores}


class Tags(Reader):
    """The tag of every word; none for words past the length that the model reads."""

    says = ("words", "tags")

    @torch.no_grad()
    def answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        rows = [line.split() for _, line in lines]
        tokens, lengths, firsts, _ = self.encoder.words(rows)
        logits = self.model(**self.inputs(tokens, lengths)).logits
        names, ends = self.model.config.id2label, np.cumsum(lengths)
        for words, likeliest, begin, length in zip(
            rows, logits.argmax(-1).cpu().numpy(), ends - lengths, lengths, strict=True
        ):
            starts = firsts[begin : begin + length]
            tags: list[str | None] = [None] * len(words)
            for place in np.flatnonzero(starts >= 0):
                tags[starts[place]] = names[int(likeliest[place])]
            yield {"words": words, "tags": tags}


class Answers(Reader):
    """The part of a document that answers a question, and the probability of its beginning and end."""

    says = ("answer", "score")

    @torch.no_grad()
    def answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        questions, contexts = self.halves(lines, "questions: question, tab, the text with the answer")
        for question, context in zip(questions, contexts, strict=True):  # a document may be many windows
            found = windows(self.encoder, [question], [context], np.zeros(1, dtype=np.int64), [[]])
            best: tuple[float, float, str] = (-np.inf, 0.0, "")
            ends = np.cumsum(found["lengths"])
            for first in range(0, len(ends), TEXTS):
                part = slice(first, first + TEXTS)
                lengths, context_from = found["lengths"][part], found["context"][part]
                begins = ends[part] - lengths
                tokens = found["tokens"][begins[0] : begins[0] + lengths.sum()]
                inputs = self.inputs(tokens, lengths, context_from)
                out = self.model(**inputs)
                starts = torch.from_numpy(context_from).to(self.model.device)
                spans = best_spans(out, inputs["attention_mask"], starts, Questions.longest_answer)
                score, probability, start, end = (values.cpu().numpy() for values in spans)
                row = int(score.argmax())
                if score[row] > best[0]:
                    at = begins[row] + start[row], begins[row] + end[row]
                    text = context[found["chars_from"][at[0]] : found["chars_to"][at[1]]].strip()
                    best = float(score[row]), float(probability[row]), text
            yield {"answer": best[2], "score": best[1]}


class Targets(Reader):
    """What an encoder-decoder writes."""

    says = ("target",)

    def answers(self, lines: list[Line], **options: Any) -> Iterator[dict[str, Any]]:
        tokens, lengths, _ = self.encoder.texts([line for _, line in lines])
        for target in write(self.model, self.tokenizer, self.inputs(tokens, lengths), **options):
            yield {"target": target}


def _reader_of(model: Any) -> type[Reader]:
    if model.config.is_encoder_decoder and model.can_generate():
        return Targets
    readers = {"SequenceClassification": Labels, "TokenClassification": Tags, "QuestionAnswering": Answers}
    for kind, reader in readers.items():
        if kind in type(model).__name__:
            return reader
    raise UserError(f"a {type(model).__name__} predicts nothing of texts; `oelm generate` lets it write")
