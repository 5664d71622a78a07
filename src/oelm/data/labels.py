"""Labels: the classes of a known task, or those a user's column turns out to hold."""

import math
from typing import Any

import numpy as np

from oelm.data.files import Source
from oelm.errors import UserError

UNLABELLED = -1


def known_labels(values: list[Any], names: tuple[str, ...], source: Source) -> np.ndarray:
    """Labels of a catalogued task as numbers; -1 stays, anything else outside the range is refused."""
    found = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if isinstance(value, str) and value in names:
            value = names.index(value)
        if isinstance(value, bool) or not isinstance(value, int) or not UNLABELLED <= value < len(names):
            raise UserError(
                f"{source.where(row)}: label {value!r} is not 0 to {len(names) - 1} ({', '.join(names)})"
            )
        found[row] = value
    if len(found) and (found == UNLABELLED).all():
        raise UserError(
            f"{source.name}: every label is -1, the mark of hidden labels (GLUE's test splits); "
            "use a split that has labels"
        )
    return found


def user_labels(values: list[Any], source: Source, column: str) -> list[str]:
    """A user's labels as class names, one spelling per class (1, "1" in CSV and 1.0 are "1").

    Missing labels, lists (multi-label), fractions (regression) and mixed types are refused by name.
    """
    kinds: dict[str, int] = {}
    for row, value in enumerate(values):
        kind = _label_kind(value, source.where(row), column)
        kinds.setdefault(kind, row)
        if len(kinds) > 1:
            (a, at), (b, here) = kinds.items()
            raise UserError(
                f"{source.where(here)}: label column {column!r} holds {b} here and {a} in row {at + 1}; "
                "use one type"
            )
    if "true or false" in kinds:
        return [str(value) for value in values]
    if "a number" in kinds or (values and all(_number(value) is not None for value in values)):
        return _numbers(values, source, column)
    return [str(value).strip() for value in values]


def _label_kind(value: Any, place: str, column: str) -> str:
    """The kind of a label, or a refusal that names its row."""
    if isinstance(value, list | tuple | dict | set):
        raise UserError(
            f"{place}: label column {column!r} holds a list; multi-label tasks are not supported, "
            "only one class per text"
        )
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise UserError(f"{place}: the label is missing; fill it in or remove the row")
    if isinstance(value, str):
        text = value.strip()
        if not text or text.lower() == "nan":
            raise UserError(f"{place}: the label is missing; fill it in or remove the row")
        if text.startswith("[") and text.endswith("]"):
            raise UserError(
                f"{place}: label {text[:40]!r} looks like a list; multi-label tasks are not supported, "
                "only one class per text"
            )
        return "a string"
    return "true or false" if isinstance(value, bool) else "a number"


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _numbers(values: list[Any], source: Source, column: str) -> list[str]:
    names = []
    for row, value in enumerate(values):
        number = float(value)
        if not number.is_integer():
            raise UserError(
                f"{source.where(row)}: label {value!r} in column {column!r} is a fraction; regression is not "
                "supported, only classes"
            )
        names.append(str(int(number)))
    return names


def class_names(labels: list[str], source: Source, column: str) -> list[str]:
    """The classes in a fixed order: numbers by value, names by letter. Too many of them are refused."""
    names = set(labels)
    if len(names) > max(100, len(labels) // 10):
        raise UserError(
            f"{source.name}: label column {column!r} holds {len(names)} different values in "
            f"{len(labels)} rows; that looks like regression, an id or a text, and only classes are supported"
        )
    if all(_number(name) is not None for name in names):
        return sorted(names, key=float)
    return sorted(names)
