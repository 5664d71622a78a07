"""Predictions for the rows of a CSV, TSV, JSON or Parquet file, added as columns."""

from collections.abc import Callable, Iterator
from itertools import tee
from pathlib import Path
from typing import Any

from oelm.config import TaskConfig
from oelm.data import TASKS
from oelm.data.files import open_file
from oelm.errors import UserError
from oelm.inference.agreement import Agreement
from oelm.inference.trained import Trained

PREFIX = "predicted_"
Row = dict[str, Any]


class Table:
    """A file whose rows a model answers. Columns are by default those of the model's training data."""

    def __init__(
        self, trained: Trained, path: str | Path, text: str | None = None, text_pair: str | None = None,
        label: str | None = None,
    ) -> None:  # fmt: skip
        self.trained, self.reader, self.source = trained, trained.reader, open_file(path)
        if text_pair is not None and len(self.reader.reads) < 2:
            raise UserError("this model reads one text, not pairs; leave out --text-pair")
        if label is not None and self.reader.compared is None:
            raise UserError("this model gives no label or number to compare; leave out --label")
        known = _trained_columns(trained.config.task if trained.config else TaskConfig())
        given = (text, text_pair)
        self.texts = [given[i] or known.get(role) or role for i, role in enumerate(self.reader.reads)]
        self.required = self.texts if label is None else [*self.texts, label]
        self.agreement = Agreement(self.reader, label or known["label"] or "label")
        self.answers = [PREFIX + key for key in self.reader.says]

    @property
    def names(self) -> list[str]:
        """The columns of the output; empty if rows may have different ones."""
        names = self.source.names()
        return [*names, *self.answers] if names else []

    def predict(self, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
        """Every row with its answer in further columns, such as `predicted_label`; `self.agreement` is
        updated."""
        read, kept = tee(self._rows())
        lines = (self._line(number, row) for number, row in enumerate(read))
        for row, answer in zip(kept, self.trained.predict(lines, say), strict=True):
            if self.reader.compared and self.agreement.column in row:
                self.agreement.add(answer[self.reader.compared], row[self.agreement.column])
            yield row | {PREFIX + key: answer[key] for key in self.reader.says}

    def _rows(self) -> Iterator[Row]:
        for number, row in enumerate(self.source.rows()):
            for column in self.required:
                if column not in row:
                    option = "--text" if column in self.texts else "--label"
                    has = f"has no column {column!r}; it has: {', '.join(row)}; name one with {option}"
                    place = self.source.name if self.source.names() else self.source.where(number)
                    raise UserError(f"{place} {has}")
            if taken := [name for name in self.answers if name in row]:
                raise UserError(f"{self.source.name} has a column {taken[0]!r} already; rename or remove it")
            yield row

    def _line(self, number: int, row: Row) -> str:
        texts = []
        for column in self.texts:
            value = " ".join(map(str, row[column])) if isinstance(row[column], list) else row[column]
            if not isinstance(value, str | None):
                kind = f"{type(value).__name__} {str(value)[:30]!r} where text was expected"
                raise UserError(f"{self.source.where(number)}: column {column!r} holds {kind}")
            texts.append(value or "")
        if len(texts) == 1:
            return texts[0]
        # A tab separates the two texts; if one of them is empty, the row gets no answer.
        return "\t".join(text.replace("\t", " ") for text in texts) if all(map(str.strip, texts)) else ""


def _trained_columns(task: TaskConfig) -> dict[str, str | None]:
    """Role -> column in the data that a model was trained on."""
    if task.name in TASKS:
        return {"label": None, **TASKS[task.name].columns}
    words = None if task.text == TaskConfig.text else task.text
    return {"text": task.text, "text_pair": task.text_pair, "label": task.label, "tokens": words}
