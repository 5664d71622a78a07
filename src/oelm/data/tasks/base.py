"""The base classes of task kinds: how data is read and prepared, what is learned, how it is measured, and how
a trained model answers lines of text. One kind is one module beside this one (docs/extending.md).

A loss is returned as a *sum* over what is counted (texts, target tokens), so that the training loop can
divide by the count of the whole global batch, whatever the number of processes and accumulation steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oelm.data.assemble import PADDED, Array, Batch, Layout, packed_inputs, pad_rows, padded_batch
from oelm.data.batches import Plan, ranges
from oelm.data.catalogue import Task
from oelm.data.dataset import Dataset
from oelm.data.preparation import Lengths, split_chunks
from oelm.data.store import Split, Store
from oelm.data.tasks import task_kind
from oelm.data.tokenizer import Encoder, pad_id
from oelm.errors import UserError
from oelm.models.fit import takes_segments
from oelm.system.private_transformers import has_model_for

Baselines = dict[str, dict[str, dict[str, Any]]]  # name -> split -> metrics
Splits = dict[str, dict[str, Any]]  # split -> metadata
Columns = dict[str, str]  # role -> column


@dataclass
class Measured:
    """The result of one evaluation. `arrays` go into predictions.npz."""

    metrics: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)


class Objective(ABC):
    """The objective on a prepared dataset: batches, loss, evaluation."""

    def __init__(
        self, store: Store, window: int = 0, label_smoothing: float = 0.0, class_weights: str = "none"
    ) -> None:
        self.store, self.window = store, window
        self.label_smoothing, self.class_weights = label_smoothing, class_weights
        if class_weights == "balanced" and not self.kind.class_labels:
            raise UserError(f"class weights are for classification, not for {store.kind}")
        if label_smoothing and not self.kind.smooths:
            raise UserError(f"label smoothing is not for {store.kind}: leave training.label_smoothing at 0")

    @property
    def kind(self) -> "TaskKind":
        return task_kind(self.store.kind)

    @property
    def metric(self) -> str:
        return self.store.metric

    def better(self, new: float, old: float) -> bool:
        return new > old if self.kind.metrics[self.metric] else new < old

    def plan(self, split: str, batch_size: int | None, batch_tokens: int | None, seed: int | None) -> Plan:
        return Plan(self.store[split].lengths, batch_size, batch_tokens, seed)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        """The items, padded; `layout.packed` is set only for a kind that is `packable`."""
        widest = self.store.max_length if layout.round_widths and split == "train" else None
        batch = padded_batch(self.store[split], items, self.store.pad_id, widest)
        if not layout.segments:
            batch.inputs.pop("token_type_ids", None)
        return batch

    def ids(self, split: str, items: Array) -> Array:
        """The items' ids in records: the numbers of their rows."""
        return self.store[split].ids[items]

    def groups(self, split: str) -> Array:
        """One number per item: items with the same number belong together."""
        return self.store[split].groups

    def count(self, split: str, items: Array) -> int:
        """The number of texts or target tokens that the loss of these items sums over."""
        return len(items)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        """The loss, and the values per item that `measure` needs, along the first axis. Tensors stay on their
        device: `evaluate` reads them after the last batch, so that it never waits for the GPU in between."""

    @abstractmethod
    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured: ...

    def majority(self, split: str) -> float | None:
        """The accuracy of always predicting the most frequent training class; None without classes."""
        return None


@dataclass
class Items:
    """Encoded lines: one item for each line, or several for a line with a long document."""

    tokens: Array  # of all items, end to end
    lengths: Array  # (items,)
    template: int  # special tokens of an item; an item with no others is empty
    cut: int = 0  # lines that were longer than the model's maximum
    second: Array | None = None  # (items,) where the second segment begins
    line: Array | None = None  # (items,) the number of the item's line, ascending; None: one item per line
    more: dict[str, Any] = field(default_factory=dict)  # further values for `Reader.answer`


class Reader(ABC):
    """A trained model and its tokenizer, answering lines of text: `encode` (by another thread, while the
    model computes), then `outputs` of batches of similar length, then `answer` for each line."""

    says: tuple[str, ...]  # the keys of its answers
    compared: str | None = None  # the key that is compared with a row's label
    reads: tuple[str, ...] = ("text",)  # the columns of a line: a text, or two with a tab between
    packable = False  # the reference GPT can read its items packed end to end
    vocabulary = 0  # logits per token, for models that predict tokens; 0 for others

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.encoder = Encoder(tokenizer, max_length)
        self.pad_id = pad_id(tokenizer)

    def problem(self, line: str) -> str:
        """Why a line cannot be read; empty if it can."""
        return ""

    def encode(self, lines: list[str]) -> Items:
        """The lines as items; here every line is a text."""
        tokens, lengths, cut = self.encoder.texts(lines)
        return Items(tokens, lengths, sum(map(len, self.encoder.single)), cut)

    @abstractmethod
    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        """Tensors or lists with an entry per item of a batch; `second` as in `Items`, of the batch."""

    @abstractmethod
    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        """The answer to a line. `mine` are the indices of its items, `said` the entries of `outputs` for
        each of them."""

    def batch(self, items: Items, chosen: Array, packed: bool = False) -> Batch:
        """A batch of the chosen items, padded or, if `packed`, end to end."""
        starts = np.cumsum(items.lengths) - items.lengths
        lengths = items.lengths[chosen]
        tokens = items.tokens[ranges(starts[chosen], lengths)]
        batch = Batch(chosen, {}, {}, len(tokens))
        if packed:
            return replace(batch, inputs=packed_inputs(tokens, lengths), longest=int(lengths.max()))
        ids, real = pad_rows(tokens, lengths, self.pad_id)
        arrays = {"input_ids": ids, "attention_mask": real}
        if items.second is not None and self.encoder.typed and takes_segments(self.model):
            arrays["token_type_ids"] = (np.arange(real.shape[1]) >= items.second[chosen][:, None]) & real
        batch.inputs |= {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
        return batch


def pair_fault(halves: list[str]) -> str:
    """What is wrong with a line that should be two texts; empty if nothing is."""
    if len(halves) != 2:
        return f"are {len(halves) - 1} tabs" if len(halves) > 2 else "is no tab"
    missing = [where for half, where in zip(halves, ("before", "after"), strict=True) if not half.strip()]
    return f"nothing stands {missing[0]} the tab" if missing else ""


class TaskKind(ABC):
    """One kind of task. Its attributes describe it; its methods are listed in the order of their calls."""

    name: str  # in prepared datasets, configs and the catalogue
    does: str  # a verb phrase for messages, such as "classify texts"
    auto_class: str  # the transformers Auto class of its models
    metrics: Mapping[str, bool]  # metric -> whether larger is better
    metric: str  # the one that decides, for a user's file
    objective: type[Objective]
    reader: type[Reader] | None = None  # answers lines of text; None: `oelm predict` is not supported

    class_labels = False  # every text has one class: class weights, chance level, zero-shot
    stream = False  # a corpus: one stream of tokens, cut into windows of max_length when it is read
    by_source = False  # an item needs all its texts, and items with the same first text stay in one split
    writes = False  # models generate a target for a source; equal sources count as duplicates
    predicts_tokens = False  # the logits are over the vocabulary
    smooths = True  # its labels can be smoothed
    packable = False  # the reference GPT can read its texts packed end to end

    # Reading: rows are checked, then assigned to splits. B027: a kind need not override empty methods.

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        """Role -> column of a user's file, from the columns that the user named."""
        raise UserError(f"a user's file cannot be read as {self.name}; use a task: oelm data list")

    def item_texts(self, row: dict[str, Any]) -> tuple[str, ...]:
        """The texts that identify an item, first the one that groups related items."""
        return (row["text"], row["text_pair"]) if "text_pair" in row else (row["text"],)

    def read_task(self, dataset: Dataset, task: Task) -> None:  # noqa: B027
        """Read the labels of a catalogued task."""

    def read_file(self, dataset: Dataset, splits: int) -> None:  # noqa: B027
        """Read the labels of a user's file, whose training rows will be divided among so many splits."""

    def check_split(self, dataset: Dataset, split: str, labels: Array) -> None:  # noqa: B027
        """Refuse a split that nothing can be learned from or measured on."""

    # Preparing: everything is tokenised once and written to the prepared dataset.

    def lengths(self, lengths: Lengths) -> dict[str, int]:
        """The lengths that affect the prepared dataset, by their names in the config."""
        return {"max_length": lengths.text}

    def training_texts(self, dataset: Dataset, show: bool) -> Iterator[str]:
        """The texts of the train split, from which a tokenizer may be trained."""
        for _, split, _, _, chunk in split_chunks(dataset, show):
            if split == "train":
                for row in zip(*chunk.values(), strict=True):
                    yield from self.item_texts(dict(zip(chunk, row, strict=True)))

    @abstractmethod
    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """Write the columns of every split; returns the splits' metadata. `write_items` does most of it."""

    # Models.

    def check_config(self, config: Any, name: str) -> None:
        """Refuse an architecture that cannot do the task, before its weights are fetched."""
        half = self.stream and config.is_encoder_decoder  # its decoder alone is not a language model
        if half or not has_model_for(self.auto_class, config):
            raise UserError(
                f"{name} is a {config.model_type}, and such a model does not {self.does}; name one of "
                "another kind with --model"
            )

    def config_fields(self, store: Store) -> dict[str, Any]:
        """Fields of the model's config: as many outputs as there are labels."""
        if not store.label_names:
            return {}
        return {
            "num_labels": len(store.label_names),
            "id2label": dict(enumerate(store.label_names)),
            "label2id": {label: i for i, label in enumerate(store.label_names)},
        }

    def fit_model(self, model: Any, store: Store, name: str) -> None:  # noqa: B027
        """Adapt a model that was built or loaded to the task, or refuse it."""

    def check_model(self, model: Any, name: str, task: str) -> None:
        """Refuse to evaluate a trained model on this kind of task."""
        if model.can_generate() and not model.config.is_encoder_decoder:
            raise UserError(
                f"{name} is a language model, and {task} has labels: fine-tune it with `oelm train --model`, "
                "or ask it with --zero-shot"
            )

    # Measuring.

    def trivial_baselines(self, store: Store, splits: list[Split]) -> Baselines:
        """Baselines learned from the train split."""
        return {}

    def item_scores(self, metric: str, arrays: Mapping[str, Array]) -> tuple[Array, Array | None] | None:
        """Scores and weights per item of this kind's own metric, which is sum(scores) / sum(weights). None
        for a metric that is not such a mean; a study cannot reach a verdict by it."""
        return None

    # Predicting.

    def fits(self, model: Any) -> bool:
        """Whether a checkpoint that does not name its kind is of this one."""
        return self.auto_class.removeprefix("AutoModelFor") in type(model).__name__
