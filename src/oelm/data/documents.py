"""Plain text: the documents of a .txt file, and folders of .txt files with one document each."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from oelm.data.files import CHUNK_ROWS, Chunk, Source, TextSource, check_utf8
from oelm.data.manifest import MANIFEST
from oelm.data.token_bins import holds_bins

COLUMN = "text"  # the only one


class DocumentSource(TextSource):
    """A .txt file. Blank lines separate its documents; in a file without any, every line is a document."""

    def _rows(self, file: IO[str], columns: list[str]) -> Iterator[Chunk]:
        self._require([COLUMN], columns)
        texts = _blocks(file) if self._has_gaps() else (line.strip("\r\n") for line in file if line.strip())
        while some := list(islice(texts, CHUNK_ROWS)):
            yield {COLUMN: some}

    def _has_gaps(self) -> bool:
        """Whether there is a blank line between two lines with text; reads only up to the first one."""
        text = gap = False
        with self.paths[0].open(encoding="utf-8-sig") as file:
            for line in file:
                if not line.strip():
                    gap = text
                elif gap:
                    return True
                else:
                    text = True
        return False

    def where(self, row: int) -> str:
        return f"{self.name}, document {row + 1}"


class FolderSource(Source):
    """A folder, and the folders in it: every .txt file is a document, in the order of their paths."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*text_files(folder))
        self.name = str(folder)

    def chunks(self, columns: list[str]) -> Iterator[Chunk]:
        self._require([COLUMN], columns)
        for path in self.paths:
            try:
                yield {COLUMN: [path.read_text(encoding="utf-8-sig").strip("\n")]}
            except UnicodeDecodeError:
                check_utf8(path)
                raise

    def where(self, row: int) -> str:
        return str(self.paths[row])


def text_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".txt" and path.is_file())


def holds_texts(folder: Path) -> bool:
    """Whether this is a folder of documents: it has .txt files and is not a prepared dataset."""
    prepared = (folder / MANIFEST).exists() or holds_bins(folder)
    return folder.is_dir() and not prepared and bool(text_files(folder))


def is_text(path: Path) -> bool:
    """Whether a user's data is plain text, on which only a language model can be trained."""
    return path.suffix.lower() == ".txt" or holds_texts(path)


def _blocks(lines: IO[str]) -> Iterator[str]:
    """Consecutive lines that are not blank, as one text."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line.rstrip("\r\n"))
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)
