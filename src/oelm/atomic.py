"""Files that are either there whole or not at all: written beside, synced, renamed. One lock, and names."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from oelm.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Replace a file in one step: a reader, or a crash at any moment, sees the old bytes or the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def sync_files(folder: Path) -> None:
    """Bring every file of this folder to the disk: what is renamed next must be whole after a power cut."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path) -> IO[str]:
    """Hold a file's lock as long as the returned file is open; the kernel lets go when the holder dies.

    Raises BlockingIOError where another process holds it.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def folder_name(name: str, most: int, also: str = "-_") -> str:
    """A name as a folder's: letters and digits, what is in `also`, and nothing that means something there."""
    return "".join(letter if letter.isalnum() or letter in also else "-" for letter in name)[:most].strip(".")
