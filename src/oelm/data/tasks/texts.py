"""Texts, or pairs of texts, with one label each: what classification and regression share."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.assemble import Array
from oelm.data.dataset import Dataset
from oelm.data.preparation import Lengths, Rows, write_items
from oelm.data.store import Split, Store
from oelm.data.tasks.base import Baselines, Columns, Items, Reader, Splits, TaskKind, pair_fault
from oelm.data.tokenizer import Encoder
from oelm.data.trivial_baselines import MOST_WEIGHTS, StoreTexts, have_sklearn, tfidf_baseline
from oelm.errors import UserError
from oelm.models.fit import agree_on_padding


class TextReader(Reader):
    """Reads lines of one text or, for a model of pairs, of text, tab, text."""

    packable = True

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(model, tokenizer, max_length)
        check_one_answer(model)
        self.pairs = bool(getattr(model.config, "text_pairs", False))
        self.reads = ("text", "text_pair") if self.pairs else ("text",)

    def problem(self, line: str) -> str:
        fault = pair_fault(line.split("\t")) if self.pairs else ""
        return f"is not a pair: this model reads text, tab, text, and here {fault}" if fault else ""

    def encode(self, lines: list[str]) -> Items:
        if not self.pairs:
            return super().encode(lines)
        firsts, seconds = zip(*(line.split("\t") for line in lines), strict=True)
        tokens, lengths, second, cut = self.encoder.pairs([*firsts], [*seconds])
        return Items(tokens, lengths, sum(map(len, self.encoder.pair)), cut, second)

    def outputs(self, inputs: dict[str, Any], second: Array | None) -> tuple[Any, ...]:
        return (self.model(**inputs).logits.float(),)


class LabelledTexts(TaskKind):
    auto_class = "AutoModelForSequenceClassification"
    column: str  # the labels' column in a prepared dataset, and their attribute of `Split`

    def file_columns(self, text: str, text_pair: str | None, label: str, target: str | None) -> Columns:
        if "," in label:
            raise UserError(
                f"label names one column, not several ({label}); multi-label tasks are not supported"
            )
        columns = {"text": text, "label": label} | ({"text_pair": text_pair} if text_pair else {})
        if len(set(columns.values())) < len(columns):
            raise UserError(
                f"text, text_pair and label must be different columns, not {list(columns.values())}"
            )
        return columns

    def write(self, dataset: Dataset, tokenizer: Any, folder: Path, lengths: Lengths, show: bool) -> Splits:
        encoder, pairs = Encoder(tokenizer, lengths.text), "text_pair" in dataset.parts[0].columns

        def encode(rows: Rows) -> dict[str, Any]:
            values: dict[str, Any] = {self.column: self.labels(rows)}
            values["bytes"] = rows.bytes("text", "text_pair")
            texts = rows.columns["text"]
            if pairs:
                tokens, lengths, values["second"], cut = encoder.pairs(texts, rows.columns["text_pair"])
            else:
                tokens, lengths, cut = encoder.texts(texts)
            return values | {"tokens": tokens, "lengths": lengths, "truncated": cut}

        dtypes = {"tokens": encoder.dtype, self.column: self.dtype(dataset)}
        if pairs and encoder.typed:
            dtypes["second"] = np.uint32
        splits = write_items(dataset, folder, dtypes, encode, show)
        for split, meta in splits.items():
            meta |= self.summary(dataset, split, np.load(folder / f"{split}.{self.column}.npy"))
        return splits

    @abstractmethod
    def labels(self, rows: Rows) -> Array:
        """The labels of these rows, as they are written."""

    @abstractmethod
    def dtype(self, dataset: Dataset) -> Any:
        """The type in which labels are written."""

    @abstractmethod
    def summary(self, dataset: Dataset, split: str, labels: Array) -> dict[str, Any]:
        """The metadata of a split's labels."""

    def fit_model(self, model: Any, store: Store, name: str) -> None:
        agree_on_padding(model, store.tokenizer())

    def check_model(self, model: Any, name: str, task: str) -> None:
        super().check_model(model, name, task)
        check_one_answer(model)
        if not self.fits(model):
            is_what = "gives a text a number" if gives_numbers(model) else f"is a {type(model).__name__}"
            raise UserError(f"{name} {is_what}, and {task} needs a model that can {self.does}: fine-tune it")

    @abstractmethod
    def scores(self, store: Store, split: Split, predictions: Array) -> dict[str, Any]:
        """The metrics of predictions for all items of a split."""

    @abstractmethod
    def constant(self, store: Store) -> tuple[str, float]:
        """The name and the value of the best constant prediction."""

    @abstractmethod
    def linear_models(self, store: Store) -> dict[str, Any]:
        """Baseline name -> scikit-learn model; `premise_blind` gets the second texts only."""

    def trivial_baselines(self, store: Store, splits: list[Split]) -> Baselines:
        """A constant and, if scikit-learn is installed, linear models of words and pairs of words."""
        name, value = self.constant(store)
        constant = {split.name: self.scores(store, split, np.full(len(split), value)) for split in splits}
        baselines = {name: constant}
        if not have_sklearn():
            return baselines
        texts, labels = StoreTexts(store), getattr(store["train"], self.column)
        weights = len(store.label_names) if len(store.label_names) > 2 else 1  # of each word
        for name, model in self.linear_models(store).items():
            predicted = tfidf_baseline(
                texts, splits, labels, model, MOST_WEIGHTS // weights, name == "premise_blind"
            )
            if predicted is not None:
                items, answers = predicted
                baselines[name] = {
                    split.name: self.scores(store, split, answers[split.name]) | {"trained_on": items}
                    for split in splits
                }
        return baselines

    def fits(self, model: Any) -> bool:
        return super().fits(model) and gives_numbers(model) == (self.column == "values")


def gives_numbers(model: Any) -> bool:
    """Whether a model predicts a number, not a class."""
    return bool(model.config.num_labels == 1 or model.config.problem_type == "regression")


def check_one_answer(model: Any) -> None:
    """Refuse a model that predicts several labels or numbers for a text."""
    kind, outputs = model.config.problem_type, model.config.num_labels
    if kind == "multi_label_classification" or (kind == "regression" and outputs > 1):
        raise UserError(
            f"this model gives a text {outputs} answers at once ({kind}), and here a text has one; "
            "fine-tune it for that"
        )
