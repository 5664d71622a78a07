"""Classification: texts or pairs of texts with one class each."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.assemble import filled, packed_batch
from oelm.data.catalogue import Task
from oelm.data.dataset import DROPPED, SPLITS, Dataset, Part
from oelm.data.files import Chunk
from oelm.data.labels import UNLABELLED, all_whole, class_names, known_labels, missing_warning, user_labels
from oelm.data.preparation import item_dtypes, split_chunks
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
from oelm.data.tokenizer import Encoder
from oelm.data.trivial_baselines import MOST_WEIGHTS, StoreTexts, have_sklearn, tfidf_baseline
from oelm.data.writer import split_writers
from oelm.errors import UserError
from oelm.models.fit import agree_on_padding
from oelm.system.messages import notice

MOST_STEPS = 200  # of the optimizer, which stops before at its own tolerance: good to half a point


class ClassificationObjective(Objective):
    def __init__(
        self, store: Store, window: int = 0, label_smoothing: float = 0.0, class_weights: str = "none"
    ) -> None:
        super().__init__(store, window, label_smoothing, class_weights)
        self.weights: Tensor | None = None
        if class_weights == "balanced":  # mean 1 over the training texts
            counts = np.array(store["train"].meta["class_counts"])
            self.weights = torch.tensor(counts.sum() / (len(counts) * counts), dtype=torch.float32)

    def batch(self, split: str, items: Array, layout: Layout = PADDED) -> Batch:
        tokens = self.tokens(split, items)
        if layout.packed:
            return self._packed_batch(split, items, tokens, layout.round_widths)
        padded = self.padded(split, items, layout)
        assert padded.labels is not None
        return Batch(padded.ids, padded.inputs(), {"labels": padded.labels}, tokens)

    def _packed_batch(self, split: str, items: Array, tokens: int, round_widths: bool) -> Batch:
        batch = packed_batch(self.store[split], items)
        if round_widths and split == "train":
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
        weights = None if self.weights is None else self.weights.to(logits.device)
        return F.cross_entropy(
            logits,
            batch.targets["labels"],
            weight=weights,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Array]]:
        logits = model(**batch.arguments()).logits.float()
        labels = batch.targets["labels"]
        # Measured without smoothing and weights, so that losses of different recipes compare.
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, {"labels": labels.cpu().numpy(), "scores": logits.softmax(-1).cpu().numpy()}

    def measure(self, split: str, loss_sum: float, count: int, arrays: dict[str, Array]) -> Measured:
        predictions = arrays["scores"].argmax(-1)
        scores = classification_metrics(arrays["labels"], predictions, len(self.store.label_names))
        return Measured({"loss": loss_sum / count, **scores}, arrays | {"predictions": predictions})

    def majority(self, split: str) -> float:
        most = int(np.argmax(self.store["train"].meta["class_counts"]))
        return self.store[split].meta["class_counts"][most] / len(self.store[split])


class LabelReader(TextReader):
    """The most likely label of a text, or of a pair, its probability, and those of the others."""

    says = ("label", "score", "scores")

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(model, tokenizer, max_length)
        _check_one_label(model)

    @torch.no_grad()
    def answers(self, lines: list[str]) -> Iterator[dict[str, Any]]:
        names = self.model.config.id2label
        for row in self.logits(lines).softmax(-1).cpu().numpy():
            best = int(row.argmax())
            scores = {names[i]: float(value) for i, value in enumerate(row)}
            yield {"label": names[best], "score": float(row[best]), "scores": scores}


class Classification(TaskKind):
    name = "classification"
    does = "classify texts"
    auto_class = "AutoModelForSequenceClassification"
    metrics = {"accuracy": True, "f1_macro": True, "f1_weighted": True, "loss": False}
    metric = "accuracy"
    objective = ClassificationObjective
    reader = LabelReader
    class_labels = True
    packable = True

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        return label_columns(text, text_pair, label)

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
        named = not all_whole(names)  # then so are the test file's, whatever they look like
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
        _check_class_sizes(dataset, train, splits)

    def check_split(self, dataset: Dataset, split: str, labels: Array) -> None:
        missing = set(range(len(dataset.label_names))) - set(labels.tolist())
        names = [dataset.label_names[i] for i in sorted(missing)]
        if missing and split == "train":
            raise UserError(f"{dataset.name}: no training text has the label {', '.join(names)}")
        if missing:
            dataset.warnings.append(notice("data.no_label", split=split, labels=names))

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        counts = {split: np.zeros(len(dataset.label_names), dtype=np.int64) for split in SPLITS}

        def labels_of(split: str, part: Part, rows: Array, chunk: Chunk) -> Array:
            counts[split] += np.bincount(part.labels[rows], minlength=len(counts[split]))
            return part.labels[rows]

        dtype = np.uint8 if len(dataset.label_names) <= 1 << 8 else np.uint32
        written = write_texts(dataset, tokenizer, folder, lengths.text, show, {"labels": dtype}, labels_of)
        return {split: meta | {"class_counts": counts[split].tolist()} for split, meta in written.items()}

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        agree_on_padding(model, store.tokenizer())
        if model.config.problem_type is not None:  # what it was for another task
            model.config.problem_type = "single_label_classification"

    def check_model(self, model: Any, name: str, task: str) -> None:
        super().check_model(model, name, task)
        _check_one_label(model)

    def trivial_baselines(self, store: Store, splits: list[Split]) -> tuple[Baselines, bool]:
        """`majority` (the most frequent training class) and `tfidf_logreg` (TF-IDF of words and pairs of
        words, logistic regression, C = 8); for pairs also `premise_blind`, from the second text alone."""
        classes = len(store.label_names)

        def scores(split: Split, predictions: Array) -> dict[str, Any]:
            found = classification_metrics(split.labels, predictions, classes)
            del found["confusion"]
            return found

        most = int(np.bincount(store["train"].labels, minlength=classes).argmax())
        found: Baselines = {
            "majority": {split.name: scores(split, np.full(len(split), most)) for split in splits}
        }
        if not have_sklearn():
            return found, False
        from sklearn.linear_model import LogisticRegression

        texts = StoreTexts(store)
        views = {"tfidf_logreg": False} | ({"premise_blind": True} if store.meta["pairs"] else {})
        for name, blind in views.items():
            model = LogisticRegression(C=8.0, max_iter=MOST_STEPS)
            most_words = MOST_WEIGHTS // (1 if classes == 2 else classes)
            labels = store["train"].labels
            measured = tfidf_baseline(store, splits, texts, blind, labels, model, most_words, scores)
            if measured:
                found[name] = measured
        return found, True

    def fits(self, model: Any) -> bool:
        return super().fits(model) and not gives_numbers(model)


KIND = Classification()


def classification_metrics(labels: Any, predictions: Any, num_classes: int) -> dict[str, Any]:
    """Accuracy, F1 and the confusion matrix (rows = truth).

    All `num_classes` classes count for `f1_macro`; one that is neither present nor predicted has F1 = 0.
    """
    truth, predicted = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    check_lengths(len(truth), len(predicted))
    for name, values in (("label", truth), ("prediction", predicted)):
        if values.min() < 0 or values.max() >= num_classes:
            raise ValueError(f"a {name} is outside 0..{num_classes - 1}")
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


def label_columns(text: str, text_pair: str | None, label: str) -> Columns:
    """The columns of a file of texts or pairs with one label each."""
    if "," in label:
        raise UserError(f"label names one column, not several ({label}); multi-label tasks are not supported")
    columns = {"text": text, "label": label} | ({"text_pair": text_pair} if text_pair else {})
    if len(set(columns.values())) < len(columns):
        raise UserError(f"text, text_pair and label must be different columns, not {list(columns.values())}")
    return columns


def write_texts(
    dataset: Dataset,
    tokenizer: Any,
    folder: Path,
    max_length: int,
    show: bool,
    column: dict[str, Any],
    labels_of: Callable[[str, Part, Array, Chunk], Array],
) -> Splits:
    """Write texts or pairs and one value each. `column` names its column and type; `labels_of` gives the
    values of some rows: (split, part, rows, the rows' columns)."""
    encoder = Encoder(tokenizer, max_length)
    (name,) = column
    pairs = "text_pair" in dataset.parts[0].columns
    dtypes = item_dtypes(encoder) | column | ({"second": np.uint32} if pairs and encoder.typed else {})
    with split_writers(folder, dict.fromkeys(SPLITS, dtypes)) as writers:
        for part, split, rows, ids, chunk in split_chunks(dataset, show):
            columns = {name: labels_of(split, part, rows, chunk), "ids": ids, "groups": part.numbers[rows]}
            if pairs:
                tokens, lengths, second, cut = encoder.pairs(chunk["text"], chunk["text_pair"])
                columns |= {"second": second} if encoder.typed else {}
            else:
                tokens, lengths, cut = encoder.texts(chunk["text"])
            size = sum(len(text.encode()) for role in ("text", "text_pair") for text in chunk.get(role, ()))
            writers[split].append(bytes=size, truncated=cut, tokens=tokens, lengths=lengths, **columns)
        return {split: writer.close() for split, writer in writers.items()}


def _check_class_sizes(dataset: Dataset, part: Part, needed: int) -> None:
    counts = np.bincount(part.labels[part.split != DROPPED], minlength=len(dataset.label_names))
    for name, count in zip(dataset.label_names, counts.tolist(), strict=True):
        if count < needed:
            raise UserError(
                f"{part.source.name}: label {name!r} has {count} row{'s' * (count != 1)}; at least {needed} "
                "are needed so that every split has one. Add rows, or remove that class"
            )


def gives_numbers(model: Any) -> bool:
    """Whether a model gives a text a number, not a class."""
    return bool(model.config.num_labels == 1 or model.config.problem_type == "regression")


def _check_one_label(model: Any) -> None:
    """Refuse a model that gives a text a number, or several labels at once."""
    if "SequenceClassification" not in type(model).__name__:
        return
    if gives_numbers(model):
        raise UserError("this model gives a text a number (regression), not a label; fine-tune it for labels")
    if model.config.problem_type == "multi_label_classification":
        raise UserError(
            "this model gives a text any number of labels (multi_label_classification), and here a text has "
            "one; fine-tune it for that"
        )
