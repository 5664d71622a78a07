"""store.json, the manifest of a prepared dataset, and the check that its files still match it.

`checksums` holds the SHA-256 of every file and `digest` that of store.json itself, so a changed label, token
or class name is detected when a process first opens the dataset. SHA-256 is hashlib's fastest on processors
with instructions for it, as most have: benchmarks/data.json has the time it takes. A large dataset that was
intact is remembered in the cache folder, so that the next process checks it again only if a file has changed.
"""

import contextlib
import functools
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from oelm.errors import UserError
from oelm.system.files import cache_dir, read_json
from oelm.system.messages import Notice, notice

FORMAT = 3
MANIFEST = "store.json"
AGAIN = "prepare the data again"
LARGE = 1 << 28  # bytes; a smaller dataset is checked by every process, in a fifth of a second
SETTLED = 2.0  # seconds after which a further change surely changes a file's times, which have coarse ticks


class Damaged(UserError):
    """Raised for a prepared dataset that cannot be used but can be made again."""

    def __init__(self, problem: Notice) -> None:
        super().__init__(f"{problem}; {AGAIN}")
        self.notice = problem


def seal(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest with the checksums of the folder's files and its own."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    meta = meta | {"checksums": {str(path.relative_to(folder)): sha256(path) for path in files}}
    return meta | {"digest": digest(meta)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The values of store.json, after every file was checked; `Damaged` if one was changed or is missing."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"{folder} is not a prepared dataset: it has no {MANIFEST}, and no .txt files either")
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise Damaged(notice("file.damaged", path=path, problem=notice("value.not_object")))
    if meta.get("format") != FORMAT:
        found = repr(meta.get("format"))
        raise Damaged(notice("file.other_format", path=folder, found=found, known=FORMAT))
    if meta.get("digest") != digest(meta):
        raise Damaged(notice("file.changed", path=path))
    checksums = meta["checksums"].items()
    _verify(folder, tuple((name, sums, _state(folder / name)) for name, sums in checksums))
    return meta


@functools.cache
def _verify(folder: Path, files: tuple[tuple[str, str, tuple[int, ...]], ...]) -> None:
    """Compare every file with its checksum: once per process, and for a large dataset once per machine, until
    a file's state changes."""
    mark = cache_dir() / "verified" / hashlib.sha256(repr((folder.resolve(), files)).encode()).hexdigest()
    if mark.exists():
        return
    for name, recorded, _ in files:
        try:
            actual = sha256(folder / name)
        except OSError as error:
            raise Damaged(notice("file.unreadable", path=folder / name, error=error.strerror)) from None
        if actual != recorded:
            raise Damaged(notice("file.changed", path=folder / name))
    states = [state for *_, state in files]
    if sum(size for size, *_ in states) >= LARGE:
        newest = max(changed for *_, changed in states) / 1e9
        if newest < time.time() - SETTLED:
            with contextlib.suppress(OSError):  # a cache that cannot be written to is fine
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()


def _state(path: Path) -> tuple[int, ...]:
    """Size, device, inode and times of a file. Programs cannot set the last one, the time of any change."""
    try:
        status = os.stat(path)
    except OSError:
        raise Damaged(notice("file.missing", path=path)) from None
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(notice("file.irregular", path=path))
    return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def digest(record: dict[str, Any]) -> str:
    """The SHA-256 of a record without its own `digest`."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
