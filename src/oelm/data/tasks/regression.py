"""Regression: texts or pairs of texts with one real number each.

A model learns the numbers standardised by the mean and the standard deviation of the train split. Its config
keeps both (`label_mean`, `label_std`), so that predictions and RMSE are in the user's units.
"""

import math
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.audit import unwrap
from oelm.data.assemble import Array, Batch
from oelm.data.dataset import Dataset
from oelm.data.preparation import Rows
from oelm.data.store import Split, Store
from oelm.data.tasks.base import Items, Measured, Objective
from oelm.data.tasks.texts import LabelledTexts, TextReader
from oelm.errors import UserError


class RegressionObjective(Objective):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)[0]

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        loss, logits = self._loss(model, batch)
        mean, std = scale_of(model)
        predictions = logits.double() * std + mean
        return loss, {"labels": batch.targets["labels"], "predictions": predictions}

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(**batch.inputs).logits.float().squeeze(-1)
        mean, std = scale_of(model)
        labels = ((batch.targets["labels"] - mean) / std).float()
        return F.mse_loss(logits, labels, reduction="sum"), logits

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        scores = regression_metrics(arrays["labels"], arrays["predictions"])
        return Measured({"loss": loss_sum / count, **scores}, arrays)


def scale_of(model: nn.Module) -> tuple[float, float]:
    """Mean and standard deviation of the labels a model was trained on; (0, 1) for a checkpoint without them,
    which predicts the labels themselves."""
    config: Any = unwrap(model).config
    return float(getattr(config, "label_mean", 0.0)), float(getattr(config, "label_std", 1.0))


class NumberReader(TextReader):
    """The number predicted for a text or a pair."""

    says = ("value",)
    compared = "value"

    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        mean, std = scale_of(self.model)
        return {"value": float(said[0][0][0]) * std + mean}


class Regression(LabelledTexts):
    name = "regression"
    does = "give a text a number"
    metrics = {"rmse": False, "pearson": True, "loss": False}
    metric = "rmse"
    objective = RegressionObjective
    reader = NumberReader
    smooths = False
    column = "values"

    def read_file(self, dataset: Dataset, splits: int) -> None:
        for part in dataset.parts:
            for row, value in enumerate(part.values):
                if not math.isfinite(_number(value)):
                    raise UserError(
                        f"{part.source.where(row)}: label {str(value)[:40]!r} in column "
                        f"{part.columns['label']!r} is not a number, as regression needs; correct it or "
                        "remove the row"
                    )

    def labels(self, rows: Rows) -> Array:
        return np.array([_number(value) for value in rows.columns["label"]])

    def dtype(self, dataset: Dataset) -> Any:
        return np.float64

    def summary(self, dataset: Dataset, split: str, labels: Array) -> dict[str, Any]:
        if split == "train" and not labels.std() > 0:
            raise UserError(f"{dataset.name}: all training texts have the same label: nothing can be learned")
        names = ("mean", "std", "min", "max")
        return {f"label_{name}": float(getattr(labels, name)()) for name in names}

    def config_fields(self, store: Store) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        super().fit_model(model, store, name)
        model.config.problem_type = "regression"
        for key in ("label_mean", "label_std"):
            setattr(model.config, key, store["train"].meta[key])

    def scores(self, store: Store, split: Split, predictions: Array) -> dict[str, Any]:
        return regression_metrics(split.values, predictions)

    def constant(self, store: Store) -> tuple[str, float]:
        return "mean", store["train"].meta["label_mean"]

    def linear_models(self, store: Store) -> dict[str, Any]:
        from sklearn.linear_model import Ridge

        return {"tfidf_ridge": Ridge(alpha=1.0, random_state=0)}


KIND = Regression()


def regression_metrics(labels: Any, predictions: Any) -> dict[str, float]:
    """RMSE and Pearson's correlation, which is 0 if either side is constant."""
    truth, predicted = np.asarray(labels, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    a, b = truth - truth.mean(), predicted - predicted.mean()
    varies = np.ptp(truth) > 0 and np.ptp(predicted) > 0  # a @ a may be rounded above 0
    return {
        "rmse": math.sqrt(float(((truth - predicted) ** 2).mean())),
        "pearson": float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) if varies else 0.0,
    }


def _number(value: Any) -> float:
    """A label as a number; NaN if it is not one."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
