"""Writing stores: arrays that grow on disk, and a cache folder that several processes may share."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from oelm.data.manifest import FORMAT, MANIFEST, seal
from oelm.data.store import Store, open_store
from oelm.errors import UserError
from oelm.system.files import delete, folder_beside, lock_file, sync_folder, write_json
from oelm.system.library_errors import why_not_written
from oelm.system.messages import Notice, notice


class ArrayWriter:
    """A one-dimensional .npy file written piece by piece: memory does not grow with it."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.file = path.open("wb")
        self._header()

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
        close_synced(self.file)


class SplitWriter:
    """Writes the columns of one split: items, or one undivided stream for a corpus."""

    def __init__(self, folder: Path, name: str, dtypes: dict[str, Any]) -> None:
        self.columns = {
            column: ArrayWriter(folder / f"{name}.{column}.npy", t) for column, t in dtypes.items()
        }
        self.texts_path = folder / f"{name}.references.jsonl"
        self.texts: IO[str] | None = None
        self.prefixes = [prefix for prefix in ("", "target_") if f"{prefix}tokens" in dtypes]
        counted = ("tokens", "bytes", "truncated", "longest")
        self.meta: dict[str, Any] = {"items": 0}
        self.meta |= {f"{prefix}{key}": 0 for prefix in self.prefixes for key in counted}
        for column in self.columns.keys() & {"offsets", "target_offsets"}:
            self.columns[column].append(np.zeros(1, dtype=np.int64))

    def append(self, **values: Any) -> None:
        """Add items (with `lengths`) or a piece of a stream (without): a value for every column, and `bytes`
        and `truncated` to be summed; each also with the prefix `target_` where items have targets."""
        self.meta["items"] += len(values.get("lengths", ()))
        for prefix in self.prefixes:
            if (lengths := values.get(f"{prefix}lengths")) is not None:
                values[f"{prefix}offsets"] = self.meta[f"{prefix}tokens"] + np.cumsum(lengths)
                self.meta[f"{prefix}longest"] = max(self.meta[f"{prefix}longest"], int(lengths.max()))
            self.meta[f"{prefix}tokens"] += len(values[f"{prefix}tokens"])
            for key in ("bytes", "truncated"):
                self.meta[f"{prefix}{key}"] += values.get(f"{prefix}{key}", 0)
        for name, column in self.columns.items():
            column.append(values[name])

    def append_texts(self, records: list[dict[str, Any]]) -> None:
        """Add texts that an evaluation compares with (`Split.right_texts`)."""
        if self.texts is None:
            self.texts = self.texts_path.open("w", encoding="utf-8")
        self.texts.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def close(self) -> dict[str, Any]:
        for column in self.columns.values():
            column.close()
        if self.texts is not None:
            close_synced(self.texts)
        return self.meta | {"columns": sorted(self.columns)}


def close_synced(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


@contextlib.contextmanager
def split_writers(folder: Path, dtypes: dict[str, dict[str, Any]]) -> Iterator[dict[str, SplitWriter]]:
    """A context with a writer for each split; all files are closed at its end, also after an error."""
    writers = {split: SplitWriter(folder, split, columns) for split, columns in dtypes.items()}
    try:
        yield writers
    finally:
        for writer in writers.values():
            for file in (*(column.file for column in writer.columns.values()), writer.texts):
                if file is not None:
                    file.close()


def cached_store(root: Path, name: str, fingerprint: str, make: Callable[[Path], dict[str, Any]]) -> Store:
    """The store of that fingerprint, from the cache or made now; made once even if several processes need it.

    `make` fills an empty folder and returns the manifest. The folder gets its final name only when all of it
    is on disk, so a store that can be seen is complete. A damaged one is set aside and made again.
    """
    # The format is part of the name, so that a version of the package uses only stores that it can read.
    final = root / "stores" / f"{name}-{fingerprint[:16]}-{FORMAT}"
    store, problem = _open_if_usable(final)  # no lock: a read-only cache can be used
    if store is not None:
        return store
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(final.with_suffix(".lock"), wait=True):
            existing, problem = _open_if_usable(final)  # another process may have made it
            if existing is None:
                with folder_beside(final) as beside:  # Ctrl-C too leaves nothing half-written
                    meta = {"format": FORMAT, "fingerprint": fingerprint, **make(beside)}
                    write_json(beside / MANIFEST, seal(meta, beside))
                    if final.exists() or final.is_symlink():
                        aside = final.with_name(f"{final.name}.damaged")
                        delete(aside)
                        final.rename(aside)
                    beside.rename(final)
                    sync_folder(final.parent)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache {root} ({why_not_written(error)}); make room, or set OELM_CACHE_DIR"
        ) from None
    store = open_store(final)
    if problem:
        store.warnings.append(notice("data.prepared_again", problem=problem))
    return store


def _open_if_usable(final: Path) -> tuple[Store | None, Notice | None]:
    """The store in this folder if it can be used, otherwise the problem with it; (None, None) without one."""
    if not (final / MANIFEST).exists():
        return None, None
    try:
        return open_store(final), None
    except UserError as error:
        return None, error.notice


def copy_store(store: Store, folder: Path, task: dict[str, Any] | None = None) -> Store:
    """Copy a store to a new folder. Its manifest keeps `task`, the choice by which a named task recognises
    it."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(folder) as beside:
            shutil.copytree(store.folder, beside, dirs_exist_ok=True)
            if task is not None:
                meta = {key: value for key, value in store.meta.items() if key not in ("checksums", "digest")}
                write_json(beside / MANIFEST, seal(meta | {"prepared_as": task}, beside))
            beside.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return open_store(folder)
