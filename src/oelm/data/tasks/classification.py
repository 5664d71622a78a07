"""Classification: texts or pairs of texts with one class each."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.assemble import PADDED, Array, Batch, Layout, fill_to_round_sizes, packed_batch
from oelm.data.catalogue import Task
from oelm.data.dataset import DROPPED, Dataset
from oelm.data.labels import UNLABELLED, all_whole, class_names, known_labels, missing_warning, user_labels
from oelm.data.preparation import Rows
from oelm.data.store import Split, Store
from oelm.data.tasks.base import Items, Measured, Objective
from oelm.data.tasks.texts import LabelledTexts, TextReader
from oelm.errors import UserError
from oelm.system.messages import notice

MOST_STEPS = 200  # of scikit-learn's optimizer; enough for an accuracy within half a point


class ClassificationObjective(Objective):
    @cached_property
    def weights(self) -> Tensor | None:
        """The weight of each class, with mean 1 over the training texts; None if classes are not weighted."""
        if self.class_weights != "balanced":
            return None
        counts = np.array(self.store["train"].meta["class_counts"])
        return torch.tensor(counts.sum() / (len(counts) * counts), dtype=torch.float32)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        if not layout.packed:
            return super().batch(split, items, layout)
        batch = packed_batch(self.store[split], items, layout.segments)
        if layout.round_widths and split == "train":
            batch = fill_to_round_sizes(batch, self.store.max_length, self.store.pad_id)
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(**batch.arguments()).logits.float()
        weights = None if self.weights is None else self.weights.to(logits.device)
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing, "reduction": "sum"}
        return F.cross_entropy(logits, batch.targets["labels"], weight=weights, **options)

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | Array]]:
        logits = model(**batch.arguments()).logits.float()
        labels = batch.targets["labels"]
        # Measured without smoothing and weights, so that losses of different recipes compare.
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, {"labels": labels, "scores": logits.softmax(-1)}

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        predictions = arrays["scores"].argmax(-1)
        scores = classification_metrics(arrays["labels"], predictions, len(self.store.label_names))
        return Measured({"loss": loss_sum / count, **scores}, arrays | {"predictions": predictions})

    def majority(self, split: str) -> float:
        most = int(np.argmax(self.store["train"].meta["class_counts"]))
        return self.store[split].meta["class_counts"][most] / len(self.store[split])


class LabelReader(TextReader):
    """The most likely label of a text or a pair, its probability, and the probabilities of all labels."""

    says = ("label", "score", "scores")
    compared = "label"

    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        (logits,) = super().outputs(inputs, second)
        return (logits.softmax(-1),)

    def answer(self, line: str, items: Items, mine: range, said: list[Any]) -> dict[str, Any]:
        ((row,),) = said
        names, best = self.model.config.id2label, int(row.argmax())
        scores = {names[i]: value for i, value in enumerate(row.tolist())}
        return {"label": names[best], "score": float(row[best]), "scores": scores}


class Classification(LabelledTexts):
    name = "classification"
    does = "classify texts"
    metrics = {"accuracy": True, "f1_macro": True, "f1_weighted": True, "loss": False}
    metric = "accuracy"
    objective = ClassificationObjective
    reader = LabelReader
    class_labels = True
    packable = True
    column = "labels"

    def read_task(self, dataset: Dataset, task: Task) -> None:
        """-1 means unlabelled: dropped and counted where the task says so, refused otherwise."""
        for part in dataset.parts:
            part.labels = known_labels(part.values, tuple(task.labels or ()), part.source)
            unlabelled = part.labels == UNLABELLED
            if unlabelled.any() and not task.drop_unlabelled:
                where = part.source.where(int(np.flatnonzero(unlabelled)[0]))
                raise UserError(f"{where}: label -1 means unlabelled, and {task.name} has labels")
            dataset.drop(part, unlabelled, "unlabelled")
            part.labels[unlabelled] = 0

    def read_file(self, dataset: Dataset, splits: int) -> None:
        """Classes from the training file; a label that only the test file has is refused."""
        train, column = dataset.parts[0], dataset.parts[0].columns["label"]
        names = user_labels(train.values, train.source, column)
        kept = [name for name, code in zip(names, train.split, strict=True) if code != DROPPED]
        classes = class_names(kept, train.source, column)
        if len(classes) < 2:
            raise UserError(
                f"{train.source.name}: column {column!r} holds only {classes[0] if classes else None!r}; "
                "a classifier needs at least two classes"
                + (" (-1 marks hidden labels in GLUE's test splits)" if classes == ["-1"] else "")
            )
        dataset.label_names = classes
        number = {name: i for i, name in enumerate(classes)}
        used: list[str] = []
        named = not all_whole(names)  # then labels of the test file are names, too, even if they are numbers
        for part in dataset.parts:
            labels = names if part is train else user_labels(part.values, part.source, column, named)
            for row, name in enumerate(labels):
                if name not in number and part.split[row] != DROPPED:
                    hidden = " (-1 marks hidden labels, as in GLUE's test splits)" if name == "-1" else ""
                    raise UserError(
                        f"{part.source.where(row)}: no training text has the label {name!r}{hidden}; "
                        f"known: {', '.join(classes[:20])}"
                    )
            part.labels = np.array([number.get(name, 0) for name in labels], dtype=np.int64)
            used += [name for name, code in zip(labels, part.split, strict=True) if code != DROPPED]
        if warning := missing_warning(used):
            dataset.warnings.append(warning)
        counts = np.bincount(train.labels[train.split != DROPPED], minlength=len(classes))
        for name, count in zip(classes, counts.tolist(), strict=True):
            if count < splits:
                raise UserError(
                    f"{train.source.name}: label {name!r} has {count} row{'s' * (count != 1)}; at least "
                    f"{splits} are needed so that every split has one. Add rows, or remove that class"
                )

    def check_split(self, dataset: Dataset, split: str, labels: Array) -> None:
        missing = set(range(len(dataset.label_names))) - set(labels.tolist())
        names = [dataset.label_names[i] for i in sorted(missing)]
        if missing and split == "train":
            raise UserError(f"{dataset.name}: no training text has the label {', '.join(names)}")
        if missing:
            dataset.warnings.append(notice("data.no_label", split=split, labels=names))

    def labels(self, rows: Rows) -> Array:
        return rows.part.labels[rows.numbers]

    def dtype(self, dataset: Dataset) -> Any:
        return np.uint8 if len(dataset.label_names) <= 1 << 8 else np.uint32

    def summary(self, dataset: Dataset, split: str, labels: Array) -> dict[str, Any]:
        return {"class_counts": np.bincount(labels, minlength=len(dataset.label_names)).tolist()}

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        super().fit_model(model, store, name)
        if model.config.problem_type is not None:  # set for another task before
            model.config.problem_type = "single_label_classification"

    def scores(self, store: Store, split: Split, predictions: Array) -> dict[str, Any]:
        scores = classification_metrics(split.labels, predictions, len(store.label_names))
        del scores["confusion"]
        return scores

    def constant(self, store: Store) -> tuple[str, float]:
        return "majority", int(np.argmax(store["train"].meta["class_counts"]))

    def linear_models(self, store: Store) -> dict[str, Any]:
        from sklearn.linear_model import LogisticRegression

        names = ["tfidf_logreg", *(["premise_blind"] if store.meta["pairs"] else [])]
        return {name: LogisticRegression(C=8.0, max_iter=MOST_STEPS) for name in names}


KIND = Classification()


def classification_metrics(labels: Any, predictions: Any, num_classes: int) -> dict[str, Any]:
    """Accuracy, F1 and the confusion matrix (rows = truth). All `num_classes` classes count for `f1_macro`;
    one that is neither present nor predicted has F1 = 0."""
    truth, predicted = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    confusion = np.bincount(truth * num_classes + predicted, minlength=num_classes**2)
    confusion = confusion.reshape(num_classes, num_classes)
    right, support = np.diag(confusion), confusion.sum(axis=1)
    f1 = 2 * right / np.maximum(support + confusion.sum(axis=0), 1)  # = 2 tp / (2 tp + fp + fn)
    return {
        "accuracy": float(right.sum() / len(truth)),
        "f1_macro": float(f1.mean()),
        "f1_weighted": float((f1 * support).sum() / len(truth)),
        "confusion": confusion.tolist(),
    }
