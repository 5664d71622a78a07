"""Read tables row by row: Parquet, CSV, TSV, CoNLL and JSON lines in chunks with bounded memory; and JSON.
Plain text: `oelm.data.documents`.

A file that is not of the format that its name says is refused in one line that names the file and the row.
"""

import csv
import hashlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

from oelm.config import SUFFIXES
from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory

T = TypeVar("T")
Chunk = dict[str, list[Any]]  # column -> values; all columns equally long
CHUNK_ROWS = 256


class Source(ABC):
    """A table that can be read repeatedly, in chunks, and has a digest of its content."""

    def __init__(self, *paths: Path) -> None:
        self.paths, self.name = paths, str(paths[0])

    @abstractmethod
    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        """The rows, in order; the error for a missing column lists the existing ones."""

    def names(self) -> list[str]:
        """The names of the columns; empty if rows may have different ones."""
        return []

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row with all its columns."""
        for chunk in self.chunks(self.names()):
            yield from (dict(zip(chunk, row, strict=True)) for row in zip(*chunk.values(), strict=True))

    def digest(self) -> str:
        """The SHA-256 of the files, in order."""
        total = hashlib.sha256()
        for path in self.paths:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def where(self, row: int) -> str:
        """The name of a row in messages, which count from 1 without the header; `row` counts from 0."""
        return f"{self.name}, row {row + 1}"

    def _require(self, present: list[str], wanted: list[str]) -> None:
        for column in wanted:
            if column not in present:
                raise UserError(f"{self.name} has no column {column!r}; it has: {', '.join(present)}")
            if (count := present.count(column)) > 1:
                raise UserError(f"{self.name} has {count} columns named {column!r}; rename them")


class ParquetSource(Source):
    """One table in one or more Parquet files."""

    def schema(self) -> Any:
        """Names and types of the columns, as pyarrow has them."""
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_schema(self.paths[0])
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.name} cannot be read as Parquet: {first_line(error)}") from None

    def names(self) -> list[str]:
        return list(self.schema().names)

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        import pyarrow
        import pyarrow.parquet

        pool = pyarrow.default_memory_pool()
        for path in self.paths:
            try:
                # A buffer instead of whole column chunks bounds memory even for one huge row group.
                with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
                    self._require(file.schema_arrow.names, columns)
                    for batch in file.iter_batches(CHUNK_ROWS, columns=columns, use_threads=False):
                        values = batch.to_pydict()
                        del batch
                        pool.release_unused()  # otherwise the pool keeps several times as much memory
                        yield values
            except (pyarrow.ArrowException, OSError) as error:
                if is_out_of_memory(error):
                    raise
                raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from None


class TextSource(Source):
    """A table of lines in UTF-8."""

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        return self._read(lambda file: self._rows(file, columns))

    def _read(self, read: Callable[[IO[str]], Iterable[T]]) -> Iterator[T]:
        try:
            with self.paths[0].open(encoding="utf-8-sig", newline="") as file:
                yield from read(file)
        except UnicodeDecodeError:
            check_utf8(self.paths[0])
            raise

    @abstractmethod
    def _rows(self, file: IO[str], columns: list[str]) -> Iterator[Chunk]: ...

    def _chunked(self, records: Iterable[tuple[str, dict[str, Any]]], columns: list[str]) -> Iterator[Chunk]:
        """Chunks of records; each record comes with its place for an error message."""
        records = iter(records)
        while some := list(islice(records, CHUNK_ROWS)):
            for place, record in some:
                if missing := [column for column in columns if column not in record]:
                    raise UserError(f"{place} has no {missing[0]!r}; it has: {', '.join(record)}")
                for column in columns:
                    self._check_text(record[column], place, column)
            yield {column: [record[column] for _, record in some] for column in columns}

    def _check_text(self, value: Any, place: str, column: str) -> None:
        """Refuse half a surrogate pair in a text, label or list, which JSON can encode and UTF-8 cannot."""
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: column {column!r} holds half a surrogate pair, which is not text; repair the "
                "file's encoding"
            ) from None


def check_utf8(path: Path) -> None:
    """Raise UserError with the first line that is not UTF-8; the decoder's own error has only an offset."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; save the "
                    "file as text in UTF-8 (it may be compressed, or a spreadsheet)"
                ) from None


class CsvSource(TextSource):
    """A CSV (comma, semicolon or tab) or TSV file with a header line."""

    def names(self) -> list[str]:
        try:
            return next(self._read(lambda file: islice(self._reader(file), 1)), [])
        except csv.Error:  # `chunks` raises it with its line
            return []

    def _reader(self, file: IO[str]) -> Any:
        csv.field_size_limit(sys.maxsize)
        tabs = self.paths[0].suffix.lower() == ".tsv"
        names = file.readline()
        file.seek(0)
        delimiter = "\t" if tabs else next((mark for mark in ",\t;" if mark in names), ",")
        return csv.reader(file, delimiter=delimiter, strict=True)

    def _rows(self, file: IO[str], columns: list[str]) -> Iterator[Chunk]:
        reader = self._reader(file)
        try:
            yield from self._chunks(reader, columns)
        except csv.Error as error:
            hint = "a quote is not closed, or not doubled inside a quoted field"
            raise UserError(f"{self.name}, line {reader.line_num}: {error} ({hint})") from None

    def _chunks(self, reader: Any, columns: list[str]) -> Iterator[Chunk]:
        header = next(reader, None)
        if not header:
            raise UserError(f"{self.name} is empty: the first line must name the columns")
        self._require(header, columns)
        rows = enumerate(((reader.line_num, fields) for fields in reader if fields), 1)  # not blank lines
        while chunk := list(islice(rows, CHUNK_ROWS)):
            for row, (line, fields) in chunk:
                if len(fields) != len(header):
                    raise UserError(
                        f"{self.name}, row {row} (line {line}): {len(fields)} fields where the header has "
                        f"{len(header)}; a text that contains the separator needs quotes around it"
                    )
            indices = {column: header.index(column) for column in columns}
            yield {column: [fields[at] for _, (_, fields) in chunk] for column, at in indices.items()}


class RecordSource(TextSource):
    """Objects, which may have different keys."""

    def rows(self) -> Iterator[dict[str, Any]]:
        for place, record in self._read(self._records):
            for column, value in record.items():
                self._check_text(column, place, column)
                self._check_text(value, place, column)
            yield record

    def _rows(self, file: IO[str], columns: list[str]) -> Iterator[Chunk]:
        return self._chunked(self._records(file), columns)

    @abstractmethod
    def _records(self, file: IO[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every object, with the place that a message names."""


class JsonlSource(RecordSource):
    """JSON lines: one object per line."""

    def _records(self, file: IO[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        return (self._record(line, number) for number, line in enumerate(file, 1) if line.strip())

    def _record(self, line: str, number: int) -> tuple[str, dict[str, Any]]:
        place = f"{self.name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            if number == 1 and line.lstrip().startswith("["):
                raise UserError(f"{self.name} is one JSON array; write one object per line instead") from None
            raise UserError(f"{place} is not JSON: {first_line(error)}") from None
        if not isinstance(record, dict):
            raise UserError(
                f'{place}: an object such as {{"text": ...}} was expected, not {type(record).__name__}'
            )
        return place, record


class JsonSource(RecordSource):
    """One JSON value: a list of objects, or {"data": [...]} with such a list or SQuAD's nested documents."""

    def _records(self, file: IO[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:
            hint = "for one object per line, name the file .jsonl"
            raise UserError(f"{self.name} is not JSON: {first_line(error)} ({hint})") from None
        rows = value.get("data") if isinstance(value, dict) else value
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError(f'{self.name}: a list of objects, or {{"data": [...]}} with one, was expected')
        nested = [row for row in rows if "paragraphs" in row]
        records = self._questions(nested) if nested else rows
        yield from ((self.where(row), record) for row, record in enumerate(records))

    def _questions(self, documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The questions of SQuAD's own files, one row each, in the form of the hub's dataset."""
        try:
            for paragraph in (paragraph for document in documents for paragraph in document["paragraphs"]):
                for qa in paragraph["qas"]:
                    answers = {
                        key: [answer[key] for answer in qa["answers"]] for key in ("text", "answer_start")
                    }
                    yield {"question": qa["question"], "context": paragraph["context"], "answers": answers}
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{self.name}: SQuAD's form is data > paragraphs > context and qas > question and answers, "
                f"each with text and answer_start; here is something else ({first_line(error)})"
            ) from None


class ConllSource(TextSource):
    """CoNLL's format: each line is a word and its columns, the last of which is the tag; a blank line ends a
    sentence."""

    def _rows(self, file: IO[str], columns: list[str]) -> Iterator[Chunk]:
        self._require(["tokens", "tags"], columns)
        yield from self._chunked(((self.name, sentence) for sentence in self._sentences(file)), columns)

    def _sentences(self, file: IO[str]) -> Iterator[dict[str, Any]]:
        words: list[str] = []
        tags: list[str] = []
        width = None
        for number, line in enumerate(chain(file, [""]), 1):
            fields = line.split()
            if not fields or fields[0] == "-DOCSTART-":
                if words:
                    yield {"tokens": words, "tags": tags}
                words, tags = [], []
                continue
            width = width or len(fields)
            if len(fields) != width or width < 2:
                wanted = "a word and its tag were expected" if width < 2 else f"the first line has {width}"
                raise UserError(f"{self.name}, line {number}: {len(fields)} columns; {wanted}")
            words.append(fields[0])
            tags.append(fields[-1])

    def where(self, row: int) -> str:
        return f"{self.name}, sentence {row + 1}"


def open_file(path: str | Path, tagged: bool = False) -> Source:
    """The source for a user's file, by its suffix, or for a folder of .txt files. A .txt file holds documents
    or, if `tagged`, CoNLL's columns."""
    from oelm.data.documents import DocumentSource, FolderSource, holds_texts

    path = Path(path)
    if holds_texts(path):
        return FolderSource(path)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; give one file ({', '.join(SUFFIXES)}), or a folder of .txt files"
        )
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if not path.is_file():
        raise UserError(f"{path} is a pipe or a device, which cannot be read twice; save it as a file first")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read: permission denied")
    readers: dict[str, type[ParquetSource | TextSource]]
    readers = {".parquet": ParquetSource, ".jsonl": JsonlSource, ".csv": CsvSource, ".tsv": CsvSource}
    readers |= {".json": JsonSource, ".conll": ConllSource}
    readers[".txt"] = ConllSource if tagged else DocumentSource
    if (suffix := path.suffix.lower()) not in readers:
        raise UserError(f"{path}: cannot tell what kind of file this is; name it {' or '.join(SUFFIXES)}")
    return readers[suffix](path)
