"""Writing stores: arrays that grow on disk, and a cache folder that several processes may share."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from oelm.data.manifest import FORMAT, MANIFEST, WITH_TEXTS, seal
from oelm.data.store import Store, open_store
from oelm.errors import UserError
from oelm.system.files import delete, folder_beside, lock_file, sync_folder, write_json
from oelm.system.messages import Notice, notice


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
def right_text_files(folder: Path, splits: Sequence[str]) -> Iterator[Mapping[str, TextIO]]:
    """A file of JSON lines for each split: the texts an evaluation compares with (`Split.right_texts`)."""
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
    it is on disk, so a store that can be seen is complete. One that is damaged is set aside and made again,
    and one without checksums replaced.
    """
    # The format is part of the name: a version of the package finds only stores that it can read in full.
    base = root / "stores" / f"{name}-{fingerprint[:16]}"
    final, older = (base.with_name(f"{base.name}-{number}") for number in (FORMAT, WITH_TEXTS))
    if not final.exists() and (kept := _look_up(older)[0]) is not None and kept.sealed:
        return kept
    found, problem = _look_up(final)  # no lock: a read-only cache can be used
    if found is not None and found.sealed:
        return found
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(final.with_suffix(".lock"), wait=True):
            there, problem = _look_up(final)  # another process may have made it
            if there is None or not there.sealed:
                _make_beside(final, fingerprint, make, keep_old=there is None)
    except OSError as error:
        if found is not None:  # without checksums, and it cannot be replaced
            return found
        raise UserError(
            f"cannot write to the cache {root} ({error.strerror or error}); set OELM_CACHE_DIR"
        ) from None
    store = open_store(final)
    if problem:
        store.warnings.append(notice("data.prepared_again", problem=problem))
    return store


def _look_up(final: Path) -> tuple[Store | None, Notice | None]:
    """The store there, if it can be used, and what is wrong with it, if it cannot."""
    if not (final / MANIFEST).exists():
        return None, None
    try:
        return open_store(final), None
    except UserError as error:
        return None, error.notice


def _make_beside(
    final: Path, fingerprint: str, make: Callable[[Path], dict[str, Any]], keep_old: bool
) -> None:
    with folder_beside(final) as beside:  # Ctrl-C too leaves nothing half-written
        meta = {"format": FORMAT, "fingerprint": fingerprint, **make(beside)}
        write_json(beside / MANIFEST, seal(meta, beside))
        if final.exists() or final.is_symlink():
            aside = final.with_name(f"{final.name}.damaged")
            delete(aside)
            final.rename(aside)
            if not keep_old:
                delete(aside)
        beside.rename(final)
        sync_folder(final.parent)


def copy_store(store: Store, folder: Path) -> Store:
    """A copy of a store in a folder of the user's, which must not exist yet."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already; name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(folder) as beside:
            shutil.copytree(store.folder, beside, dirs_exist_ok=True)
            beside.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return open_store(folder)
