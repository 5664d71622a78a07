"""Systematic ways to damage a file, and what must hold whatever reads it then."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from oelm.errors import AuditError, RunError, UserError

Damage = Callable[[Path], None]


def _rewrite(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.unlink()  # it may be a hard link to the whole one
        path.write_bytes(change(data))

    return damage


def _replace(make: Callable[[Path], Any]) -> Damage:
    def damage(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return damage


def _flipped(data: bytes) -> bytes:
    found = bytearray(data or b"\0")
    found[len(found) // 2] ^= 1
    return bytes(found)


BYTES: dict[str, Damage] = {
    "empty": _rewrite(lambda data: b""),
    "cut in half": _rewrite(lambda data: data[: len(data) // 2]),
    "one byte short": _rewrite(lambda data: data.rstrip()[:-1]),
    "zeros": _rewrite(lambda data: bytes(len(data))),
    "a flipped bit": _rewrite(_flipped),
    "its end lost in zeros": _rewrite(lambda data: data[: len(data) // 2].ljust(len(data), b"\0")),
    "not UTF-8": _rewrite(lambda data: b"\xff\xfe" + data),
    "another file": _rewrite(lambda data: b"PK\x03\x04" + bytes(range(256))),
    "a pickle": _rewrite(lambda data: pickle.dumps(object())),
}
REPLACED: dict[str, Damage] = {
    "missing": _replace(lambda path: None),
    "a folder": _replace(Path.mkdir),
    "a pipe": _replace(os.mkfifo),
    "a link to nothing": _replace(lambda path: path.symlink_to("nothing")),
    "a link to itself": _replace(lambda path: path.symlink_to(path.name)),
    "a link to a device": _replace(lambda path: path.symlink_to("/dev/zero")),
}
FILES = BYTES | REPLACED
TEXTS: dict[str, Damage] = {
    name: _rewrite(lambda data, text=text: text.encode())  # type: ignore[misc]
    for name, text in {
        "a list": "[]", "null": "null", "a number": "7", "text": '"x"', "nested": "[" * 100_000,
        "an empty object": "{}", "NaN": "NaN", "a long number": "1" * 5000, "twice": "{}{}",
    }.items()
}  # fmt: skip
VALUES: dict[str, Any] = {
    "null": None, "text": "x", "a list": [], "a list of null": [None], "an object": {}, "negative": -1,
    "infinite": float("inf"), "NaN": float("nan"), "huge": 10**400, "true": True,
    "nested": json.loads("[" * 500 + "]" * 500), "a line break": "a\nb\x1b[31m",
}  # fmt: skip
GONE = "missing"


def keys(value: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every entry in nested objects."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*before, key)
        yield from keys(inner, (*before, key))


def change_value(path: Path, place: tuple[str, ...], kind: str) -> None:
    """Give one entry of a JSON file another value, or take it away."""
    whole = json.loads(path.read_text())
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if kind == GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = VALUES[kind]
    path.unlink()
    path.write_text(json.dumps(whole))


ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "numbers with a point": lambda a: a.astype(float) + 0.5,
    "NaN": lambda a: np.full(a.shape, np.nan),
    "a table": lambda a: a.reshape(1, -1),
    "one number": lambda a: np.array(7),
    "none": lambda a: a[:0],
    "one fewer": lambda a: a[:-1],
    "one more": lambda a: np.append(a, a[-1:]),
    "negative": lambda a: -a.astype(np.int64) - 1,
    "huge": lambda a: a.astype(np.uint64) + np.uint64(2**62),
    "backwards": lambda a: a[::-1],
    "text": lambda a: a.astype(str),
    "bytes the other way round": lambda a: a.astype(a.dtype.newbyteorder()),
    "objects": lambda a: np.array([{}] * len(a), dtype=object),
}


def change_array(path: Path, kind: str) -> None:
    array = np.load(path)
    path.unlink()
    np.save(path, ARRAYS[kind](array), allow_pickle=True)


def linked(source: Path, to: Path) -> Path:
    """A copy that costs nothing: hard links."""
    shutil.copytree(source, to, copy_function=os.link, symlinks=True)
    return to


def contents(folder: Path, but: Path) -> dict[str, bytes]:
    """All regular files of a folder but one, or but those below one."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path != but and but not in path.parents
    }


def survives(call: Callable[[], Any], *names: str) -> Any:
    """What a call answers, or the error of ours that it raises: one line, which names one of these."""
    try:
        return call()
    except (UserError, RunError, AuditError) as error:
        text = str(error)
        assert isinstance(error, AuditError) or len(text.splitlines()) == 1, text
        assert isinstance(error, AuditError) or any(name in text for name in names), (names, text)
        return error
