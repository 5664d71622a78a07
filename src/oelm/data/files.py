"""Reading tables row by row: Parquet, CSV, TSV and JSON lines, in chunks, with bounded memory.

A file that cannot be read as what its name says is refused in one line that names the file and the row.
"""

import csv
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oelm.config import SUFFIXES
from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory

Chunk = dict[str, list[Any]]  # column -> values; all columns equally long
CHUNK_ROWS = 256


class Source(ABC):
    """A table that can be read again and again in chunks, and has a digest of its content."""

    name: str

    @abstractmethod
    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        """The rows, in order; a column that is not there is refused with the names of those that are."""

    @abstractmethod
    def digest(self) -> str:
        """Changes whenever the content does."""

    def where(self, row: int) -> str:
        """How a message names a row (counted from 0 here, from 1 there, the header left out)."""
        return f"{self.name}, row {row + 1}"

    def _require(self, present: list[str], wanted: list[str]) -> None:
        for column in wanted:
            if column not in present:
                raise UserError(f"{self.name} has no column {column!r}; it has: {', '.join(present)}")


def content_digest(paths: Sequence[Path]) -> str:
    """One digest of several files' bytes, in this order."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


class FileSource(Source):
    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.name = str(paths[0])

    def digest(self) -> str:
        return content_digest(self.paths)


class ParquetSource(FileSource):
    """One table in one or more Parquet files."""

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        import pyarrow
        import pyarrow.parquet

        pool = pyarrow.default_memory_pool()
        for path in self.paths:
            try:
                # A buffer instead of whole column chunks: memory stays bounded for one huge row group.
                with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
                    self._require(file.schema_arrow.names, columns)
                    for batch in file.iter_batches(CHUNK_ROWS, columns=columns, use_threads=False):
                        values = batch.to_pydict()
                        del batch
                        pool.release_unused()  # or the pool keeps several times what it needs
                        yield values
            except (pyarrow.ArrowException, OSError) as error:
                if is_out_of_memory(error):
                    raise
                raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from None


class CsvSource(FileSource):
    """A CSV (comma or semicolon) or TSV file with a header line, in UTF-8."""

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        path = self.paths[0]
        csv.field_size_limit(sys.maxsize)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=self._delimiter(file.readline()), strict=True)
                file.seek(0)
                yield from self._rows(reader, columns)
        except csv.Error as error:
            hint = "a quote is not closed, or not doubled inside a quoted field"
            raise UserError(f"{path}, line {reader.line_num}: {error} ({hint})") from None
        except UnicodeDecodeError as error:
            raise _bad_bytes(path, error) from None

    def _rows(self, reader: Any, columns: list[str]) -> Iterator[Chunk]:
        header = next(reader, None)
        if not header:
            raise UserError(f"{self.name} is empty: the first line must name the columns")
        self._require(header, columns)
        for column in columns:
            if header.count(column) > 1:
                raise UserError(
                    f"{self.name} has {header.count(column)} columns named {column!r}; rename them"
                )
        places = [header.index(column) for column in columns]
        chunk: list[list[str]] = []
        row = 0
        for fields in reader:
            if not fields:  # a blank line
                continue
            row += 1
            if len(fields) != len(header):
                raise UserError(
                    f"{self.name}, row {row} (line {reader.line_num}): {len(fields)} fields where the header "
                    f"has {len(header)}; a text that contains the separator needs quotes around it"
                )
            chunk.append(fields)
            if len(chunk) == CHUNK_ROWS:
                yield {c: [f[p] for f in chunk] for c, p in zip(columns, places, strict=True)}
                chunk = []
        if chunk:
            yield {c: [f[p] for f in chunk] for c, p in zip(columns, places, strict=True)}

    def _delimiter(self, header: str) -> str:
        if self.paths[0].suffix.lower() == ".tsv":
            return "\t"
        if "," not in header and "\t" in header:
            raise UserError(f"{self.name}: the columns are separated by tabs; name the file .tsv")
        return ";" if "," not in header and ";" in header else ","


class JsonlSource(FileSource):
    """JSON lines: one object per line, in UTF-8."""

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        path = self.paths[0]
        chunk: Chunk = {column: [] for column in columns}
        rows = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                record = self._record(line, number)
                for column in columns:
                    if column not in record:
                        raise UserError(
                            f"{path}, line {number} has no {column!r}; it has: {', '.join(record)}"
                        )
                    chunk[column].append(record[column])
                rows += 1
                if rows % CHUNK_ROWS == 0:
                    yield chunk
                    chunk = {column: [] for column in columns}
        if rows % CHUNK_ROWS:
            yield chunk

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        place = f"{self.name}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _bad_bytes(self.paths[0], error) from None
        except (ValueError, RecursionError) as error:  # a ValueError: a number of thousands of digits, too
            if number == 1 and line.lstrip().startswith(b"["):
                raise UserError(f"{self.name} is one JSON array; write one object per line instead") from None
            raise UserError(f"{place} is not JSON: {first_line(error)}") from None
        if not isinstance(record, dict):
            raise UserError(f'{place}: an object such as {{"text": ...}} was expected, not {_kind(record)}')
        return record


def open_file(path: str | Path) -> FileSource:
    """The reader for a user's file, by its name; a content that contradicts the name is refused."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give one file ({', '.join(SUFFIXES)})")
    if not path.exists():
        raise UserError(f"there is no file {path}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: cannot tell what kind of file this is; name it {' or '.join(SUFFIXES)}")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    looks = _content(head)
    if suffix == ".parquet":
        if looks != "Parquet":
            raise UserError(f"{path} is named .parquet and is not Parquet ({looks or 'other content'})")
        return ParquetSource(path)
    if looks:
        raise UserError(f"{path} is named {suffix} and its content is {looks}; convert it or rename it")
    return JsonlSource(path) if suffix == ".jsonl" else CsvSource(path)


def _content(head: bytes) -> str | None:
    """What the first bytes of a file give away, where they do."""
    for magic, name in (
        (b"PAR1", "Parquet"),
        (b"\x1f\x8b", "gzip"),
        (b"PK\x03\x04", "a zip archive or an Excel workbook"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
        (b"%PDF", "PDF"),
    ):
        if head.startswith(magic):
            return name
    return None


def _bad_bytes(path: Path, error: UnicodeDecodeError) -> UserError:
    """Find the line: the decoder works on a buffer and knows only its place in that."""
    place = str(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as found:
                error, place = found, f"{path}, line {number}"
                break
    return UserError(f"{place}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8")


def _kind(value: object) -> str:
    """The type of a JSON value in a reader's words."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
