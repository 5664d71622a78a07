"""Dataclasses from a user's values: pydantic checks types and unknown keys, and an error names the key."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from oelm.errors import UserError

T = TypeVar("T")
LARGEST = 1 << 63  # no library below takes integers of more than 64 bits


def checked(
    kind: type[T], values: Mapping[str, Any], where: str, table: str = "", whole: str = "the file"
) -> T:
    """A dataclass from a nested mapping; the UserError names the first wrong key and what it may be. `where`
    is the file, for the error, and `table` the table in it that `values` are, if not the `whole` file."""
    from pydantic import ValidationError

    try:
        made = cast(T, _adapter(cast(Any, kind)).validate_python(dict(values)))
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error.errors()[0], kind, table, whole)}") from None
    for path, given, value in _leaves(table, values, made):
        if isinstance(given, bool) and not isinstance(value, bool):  # pydantic takes true for 1
            raise UserError(f"{where}: {path} must be a number, got {str(given).lower()}")
        if isinstance(value, int) and not -LARGEST <= value < LARGEST:
            raise UserError(f"{where}: {path} has {len(str(abs(value)))} digits, which is too large")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise UserError(f"{where}: {path} = {json.dumps(value)} is not text in UTF-8; write it anew")
    return made


def checked_entries(kind: type[T], values: Mapping[str, Any], where: str, name: str, *others: str) -> list[T]:
    """The tables [[name]] of a file as dataclasses; an error names the entry, too. `others` are the file's
    other keys."""
    for key in values:
        if key not in (name, *others):
            raise UserError(f"{where}: unknown key {key!r}; the file has: {', '.join((name, *others))}")
    entries = values.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(f"{where}: it needs entries, each of them a table [[{name}]]")
    first = fields(cast(Any, kind))[0].name
    made = []
    for number, entry in enumerate(entries, 1):
        called = f" ({entry[first]})" if isinstance(entry.get(first), str) else ""
        made.append(checked(kind, entry, f"{where}, [[{name}]] {number}{called}", whole="an entry"))
    return made


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _leaves(path: str, given: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """All scalars of a table: (path, as given, as read)."""
    if isinstance(given, Mapping):
        for key in given:
            inner = getattr(value, str(key), None) if is_dataclass(value) else value[key]
            yield from _leaves(f"{path}.{key}".lstrip("."), given[key], inner)
    elif isinstance(given, list | tuple):
        for entry, inner in zip(given, value, strict=False):
            yield from _leaves(path, entry, inner)
    else:
        yield path, given, value


def _explain(error: Any, kind: Any, table: str, whole: str) -> str:
    tags = re.compile(r"\[key\]|int|float|str|bool|(literal|dict|list)\[.*\]")  # of alternatives, not keys
    parts = [str(part) for part in error["loc"] if not tags.fullmatch(str(part))] or [""]
    section = parts[:-1]
    path = ".".join(filter(None, [table, *parts]))
    if error["type"] == "unexpected_keyword_argument":
        for part in section:
            kind = next((f.default_factory for f in fields(kind) if f.name == part), None)
        known = [f.name for f in fields(kind)] if is_dataclass(kind) else []
        parent = path.rpartition(".")[0]
        return f"unknown key {path!r}; {f'[{parent}]' if parent else whole} has: {', '.join(known)}"
    if "ctx" in error and isinstance(error["ctx"].get("error"), UserError):
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{path} is missing"
    given = json.dumps(error.get("input"), default=str)
    given = given if len(given) <= 80 else f"{given[:80]}..."
    if error["type"] == "dataclass_type":
        return f"{path} must be a table, [{path}], got {given}"
    problem = error["msg"].replace("valid tuple", "valid list")  # TOML has no tuples
    return f"{path} = {given} does not fit: {problem[0].lower()}{problem[1:]}"
