"""Writing stores: arrays that grow on disk, and a cache folder that several processes may share."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from oelm.atomic import sync_folder, write_json
from oelm.data.store import FORMAT, MANIFEST, Store, open_store
from oelm.errors import UserError


class ArrayWriter:
    """A one-dimensional .npy file written piece by piece: memory does not grow with it."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.file = path.open("wb")
        self._header()
        self._data_starts = self.file.tell()

    def _header(self) -> None:
        # numpy pads the header so that it can be rewritten in place with a longer shape.
        description = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, description)

    def append(self, values: np.ndarray) -> None:
        if len(values) and self.dtype.kind in "ui":
            info = np.iinfo(self.dtype)
            if int(values.min()) < info.min or int(values.max()) > info.max:
                raise OverflowError(f"{self.file.name}: a value does not fit {self.dtype}")
        np.ascontiguousarray(values, dtype=self.dtype).tofile(self.file)
        self.length += len(values)

    def close(self) -> None:
        self.file.seek(0)
        self._header()
        if self.file.tell() != self._data_starts:
            raise RuntimeError(f"{self.file.name}: the header outgrew its place")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class SplitWriter:
    """The columns of one split. Items end where `end_items` says; a corpus has none."""

    def __init__(self, folder: Path, name: str, dtypes: dict[str, Any]) -> None:
        self.columns = {
            column: ArrayWriter(folder / f"{name}.{column}.npy", t) for column, t in dtypes.items()
        }
        self.meta: dict[str, Any] = {"items": 0, "tokens": 0, "bytes": 0, "truncated": 0}
        self.longest = 0
        if "target_tokens" in self.columns:
            self.meta |= {f"target_{name}": 0 for name in ("tokens", "bytes", "truncated", "longest")}
        for name in self.columns.keys() & {"offsets", "target_offsets"}:
            self.columns[name].append(np.zeros(1, dtype=np.int64))

    def append(self, *, bytes: int, truncated: int = 0, **columns: np.ndarray) -> None:
        """Add items (with `lengths`) or a piece of a stream (without)."""
        lengths = columns.pop("lengths", None)
        if lengths is not None and len(lengths):
            columns["offsets"] = self.meta["tokens"] + np.cumsum(lengths)
            self.meta["items"] += len(lengths)
            self.longest = max(self.longest, int(lengths.max()))
        for name, values in columns.items():
            self.columns[name].append(values)
        self.meta["tokens"] += len(columns["tokens"])
        self.meta["bytes"] += bytes
        self.meta["truncated"] += truncated

    def append_targets(self, *, bytes: int, truncated: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """The targets of the items that were added last."""
        self.columns["target_offsets"].append(self.meta["target_tokens"] + np.cumsum(lengths))
        self.columns["target_tokens"].append(tokens)
        self.meta["target_longest"] = max(self.meta["target_longest"], int(lengths.max()))
        for name, count in (("tokens", len(tokens)), ("bytes", bytes), ("truncated", truncated)):
            self.meta[f"target_{name}"] += count

    def close(self) -> dict[str, Any]:
        for column in self.columns.values():
            column.close()
        return self.meta | {"longest": self.longest, "columns": sorted(self.columns)}


@contextlib.contextmanager
def split_writers(folder: Path, dtypes: dict[str, dict[str, Any]]) -> Iterator[dict[str, SplitWriter]]:
    """A writer for each split; whatever happens, no file stays open."""
    writers = {split: SplitWriter(folder, split, columns) for split, columns in dtypes.items()}
    try:
        yield writers
    finally:
        for writer in writers.values():
            for column in writer.columns.values():
                column.file.close()


@contextlib.contextmanager
def reference_files(folder: Path, splits: Sequence[str]) -> Iterator[Mapping[str, TextIO]]:
    """A file of JSON lines for each split, for what an evaluation compares texts with."""
    with contextlib.ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.references.jsonl").open("w", encoding="utf-8"))
            for split in splits
        }
        yield files
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())


def cache_dir(folder: str | Path | None = None) -> Path:
    """Where prepared data is kept: the folder given, OELM_CACHE_DIR, or ~/.cache/oelm."""
    return Path(folder or os.environ.get("OELM_CACHE_DIR") or Path.home() / ".cache" / "oelm")


def cached_store(root: Path, name: str, fingerprint: str, make: Callable[[Path], dict[str, Any]]) -> Store:
    """The store of that fingerprint: the one that is there, or a new one, made once however many ask.

    `make` fills an empty folder and returns the manifest. The folder gets its final name only when all of
    it is on disk, so a store that can be seen is complete.
    """
    # The format is part of the name: a version of the package finds only stores that it can read in full.
    final = root / "stores" / f"{name}-{fingerprint[:16]}-{FORMAT}"
    if (final / MANIFEST).is_file():  # no lock: a read-only cache can be used
        return open_store(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.with_suffix(".lock")):
            if not (final / MANIFEST).is_file():
                _make_beside(final, fingerprint, make)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache {root} ({error.strerror or error}); set OELM_CACHE_DIR"
        ) from None
    return open_store(final)


def _make_beside(final: Path, fingerprint: str, make: Callable[[Path], dict[str, Any]]) -> None:
    beside = final.with_name(final.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed: we hold its lock now
    beside.mkdir()
    try:
        meta = {"format": FORMAT, "fingerprint": fingerprint, **make(beside)}
        write_json(beside / MANIFEST, meta)
        beside.rename(final)
        sync_folder(final.parent)
    except BaseException:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(beside, ignore_errors=True)
        raise


def copy_store(store: Store, folder: Path) -> Store:
    """A copy of a store in a folder of the user's, which must not exist yet."""
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder")
    beside = folder.with_name(folder.name + ".part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(store.folder, beside)
        beside.rename(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return open_store(folder)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
