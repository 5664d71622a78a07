"""Regression: texts or pairs of texts with one real number each.

A model learns the numbers standardised by the mean and the standard deviation of the train split, which its
config keeps (`label_mean`, `label_std`), so that predictions and RMSE are in the user's units.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.audit import unwrap
from oelm.data.catalogue import Task
from oelm.data.dataset import Dataset, Part
from oelm.data.files import Chunk
from oelm.data.store import Split, Store
from oelm.data.tasks.base import (
    PADDED,
    Array,
    Baselines,
    Batch,
    Columns,
    Layout,
    Lengths,
    Measured,
    Objective,
    Splits,
    TaskKind,
    TextReader,
    check_lengths,
)
from oelm.data.tasks.classification import gives_numbers, label_columns, write_texts
from oelm.data.trivial_baselines import MOST_WEIGHTS, StoreTexts, have_sklearn, tfidf_baseline
from oelm.errors import UserError
from oelm.models.fit import agree_on_padding


class RegressionObjective(Objective):
    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        padded = self.padded(split, items, layout)
        labels = torch.from_numpy(np.array(self.store[split].column("values")[items]))
        return Batch(padded.ids, padded.inputs(), {"labels": labels}, self.tokens(split, items))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)[0]

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        loss, logits = self._loss(model, batch)
        mean, std = scale_of(model)
        predictions = logits.double() * std + mean
        return loss, {
            "labels": batch.targets["labels"].cpu().numpy(),
            "predictions": predictions.cpu().numpy(),
        }

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(**batch.inputs).logits.float().squeeze(-1)
        return F.mse_loss(logits, standardised(model, batch), reduction="sum"), logits

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        scores = regression_metrics(arrays["labels"], arrays["predictions"])
        return Measured({"loss": loss_sum / count, **scores}, arrays)


def scale_of(model: nn.Module) -> tuple[float, float]:
    """Mean and standard deviation of the labels a model was trained on; a checkpoint without them has learned
    the labels as they are."""
    config: Any = unwrap(model).config
    return float(getattr(config, "label_mean", 0.0)), float(getattr(config, "label_std", 1.0))


def standardised(model: nn.Module, batch: Batch) -> Tensor:
    """The labels of a batch as the model learns them."""
    mean, std = scale_of(model)
    return ((batch.targets["labels"] - mean) / std).float()


class NumberReader(TextReader):
    """The number of a text, or of a pair."""

    says = ("value",)

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(model, tokenizer, max_length)
        if (count := model.config.num_labels) != 1:
            raise UserError(f"this model gives a text {count} numbers (regression), and here a text has one")

    @torch.no_grad()
    def answers(self, lines: list[str]) -> Iterator[dict[str, Any]]:
        mean, std = scale_of(self.model)
        for value in self.logits(lines).squeeze(-1).tolist():
            yield {"value": value * std + mean}


class Regression(TaskKind):
    name = "regression"
    does = "give a text a number"
    auto_class = "AutoModelForSequenceClassification"
    metrics = {"rmse": False, "pearson": True, "loss": False}
    metric = "rmse"
    objective = RegressionObjective
    reader = NumberReader
    smooths = False

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        return label_columns(text, text_pair, label)

    def read_task(self, dataset: Dataset, task: Task) -> None:
        self.read_file(dataset, 0)

    def read_file(self, dataset: Dataset, splits: int) -> None:
        for part in dataset.parts:
            _numbers(part, range(len(part.values)), part.values)

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        """The numbers are the column `values`; a split's metadata has their mean, deviation and range."""
        written: dict[str, list[Array]] = {}

        def labels_of(split: str, part: Part, rows: Array, chunk: Chunk) -> Array:
            values = _numbers(part, rows.tolist(), chunk["label"])
            written.setdefault(split, []).append(values)
            return values

        splits = write_texts(
            dataset, tokenizer, folder, lengths.text, show, {"values": np.float64}, labels_of
        )
        for split, parts in written.items():
            values = np.concatenate(parts)
            summary = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
            splits[split] |= {f"label_{name}": float(value) for name, value in summary.items()}
        if not splits["train"]["label_std"] > 0:
            raise UserError(
                f"{dataset.name}: all training texts have the same label; there is nothing to learn"
            )
        return splits

    def config_fields(self, store: Store) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        agree_on_padding(model, store.tokenizer())
        model.config.problem_type = "regression"
        for key in ("label_mean", "label_std"):
            setattr(model.config, key, store["train"].meta[key])

    def check_model(self, model: Any, name: str, task: str) -> None:
        super().check_model(model, name, task)
        if not self.fits(model):
            raise UserError(
                f"{name} does not give a text a number, which {task} asks for; fine-tune it for that"
            )

    def trivial_baselines(self, store: Store, splits: list[Split]) -> tuple[Baselines, bool]:
        """`mean` of the training labels, and `tfidf_ridge` (TF-IDF of words and pairs of words, ridge
        regression, alpha = 1)."""

        def scores(split: Split, predictions: Array) -> dict[str, Any]:
            return regression_metrics(split.column("values"), predictions)

        mean = store["train"].meta["label_mean"]
        found: Baselines = {
            "mean": {split.name: scores(split, np.full(len(split), mean)) for split in splits}
        }
        if not have_sklearn():
            return found, False
        from sklearn.linear_model import Ridge

        labels, model = np.array(store["train"].column("values")), Ridge(alpha=1.0, random_state=0)
        ridge = tfidf_baseline(store, splits, StoreTexts(store), False, labels, model, MOST_WEIGHTS, scores)
        return found | ({"tfidf_ridge": ridge} if ridge else {}), True

    def fits(self, model: Any) -> bool:
        return super().fits(model) and gives_numbers(model)


KIND = Regression()


def regression_metrics(labels: Any, predictions: Any) -> dict[str, float]:
    """The root of the mean squared error and Pearson's correlation; 0 where one side is constant."""
    truth, predicted = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    check_lengths(len(truth), len(predicted))
    a, b = truth - truth.mean(), predicted - predicted.mean()
    varies = np.ptp(truth) > 0 and np.ptp(predicted) > 0  # the mean of equal numbers may be off by a rounding
    return {
        "rmse": math.sqrt(float(((truth - predicted) ** 2).mean())),
        "pearson": float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) if varies else 0.0,
    }


def _numbers(part: Part, rows: Any, values: list[Any]) -> Array:
    """The labels of some rows as numbers; what is none is refused with its row."""
    numbers = np.empty(len(values))
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        try:
            numbers[place] = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            numbers[place] = math.nan
        if not math.isfinite(numbers[place]):
            raise UserError(
                f"{part.source.where(row)}: label {str(value)[:40]!r} in column {part.columns['label']!r} is "
                "not a number, as regression needs; correct it or remove the row"
            )
    return numbers
