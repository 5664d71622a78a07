"""The agreement of a model's predictions with a file's column of labels."""

import math
from collections import Counter
from typing import Any

from oelm.data.labels import WHOLE, all_whole, whole_number
from oelm.data.tasks.base import Reader


class Agreement:
    """Counts the rows whose prediction equals the label or, for numbers, sums squared errors. Rows without a
    label or without text are not counted; a label that the model does not know counts as wrong."""

    def __init__(self, reader: Reader, column: str) -> None:
        self.numbers, self.column = reader.compared == "value", column
        self.names = [] if self.numbers else list(reader.model.config.id2label.values())
        self.rows = self.right = self.without = 0
        self.squares = 0.0
        self.unknown: Counter[str] = Counter()

    def add(self, predicted: Any, label: Any) -> None:
        if predicted is None:
            return
        if label is None or not (text := str(label).strip()) or text.lower() == "nan":
            self.without += 1
        elif self.numbers:
            try:
                error = predicted - float(text)
                self.squares += error * error  # `**` would raise OverflowError
                self.rows += 1
            except ValueError:
                self.without += 1
        else:
            name = self._class(text)
            self.rows += 1
            self.right += name == predicted
            self.unknown[name] += name not in self.names

    def _class(self, text: str) -> str:
        """The class that a label names; a number may be a class or, if classes have names, a class's
        index."""
        if text in self.names or not WHOLE.fullmatch(text):
            return text
        number = whole_number(text)
        if not all_whole(self.names) and 0 <= int(number) < len(self.names):
            return str(self.names[int(number)])
        return number

    def __str__(self) -> str:
        """One line; empty if nothing was compared."""
        if not self.rows:
            return ""
        labels = f"labels in column {self.column!r}"
        if self.numbers:
            text = f"rmse {math.sqrt(self.squares / self.rows):.4g} on the {self.rows:,} {labels}"
        else:
            share = self.right / self.rows
            text = f"accuracy {share:.4f}: {self.right:,} of the {self.rows:,} {labels} are predicted"
        if self.without:
            rows = f"{self.without:,} row{' has' if self.without == 1 else 's have'}"
            text += f"; {rows} {'no number' if self.numbers else 'none'}"
        if unknown := [f"{name!r} ({count:,})" for name, count in self.unknown.most_common(3) if count]:
            text += f"; unknown to the model and counted as wrong: {', '.join(unknown)}"
        return text
