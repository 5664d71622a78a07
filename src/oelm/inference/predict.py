"""Answers for lines of text: labels, tags of words, answers to questions, or what a model writes for them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oelm.data.answers import windows
from oelm.data.tasks.objective import Questions, best_spans
from oelm.data.tasks.seq2seq import write
from oelm.data.tokenizer import Encoder, pad_id
from oelm.errors import UserError
from oelm.models.fit import agree_on_padding, takes_segments

TEXTS = 32  # per batch


def answer_lines(
    model: Any, tokenizer: Any, max_length: int, lines: Iterable[str], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """For every line one answer; for an empty line one that says nothing. Where a line cannot be read, all
    before it are answered first."""
    done = empty = 0
    agree_on_padding(model, tokenizer)
    reader = _reader_of(model)(model, tokenizer, max_length)
    remaining = enumerate(lines, 1)
    refused: UserError | None = None
    while refused is None:
        group: list[str] = []
        try:
            for number, line in islice(remaining, TEXTS):
                if line.strip() and (problem := reader.problem(line)):
                    raise UserError(f"line {number} {problem}")
                group.append(line)
        except UserError as error:
            refused = error
        if not group:
            break
        read = [reader.reads(line) for line in group]
        asked = [line for line, there in zip(group, read, strict=True) if there]
        answers = iter(reader.answers(asked) if asked else ())
        done, empty = done + len(group), empty + len(group) - len(asked)
        for line, there in zip(group, read, strict=True):
            yield {"text": line, **(next(answers) if there else dict.fromkeys(reader.says))}
    if empty:
        say(f"{empty} of {done} lines said nothing; their answers are null")
    if reader.cut:
        say(f"{reader.cut} of {done} lines were cut: this model reads {max_length} tokens")
    if refused is not None:
        raise refused


class Reader(ABC):
    """One kind of model."""

    says: tuple[str, ...]  # the keys of its answers
    cut = 0  # lines that were longer than what it reads

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.encoder = Encoder(tokenizer, max_length)

    def reads(self, line: str) -> bool:
        """Whether anything stands there, for a reader and for the tokenizer."""
        return bool(line.strip() and self.encoder.ids([line])[0])

    def problem(self, line: str) -> str:
        """Why a line cannot be read; empty where it can."""
        return ""

    @abstractmethod
    def answers(self, lines: list[str]) -> Iterable[dict[str, Any]]: ...

    def inputs(self, tokens: np.ndarray, lengths: np.ndarray, second: Any = None) -> dict[str, Tensor]:
        """Texts that lie end to end as a padded batch; `second`: where the second segment of each begins."""
        place = np.arange(lengths.max())
        real = place < lengths[:, None]
        ids = np.full(real.shape, pad_id(self.tokenizer), dtype=np.int64)
        ids[real] = tokens
        arrays = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if second is not None and self.encoder.typed and takes_segments(self.model):
            arrays["token_type_ids"] = ((place >= second[:, None]) & real).astype(np.int64)
        return {name: torch.from_numpy(array).to(self.model.device) for name, array in arrays.items()}


class Labels(Reader):
    """The most likely label of a text, or of a pair, its probability, and those of the others."""

    says = ("label", "score", "scores")

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(model, tokenizer, max_length)
        check_one_label(model)

    @property
    def pairs(self) -> bool:
        return bool(getattr(self.model.config, "text_pairs", False))

    def problem(self, line: str) -> str:
        halves = line.split("\t")
        if not self.pairs or (len(halves) == 2 and all(half.strip() for half in halves)):
            return ""
        return f"is not a pair: this model reads text, tab, text, and here {_fault(halves)}"

    @torch.no_grad()
    def answers(self, lines: list[str]) -> Iterator[dict[str, Any]]:
        second = None
        if self.pairs:
            halves = [line.split("\t") for line in lines]
            tokens, lengths, second, cut = self.encoder.pairs([h[0] for h in halves], [h[1] for h in halves])
        else:
            tokens, lengths, cut = self.encoder.texts(lines)
        self.cut += cut
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
    def answers(self, lines: list[str]) -> Iterator[dict[str, Any]]:
        rows = [line.split() for line in lines]
        tokens, lengths, firsts, cut = self.encoder.words(rows)
        self.cut += cut
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

    def problem(self, line: str) -> str:
        halves = line.split("\t", 1)
        if len(halves) == 2 and all(half.strip() for half in halves):
            return ""
        return f"is no question: this model reads question, tab, document, and here {_fault(halves)}"

    @torch.no_grad()
    def answers(self, lines: list[str]) -> Iterator[dict[str, Any]]:
        for line in lines:  # a document may be many windows
            question, context = line.split("\t", 1)
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

    def answers(self, lines: list[str], **options: Any) -> Iterator[dict[str, Any]]:
        tokens, lengths, cut = self.encoder.texts(lines)
        self.cut += cut
        for target in write(self.model, self.tokenizer, self.inputs(tokens, lengths), **options):
            yield {"target": target}


def _fault(halves: list[str]) -> str:
    """What is wrong with a line that should be two texts."""
    if len(halves) != 2:
        return f"are {len(halves) - 1} tabs" if len(halves) > 2 else "is no tab"
    return f"nothing stands {'after' if halves[0].strip() else 'before'} the tab"


def writes(model: Any) -> bool:
    """Whether a model reads a source and writes a target for it."""
    return bool(model.config.is_encoder_decoder and model.can_generate())


def check_one_label(model: Any) -> None:
    """Refuse a model that gives a text a number, or several labels at once."""
    kind = model.config.problem_type
    if "SequenceClassification" not in type(model).__name__:
        return
    if model.config.num_labels == 1 or kind == "regression":
        raise UserError("this model gives a text a number (regression), not a label; fine-tune it for labels")
    if kind == "multi_label_classification":
        raise UserError(
            "this model gives a text any number of labels (multi_label_classification), and here a text has "
            "one; fine-tune it for that"
        )


def _reader_of(model: Any) -> type[Reader]:
    if writes(model):
        return Targets
    readers = {"SequenceClassification": Labels, "TokenClassification": Tags, "QuestionAnswering": Answers}
    for kind, reader in readers.items():
        if kind in type(model).__name__:
            return reader
    raise UserError(f"{type(model).__name__} predicts nothing of texts; `oelm generate` lets a model write")
