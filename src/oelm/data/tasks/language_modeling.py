"""Language modelling: documents become one stream of tokens per split, with bounded memory.

A stream starts with the boundary token, so that the first token of text is predicted like any other. If rows
are documents, each ends with the boundary. Boundaries count no bytes. In a stream of lines (WikiText) an
article starts at its title, a line such as " = Title = " between empty ones. Nothing is put between articles.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.audit import unwrap
from oelm.data.assemble import PADDED, Array, Batch, Layout, Windows
from oelm.data.batches import Plan
from oelm.data.dataset import HOLD_OUT_SEED, Dataset, check_values
from oelm.data.preparation import Lengths, split_chunks
from oelm.data.shuffle import shuffle_keys, text_key
from oelm.data.store import IGNORE, Split, Store, count_tokens
from oelm.data.tasks.base import Baselines, Columns, Measured, Objective, Splits, TaskKind
from oelm.data.tokenizer import Encoder, boundary_id
from oelm.data.writer import SplitWriter, split_writers
from oelm.errors import UserError
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.system.progress import Display

PIECE = 1 << 16  # characters tokenised as one string
BLOCK = 1 << 20  # characters passed to the tokenizer at once, which bounds memory
TITLE = re.compile(r" = (?!= ).* = \n")  # of an article of WikiText; " = = Section = = " has more signs


class LanguageObjective(Objective):
    @cached_property
    def windows(self) -> dict[str, Windows]:
        splits = self.store.splits.items()
        return {name: Windows(split, self.window, whole=name == "train") for name, split in splits}

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        return Plan(self.windows[split].lengths, batch_size, batch_tokens, seed)

    def ids(self, split: str, items: Array) -> Array:
        return items

    def groups(self, split: str) -> Array:
        return self.windows[split].groups()

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        return self.windows[split].batch(items)

    def count(self, split: str, items: Array) -> int:
        return self.windows[split].count(items)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch, "sum", self.label_smoothing)

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        losses = self._loss(model, batch, "none", 0.0).double()
        return losses.sum(), {
            "scores": losses.sum(1),  # nats per window
            "tokens": (batch.targets["labels"] != IGNORE).sum(1),
        }

    def _loss(self, model: nn.Module, batch: Batch, reduction: str, smoothing: float) -> Tensor:
        """The summed loss or, with reduction "none" and for evaluation only, every token's loss (B, T)."""
        inputs, targets = batch.inputs | {"use_cache": False}, batch.targets["labels"]
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        if isinstance(unwrap(model), OelmGPTForCausalLM):
            return model(**inputs, shift_labels=targets, skip_logits=True, **options).loss
        # Other models may scale or cap their logits, so these are computed in full.
        logits = model(**inputs).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, **options)
        return loss.view_as(targets) if reduction == "none" else loss

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        return Measured(language_metrics(loss_sum, count, self.store[split].bytes), arrays)


class LanguageModeling(TaskKind):
    name = "lm"
    does = "continue texts (language modelling)"
    auto_class = "AutoModelForCausalLM"
    metrics = {"perplexity": False, "bits_per_byte": False, "loss": False}
    metric = "perplexity"
    objective = LanguageObjective
    stream = True
    predicts_tokens = True

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        if text_pair or label != "label":
            other = "text_pair" if text_pair else "label"
            raise UserError(f"a language model reads one column of texts; leave out {other}")
        return {"text": text}

    def read_file(self, dataset: Dataset, splits: int) -> None:
        source = dataset.parts[0].source
        if (rows := int((dataset.parts[0].split == 0).sum())) < splits:
            count = f"{rows} document{'s' * (rows != 1)}"
            raise UserError(
                f"{source.name} has {count} with text; at least {splits} are needed, one for each split: "
                "separate documents by blank lines, or put each into a .txt file of one folder"
            )

    def lengths(self, lengths: Lengths) -> dict[str, int]:
        return {}

    def training_texts(self, dataset: Dataset, show: bool) -> Iterator[str]:
        return (text for split, text in documents(dataset) if split == "train")

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """Columns: tokens, and documents (the start of each; in a stream of lines, of each article)."""
        encoder = Encoder(tokenizer, max_length=1 << 30)
        boundary = boundary_id(tokenizer)
        dtypes = {"tokens": encoder.dtype, "documents": np.uint64}
        with split_writers(folder, dict.fromkeys(dataset.splits, dtypes)) as writers:
            streams = {
                split: _Stream(writer, encoder, boundary, dataset.separate)
                for split, writer in writers.items()
            }
            with contextlib.closing(Display(f"tokenising {dataset.name}", None, 0, show, "row")) as display:
                for row, (split, text) in enumerate(documents(dataset), 1):
                    streams[split].add(text)
                    display.advance(row)
            splits = {split: stream.close() for split, stream in streams.items()}
        for split, meta in splits.items():
            if not meta["bytes"]:
                raise UserError(
                    f"{dataset.name}: the {split} split is empty; nothing can be trained or measured"
                )
        return splits

    @torch.no_grad()
    def fit_model(self, model: Any, store: Store, name: str) -> None:
        """Refuse a model that is not causal, whose perplexity would be meaningless as it sees the tokens to
        predict: with two texts that differ only in their last token, earlier logits must be equal."""
        if isinstance(model, OelmGPTForCausalLM):
            return
        training = model.training
        ids = torch.tensor([[2, 3, 4, 5], [2, 3, 4, 3]])
        before = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1]
        model.train(training)
        if not torch.allclose(before[0], before[1], rtol=1e-5, atol=1e-6):
            raise UserError(
                f"{name} sees the tokens that follow, so it cannot learn to predict them: a language model "
                "must be causal, such as GPT-2, Llama or a gpt- size"
            )

    def check_model(self, model: Any, name: str, task: str) -> None:
        check_language_model(model, "a corpus")

    def trivial_baselines(self, store: Store, splits: list[Split]) -> Baselines:
        """`unigram`, smoothed by adding one. It is measured on the tokens that `Windows(split, size,
        whole=False)` predicts for any size: all but the boundary at the start of the stream."""
        train, vocabulary = store["train"].tokens[1:], store.vocab_size
        scores = {split.name: unigram(train, split.tokens[1:], vocabulary, split.bytes) for split in splits}
        return {"unigram": scores}


KIND = LanguageModeling()


def language_metrics(nll_sum: float, tokens: int, num_bytes: int) -> dict[str, float]:
    """Mean loss in nats, perplexity and bits per byte of `tokens` predictions that cover `num_bytes` of text.
    The perplexity is inf if it overflows a float (a loss above 709)."""
    loss = float(nll_sum) / tokens
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": float(nll_sum) / math.log(2) / num_bytes}


def check_language_model(model: Any, option: str) -> None:
    """Refuse a model that does not predict the next token."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise UserError(f"{option} is for language models; a {type(model).__name__} does not continue texts")


def unigram(train: Array, tokens: Array, vocabulary: int, num_bytes: int) -> dict[str, float]:
    """The metrics of predicting tokens by their frequency in train, smoothed by adding one."""
    train_counts, counts = count_tokens(train, vocabulary), count_tokens(tokens, vocabulary)
    nats = np.log(float(train_counts.sum() + len(train_counts))) - np.log(train_counts + 1.0)
    return language_metrics(float(counts @ nats), int(counts.sum()), num_bytes)


def documents(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """(split, text) for every row that is not empty. Documents of a catalogued task are held out by their
    text alone; those of a user's file are assigned to splits already."""
    if "split" in vars(dataset.parts[0]):
        for rows in split_chunks(dataset, show=False):
            yield from ((rows.split, text) for text in rows.columns["text"])
        return
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
    """A text in parts of at most `size` characters, cut before a space that starts a word: byte-level BPE
    never merges across such a space, so the cut changes no token."""
    start = 0
    while len(text) - start > size:
        cut = start + size
        while (cut := text.rfind(" ", start + 1, cut)) > 0:
            if not text[cut - 1].isspace() and not text[cut + 1].isspace():
                break
        if cut <= start:
            cut = start + size  # there is no such space
        yield text[start:cut]
        start = cut
    yield text[start:]


class _Stream:
    """One split's stream: collects pieces and writes a block of them at a time."""

    def __init__(self, writer: SplitWriter, encoder: Encoder, boundary: int, separate: bool) -> None:
        self.writer, self.encoder, self.separate = writer, encoder, separate
        self.boundary = np.array([boundary], dtype=encoder.dtype)
        self.pending: list[tuple[str, bool]] = []  # piece, and whether a document ends after it
        self.size = 0
        self.line = ""  # text of a stream that is not cut yet, as its rows are not units of text
        self.title, self.after_blank = "", True  # the last row if it may be a title, and what was before
        self.inside = False  # whether the first piece of a document is written and its last is not
        writer.append(tokens=self.boundary, documents=np.zeros(0, np.int64))

    def add(self, text: str) -> None:
        self.writer.meta["items"] += 1
        if self.separate:
            parts = list(pieces(text))
            self._extend([(part, i == len(parts) - 1) for i, part in enumerate(parts)])
            return
        if self.title:  # it is one if this row is empty, too
            if text.isspace() and self.line.strip():
                self._end_article()
            self.line += self.title
        self.title = text if self.after_blank and TITLE.fullmatch(text) else ""
        self.after_blank = text.isspace()
        self.line += "" if self.title else text
        if len(self.line) > 2 * PIECE:
            *parts, self.line = pieces(self.line)
            self._extend([(part, False) for part in parts])

    def _end_article(self) -> None:
        """Cut a stream where another article starts. Byte-level BPE joins the space before a word or a sign
        to it, and not to the line before, so the cut changes no token."""
        parts = list(pieces(self.line))
        self._extend([(part, i == len(parts) - 1) for i, part in enumerate(parts)])
        self.line = ""

    def _extend(self, parts: list[tuple[str, bool]]) -> None:
        self.pending += parts
        self.size += sum(len(part) for part, _ in parts)
        if self.size >= BLOCK:
            self._write()

    def _write(self) -> None:
        size = sum(len(part.encode()) for part, _ in self.pending)
        arrays: list[np.ndarray] = []
        starts: list[int] = []
        position = self.writer.meta["tokens"]
        tokens = self.encoder.ids([part for part, _ in self.pending])
        for ids, (_, ends) in zip(tokens, self.pending, strict=True):
            if not self.inside:
                starts.append(position)
            arrays.append(np.array(ids, dtype=self.encoder.dtype))
            position += len(ids)
            if ends and self.separate:
                arrays.append(self.boundary)
                position += 1
            self.inside = not ends
        if arrays:
            self.writer.append(
                bytes=size, tokens=np.concatenate(arrays), documents=np.array(starts, np.int64)
            )
        self.pending, self.size = [], 0

    def close(self) -> dict[str, Any]:
        if last := self.line + self.title:
            self._extend([(part, False) for part in pieces(last)])
        self._write()
        return self.writer.close()
