"""Labels: the classes of a catalogued task, or those found in a user's column."""

import math
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from oelm.data.files import Source
from oelm.errors import UserError
from oelm.system.messages import Notice, notice

UNLABELLED = -1
# A whole number in its usual form. Others that Python would accept (01, 1_0, 1e5) count as codes.
WHOLE = re.compile(r"([+-]?)(0|[1-9][0-9]*)(\.0*)?")
MAYBE_MISSING = ("na", "n/a", "#n/a", "<na>", "none", "null")  # as programs write a missing value


def known_labels(values: list[Any], names: tuple[str, ...], source: Source) -> np.ndarray:
    """Labels of a catalogued task as numbers; -1 stays, anything else outside the range is refused."""
    numbers = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if isinstance(value, str) and value in names:
            value = names.index(value)
        if isinstance(value, bool) or not isinstance(value, int) or not UNLABELLED <= value < len(names):
            raise UserError(
                f"{source.where(row)}: label {value!r} is not 0 to {len(names) - 1} ({', '.join(names)})"
            )
        numbers[row] = value
    return numbers


def user_labels(values: list[Any], source: Source, column: str, as_names: bool = False) -> list[str]:
    """A user's labels as class names, one spelling per class (1, "1" in CSV and 1.0 are "1").

    Strings count as numbers only if all of them are whole (`WHOLE`), and never with `as_names`. Otherwise
    they are names and stay as they are, so that codes such as 01 and 1 are two classes. Missing labels, lists
    (multi-label), fractions (regression) and mixed types are refused, each with its own message.
    """
    kinds: dict[str, int] = {}
    for row, value in enumerate(values):
        kinds.setdefault(_label_kind(value, source.where(row), column), row)
        if len(kinds) > 1:
            (a, at), (b, here) = kinds.items()
            raise UserError(
                f"{source.where(here)}: label column {column!r} holds {b} here and {a} in row {at + 1}; "
                "use one type"
            )
    names = [str(value).strip() for value in values]
    numbers = "a number" in kinds
    if "true or false" in kinds or (as_names and not numbers):
        return names
    if all_whole(names):
        return [whole_number(name) for name in names]
    try:
        given = [Decimal(name) for name in names]
    except InvalidOperation:
        return names
    for row, number in enumerate(given):  # all are numbers, so a fraction means regression
        if number != number.to_integral_value() if number.is_finite() else numbers:
            raise UserError(
                f"{source.where(row)}: label {values[row]!r} in column {column!r} is not a whole number, so "
                "not a class; such numbers are learned with --kind regression (task.kind)"
            )
    return [str(int(value)) for value in values] if numbers else names


def _label_kind(value: Any, place: str, column: str) -> str:
    """The type of a label in words; UserError, with its row, if it cannot be a class."""
    text = value.strip() if isinstance(value, str) else None
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    if missing or (text is not None and text.lower() in ("", "nan")):
        raise UserError(f"{place}: the label is missing; fill it in or remove the row")
    looks_like_a_list = text is not None and text.startswith("[") and text.endswith("]")
    if looks_like_a_list or isinstance(value, list | tuple | dict | set):
        raise UserError(
            f"{place}: label {str(value)[:40]!r} in column {column!r} is a list; multi-label tasks are not "
            "supported, only one class per text"
        )
    if text is not None:
        return "a string"
    if not isinstance(value, int | float | Decimal):
        raise UserError(
            f"{place}: label column {column!r} holds {type(value).__name__}; write the classes as words, "
            "whole numbers or booleans"
        )
    return "true or false" if isinstance(value, bool) else "a number"


def all_whole(names: Iterable[str]) -> bool:
    return all(WHOLE.fullmatch(name) for name in names)


def whole_number(name: str) -> str:
    """The canonical spelling of a whole number; made from its digits, as a float would round large ones."""
    sign, digits = WHOLE.sub(r"\1 \2", name).split(" ")
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def class_names(labels: list[str], source: Source, column: str) -> list[str]:
    """The classes in a fixed order: numbers by value, names alphabetically. Too many classes are refused."""
    names = set(labels)
    if len(names) > max(100, len(labels) // 10):
        raise UserError(
            f"{source.name}: label column {column!r} holds {len(names)} different values in "
            f"{len(labels)} rows: too many for classes. Numbers are learned with --kind regression"
        )
    if all_whole(names):
        return sorted(names, key=lambda name: (Decimal(name), name))
    return sorted(names)


def missing_warning(names: list[str]) -> Notice | None:
    """A warning about labels such as "n/a" that may stand for a missing label; they are kept as classes."""
    counts = {name: names.count(name) for name in sorted(set(names)) if name.lower() in MAYBE_MISSING}
    if not counts:
        return None
    labels = [notice("data.label_rows", label=repr(name), count=count) for name, count in counts.items()]
    return notice("data.maybe_missing", labels=labels)
