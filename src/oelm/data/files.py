"""Reading tables row by row: Parquet, CSV, TSV and JSON lines, in chunks, with bounded memory.

A file that cannot be read as what its name says is refused in one line that names the file and the row.
"""

import csv
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from oelm.config import SUFFIXES
from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory

Chunk = dict[str, list[Any]]  # column -> values; all columns equally long
CHUNK_ROWS = 256
CONTENT = {  # what the first bytes of a file give away
    b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"%PDF": "PDF",
}  # fmt: skip


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
            if (count := header.count(column)) > 1:
                raise UserError(f"{self.name} has {count} columns named {column!r}; rename them")
        rows = ((reader.line_num, fields) for fields in reader if fields)  # not a blank line
        first = 1
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for row, (line, fields) in enumerate(chunk, first):
                if len(fields) != len(header):
                    raise UserError(
                        f"{self.name}, row {row} (line {line}): {len(fields)} fields where the header has "
                        f"{len(header)}; a text that contains the separator needs quotes around it"
                    )
            yield {column: [fields[header.index(column)] for _, fields in chunk] for column in columns}
            first += len(chunk)

    def _delimiter(self, header: str) -> str:
        if self.paths[0].suffix.lower() == ".tsv":
            return "\t"
        if "," not in header and "\t" in header:
            raise UserError(f"{self.name}: the columns are separated by tabs; name the file .tsv")
        return ";" if "," not in header and ";" in header else ","


class JsonlSource(FileSource):
    """JSON lines: one object per line, in UTF-8."""

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        with self.paths[0].open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            while some := list(islice(lines, CHUNK_ROWS)):
                records = [(number, self._record(line, number)) for number, line in some]
                for number, record in records:
                    for column in columns:
                        if column not in record:
                            raise UserError(
                                f"{self.name}, line {number} has no {column!r}; it has: {', '.join(record)}"
                            )
                yield {column: [record[column] for _, record in records] for column in columns}

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        place = f"{self.name}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _bad_bytes(self.paths[0], error) from None
        except (ValueError, RecursionError) as error:  # a ValueError: a number of thousands of digits, too
            if number == 1 and line.lstrip().startswith(b"["):
                raise UserError(f"{self.name} is one JSON array; write one object per line instead") from None
            raise UserError(f"{place} is not JSON: {first_line(error)}") from None
        if not isinstance(record, dict):
            raise UserError(
                f'{place}: an object such as {{"text": ...}} was expected, not {type(record).__name__}'
            )
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
    looks = next((name for magic, name in CONTENT.items() if head.startswith(magic)), None)
    if suffix == ".parquet":
        if looks != "Parquet":
            raise UserError(f"{path} is named .parquet and is not Parquet ({looks or 'other content'})")
        return ParquetSource(path)
    if looks:
        raise UserError(f"{path} is named {suffix} and its content is {looks}; convert it or rename it")
    return JsonlSource(path) if suffix == ".jsonl" else CsvSource(path)


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
