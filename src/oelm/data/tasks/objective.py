"""What is learned and how it is measured, for each kind of task: batches, loss, evaluation.

A loss is returned as a *sum* over what counts (texts, target tokens) so that the training loop can divide
by the count of the whole global batch, whatever the number of processes and accumulation steps.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.audit import unwrap
from oelm.data import (
    IGNORE,
    Padded,
    Plan,
    Store,
    Windows,
    answer_text,
    packed_batch,
    padded_batch,
    read_references,
)
from oelm.data.assemble import Layout, Packing, filled
from oelm.data.batches import ranges
from oelm.data.read_ahead import read_ahead
from oelm.data.tasks import metrics
from oelm.errors import UserError
from oelm.models.gpt import OelmGPTForCausalLM

Array = np.ndarray
PADDED = Layout()


@dataclass
class Batch:
    """One process's share of a batch."""

    ids: Array
    inputs: dict[str, Tensor]
    targets: dict[str, Tensor]
    tokens: int  # real ones, padding not counted

    longest: int | None = None  # of texts end to end; None: padded, or windows

    def to(self, device: torch.device) -> "Batch":
        move = lambda tensors: {  # noqa: E731
            k: pinned(v, device).to(device, non_blocking=True) for k, v in tensors.items()
        }
        return replace(self, inputs=move(self.inputs), targets=move(self.targets))

    def arguments(self) -> dict[str, Any]:
        """What the model is called with."""
        if self.longest is None:
            return dict(self.inputs)
        inputs = dict(self.inputs)
        return inputs | {"packing": Packing(inputs.pop("bounds"), self.longest)}


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor where a GPU can fetch it by itself, beside its computation; as it is for a CPU."""
    if device.type != "cuda":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(staged.numpy(), tensor.numpy())  # by one thread: torch would start them all and wait
    return staged


@dataclass
class Measured:
    """What one evaluation found. `arrays` go into predictions.npz."""

    metrics: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)


class Objective(ABC):
    """One kind of task. A subclass says what a batch is, what the loss is, and what to make of outputs."""

    auto_class: str  # the transformers Auto class of its models

    def __init__(self, store: Store, label_smoothing: float = 0.0, class_weights: str = "none") -> None:
        self.store, self.label_smoothing = store, label_smoothing
        self.weights: Tensor | None = None
        if class_weights == "balanced":
            raise UserError(f"class weights are for classification, not for {store.kind}")

    @property
    def metric(self) -> str:
        return self.store.metric

    def better(self, new: float, old: float) -> bool:
        return new < old if self.metric in metrics.LOWER_IS_BETTER else new > old

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        return Plan(self.store[split].lengths, batch_size, batch_tokens, seed)

    @abstractmethod
    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch: ...

    def padded(self, split: str, items: Array, layout: Layout) -> Padded:
        widest = self.store.max_length if layout.round_widths and split == "train" else None
        batch = padded_batch(self.store[split], items, self.store.pad_id, widest)
        return batch if layout.segments else replace(batch, token_type_ids=None)

    def groups(self, split: str) -> Array | None:
        """One number per item: items with the same number belong together. None where nobody noted it."""
        return self.store[split].groups

    def expect(self, split: str, items: Array) -> None:
        """Have the tokens of these items read from the disk before they are asked for."""
        offsets = self.store[split].offsets
        read_ahead(self.store[split].tokens, offsets[items], offsets[items + 1])

    def count(self, split: str, items: Array) -> int:
        """How many texts or target tokens the loss of these items sums over."""
        return len(items)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        """The loss, and per item whatever `measure` needs, as arrays whose first axis is the items."""

    @abstractmethod
    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured: ...

    def majority(self, split: str) -> float | None:
        """The score of always answering the most frequent training class, where there are classes."""
        return None


class Classification(Objective):
    auto_class = "AutoModelForSequenceClassification"

    def __init__(self, store: Store, label_smoothing: float = 0.0, class_weights: str = "none") -> None:
        super().__init__(store, label_smoothing)
        counts = np.array(store["train"].meta["class_counts"])
        if class_weights == "balanced":  # mean 1 over the training texts
            self.weights = torch.tensor(counts.sum() / (len(counts) * counts), dtype=torch.float32)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        tokens = int(self.store[split].lengths[items].sum())
        if layout.packed:
            return self._packed_batch(split, items, tokens, layout)
        padded = self.padded(split, items, layout)
        assert padded.labels is not None
        return Batch(padded.ids, padded.inputs(), {"labels": padded.labels}, tokens)

    def _packed_batch(self, split: str, items: Array, tokens: int, layout: Layout) -> Batch:
        batch = packed_batch(self.store[split], items)
        if layout.round_widths and split == "train":
            batch = filled(batch, self.store.max_length, self.store.pad_id)
        assert batch.labels is not None
        inputs = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
            "bounds": batch.cu_seqlens,
        }
        return Batch(batch.ids, inputs, {"labels": batch.labels}, tokens, batch.longest)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch.arguments()).logits.float()
        return self._loss(logits, batch.targets["labels"])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights.to(logits.device)
        return F.cross_entropy(
            logits, labels, weight=weights, label_smoothing=self.label_smoothing, reduction="sum"
        )

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        logits = model(**batch.arguments()).logits.float()
        labels = batch.targets["labels"]
        # Measured without smoothing and weights, so that losses of different recipes compare.
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, {"labels": labels.cpu().numpy(), "scores": logits.softmax(-1).cpu().numpy()}

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        predictions = arrays["scores"].argmax(-1)
        found = metrics.classification(arrays["labels"], predictions, len(self.store.label_names))
        return Measured({"loss": loss_sum / count, **found}, arrays | {"predictions": predictions})

    def majority(self, split: str) -> float:
        most = int(np.argmax(self.store["train"].meta["class_counts"]))
        return self.store[split].meta["class_counts"][most] / len(self.store[split])


def token_loss(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum over the tokens that count."""
    return F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE,
        label_smoothing=smoothing,
        reduction="sum",
    )


class Language(Objective):
    auto_class = "AutoModelForCausalLM"

    def __init__(self, store: Store, window: int, label_smoothing: float = 0.0, class_weights: str = "none"):
        super().__init__(store, label_smoothing, class_weights)
        self.windows = {
            name: Windows(split, window, whole=name == "train") for name, split in store.splits.items()
        }

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        return Plan(self.windows[split].lengths, batch_size, batch_tokens, seed)

    def groups(self, split: str) -> Array | None:
        return self.windows[split].groups()

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        batch = self.windows[split].batch(items)
        inputs = {"input_ids": batch.input_ids}
        return Batch(batch.ids, inputs, {"labels": batch.targets}, self.count(split, items))

    def expect(self, split: str, items: Array) -> None:
        windows = self.windows[split]
        last = len(windows.split.tokens)
        starts = np.asarray(items) * windows.size
        read_ahead(windows.split.tokens, starts, np.minimum(starts + windows.size + 1, last))

    def count(self, split: str, items: Array) -> int:
        windows = self.windows[split]
        first = np.asarray(items) * windows.size
        return int(np.minimum(windows.size, len(windows.split.tokens) - 1 - first).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch, "sum", self.label_smoothing)

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        losses = self._loss(model, batch, "none", 0.0).double()
        return losses.sum(), {
            "scores": losses.sum(1).cpu().numpy(),  # nats per window
            "tokens": (batch.targets["labels"] != IGNORE).sum(1).cpu().numpy(),
        }

    def _loss(self, model: nn.Module, batch: Batch, reduction: str, smoothing: float) -> Tensor:
        """The sum, or with "none" every token's loss (texts, positions), to measure and not to train on."""
        inputs, targets = batch.inputs | {"use_cache": False}, batch.targets["labels"]
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        if isinstance(unwrap(model), OelmGPTForCausalLM):
            return model(**inputs, shift_labels=targets, skip_logits=True, **options).loss
        # Others may scale or cap their logits, so theirs are made.
        logits = model(**inputs).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, **options)
        return loss.view_as(targets) if reduction == "none" else loss

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        return Measured(metrics.language(loss_sum, count, self.store[split].bytes), arrays)


class Tagging(Objective):
    auto_class = "AutoModelForTokenClassification"

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        padded = self.padded(split, items, layout)
        assert padded.labels is not None
        tokens = int(self.store[split].lengths[items].sum())
        return Batch(padded.ids, padded.inputs(), {"labels": padded.labels}, tokens)

    def count(self, split: str, items: Array) -> int:
        part = self.store[split]
        places = ranges(part.offsets[items], part.lengths[items])
        return int((part.tags[places] != IGNORE).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch.inputs).logits.float()
        return token_loss(logits, batch.targets["labels"], self.label_smoothing)

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        logits = model(**batch.inputs).logits.float()
        labels = batch.targets["labels"]
        loss = token_loss(logits, labels, 0.0)
        width = int(self.store.max_length)  # one width for all batches, so that they stack
        pad = (0, width - labels.shape[1])
        return loss, {
            "labels": F.pad(labels, pad, value=IGNORE).cpu().numpy().astype(np.int16),
            "predictions": F.pad(logits.argmax(-1), pad).cpu().numpy().astype(np.int16),
        }

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        names = np.array(self.store.label_names)
        kept = arrays["labels"] != IGNORE
        truth = [names[row[keep]].tolist() for row, keep in zip(arrays["labels"], kept, strict=True)]
        guess = [names[row[keep]].tolist() for row, keep in zip(arrays["predictions"], kept, strict=True)]
        found = metrics.tagged_items(truth, guess)
        return Measured({"loss": loss_sum / count, **metrics.tagging_totals(found)}, arrays | found)


class Questions(Objective):
    auto_class = "AutoModelForQuestionAnswering"
    longest_answer = 30  # tokens

    def __init__(self, store: Store, label_smoothing: float = 0.0, class_weights: str = "none") -> None:
        if label_smoothing:
            raise UserError(
                "label smoothing is not for question answering: leave training.label_smoothing at 0"
            )
        super().__init__(store, label_smoothing, class_weights)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        padded = self.padded(split, items, layout)
        assert padded.start_positions is not None and padded.end_positions is not None
        tokens = int(self.store[split].lengths[items].sum())
        targets = {"start": padded.start_positions, "end": padded.end_positions}
        if self.store[split].has("context"):
            targets["context"] = torch.from_numpy(self.store[split].column("context")[items].astype(np.int64))
        targets["items"] = torch.from_numpy(np.asarray(items))
        return Batch(padded.ids, padded.inputs(), targets, tokens)

    def count(self, split: str, items: Array) -> int:
        return max(1, int((self.store[split].column("starts")[items] != IGNORE).sum()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model(**batch.inputs), batch)

    def _loss(self, out: Any, batch: Batch) -> Tensor:
        start = F.cross_entropy(
            out.start_logits.float(), batch.targets["start"], ignore_index=IGNORE, reduction="sum"
        )
        end = F.cross_entropy(
            out.end_logits.float(), batch.targets["end"], ignore_index=IGNORE, reduction="sum"
        )
        return (start + end) / 2

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        out = model(**batch.inputs)
        mask, context = batch.inputs["attention_mask"], batch.targets["context"]
        score, _, start, end = best_spans(out, mask, context, self.longest_answer)
        return self._loss(out, batch), {
            "items": batch.targets["items"].cpu().numpy(),
            "scores": score.cpu().numpy(),
            "starts": start.cpu().numpy(),
            "ends": end.cpu().numpy(),
        }

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        """The arrays have one entry per question from here on: of its window with the highest score."""
        part = self.store[split]
        references = read_references(part)
        best: dict[int, int] = {}
        for row, question in enumerate(arrays["ids"].tolist()):
            if question not in best or arrays["scores"][row] > arrays["scores"][best[question]]:
                best[question] = row
        answers, right = [], []
        for question, row in sorted(best.items()):
            item, start, end = (int(arrays[key][row]) for key in ("items", "starts", "ends"))
            answers.append(answer_text(part, item, start, end, references))
            right.append(references[question]["answers"])
        found = metrics.answer_scores(right, answers)
        rows = [row for _, row in sorted(best.items())]
        kept = {name: values[rows] for name, values in arrays.items()}
        return Measured({"loss": loss_sum / count, **metrics.means(found)}, kept | found)


def best_spans(
    out: Any, mask: Tensor, context: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every window the likeliest answer within the document, which begins at `context`: its score, its
    probability, its first and its last token."""
    position = torch.arange(out.start_logits.shape[1], device=out.start_logits.device)
    in_context = (position >= context[:, None]) & mask.bool()
    start = out.start_logits.float().masked_fill(~in_context, -1e9)
    end = out.end_logits.float().masked_fill(~in_context, -1e9)
    both = start[:, :, None] + end[:, None, :]
    width = position[None, :] - position[:, None]
    both = both.masked_fill((width < 0) | (width >= longest), -2e9).flatten(1)
    score, place = both.max(1)
    probability = (score - start.logsumexp(1) - end.logsumexp(1)).exp()
    return score, probability, place // start.shape[1], place % start.shape[1]


def make_objective(store: Store, window: int, label_smoothing: float, class_weights: str) -> Objective:
    """The objective of a store's kind of task."""
    from oelm.data.tasks.seq2seq import Seq2Seq

    if store.kind == "lm":
        return Language(store, window, label_smoothing, class_weights)
    kinds: dict[str, type[Objective]] = {
        "classification": Classification,
        "token-classification": Tagging,
        "question-answering": Questions,
        "seq2seq": Seq2Seq,
    }
    return kinds[store.kind](store, label_smoothing, class_weights)
