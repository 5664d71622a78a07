"""Rows written to a CSV, TSV, JSON lines or Parquet file: complete, or not at all."""

import csv
import io
import json
import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import IO, Any

from oelm.config import TABLES
from oelm.errors import UserError
from oelm.system.files import replacing
from oelm.system.library_errors import first_line

SUFFIXES = tuple(suffix for suffix in TABLES if suffix != ".json")  # which cannot be written row by row
Row = dict[str, Any]


def check_new_table(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: cannot tell what kind of file to write; name it {' or '.join(SUFFIXES)}")
    if path.exists():
        raise UserError(f"{path} exists already; name another file, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}; create it")


def write_table(path: Path, rows: Iterable[Row], names: list[str], schema: Any = None) -> int:
    """Write the rows and return their number. `names` are the columns; empty: those of the first row.
    `schema`: a pyarrow schema with the types of columns that keep them."""
    kind = path.suffix.lower()
    with replacing(path) as file:
        if kind == ".parquet":
            return _parquet(file, list(rows), schema, path)
        write = _json_lines if kind == ".jsonl" else _csv
        return write(file, rows, names, "\t" if kind == ".tsv" else ",")


def as_json(value: Any) -> str:
    """The value as JSON on one line: other types (dates, decimals) as text, NaN and infinities as null."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # NaN and infinities, which are not valid JSON
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_lines(file: IO[bytes], rows: Iterable[Row], names: list[str], mark: str) -> int:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        file.write(as_json(row).encode() + b"\n")
    return count


def _csv(file: IO[bytes], rows: Iterable[Row], names: list[str], mark: str) -> int:
    rows, count = iter(rows), 0
    first = next(rows, None)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, delimiter=mark)
    names = names or list(first or ())
    writer.writerow(names)
    for count, row in enumerate(rows if first is None else chain([first], rows), 1):
        if more := [name for name in row if name not in names]:
            raise UserError(
                f"row {count} has {more[0]!r}, which row 1 lacks: a table cannot hold it; write .jsonl"
            )
        writer.writerow([_cell(row.get(name)) for name in names])
    text.flush()
    text.detach()
    return count


def _cell(value: Any) -> Any:
    return as_json(value) if isinstance(value, dict | list) else value


def _parquet(file: IO[bytes], rows: list[Row], schema: Any, path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    types = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    names = list(dict.fromkeys(chain.from_iterable(rows))) or list(types)
    try:
        columns = [pyarrow.array([row.get(name) for row in rows], types.get(name)) for name in names]
        pyarrow.parquet.write_table(pyarrow.table(columns, names), file)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} cannot be written as Parquet: {first_line(error)}; write .jsonl") from None
    return len(rows)
