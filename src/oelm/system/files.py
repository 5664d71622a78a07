"""Files that are either there whole or not at all: written beside, synced, renamed. One lock, and names."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from oelm.errors import UserError
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import notice


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


def read_file(path: Path, follow: bool = True, most: int = 1 << 28) -> bytes:
    """The bytes of a regular file; anything else, a pipe or a device, would be waited for or never end.

    `follow=False` refuses a link as well. Raises FileNotFoundError, or UserError for all other reasons.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        with open(handle, "rb") as file:
            check_regular(path, os.fstat(handle), most)
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_out_of_memory(error):
            raise MemoryError(f"{path} does not fit into memory") from None
        if error.errno == errno.ELOOP:
            raise UserError(notice("file.link", path=path)) from None
        raise UserError(notice("file.unreadable", path=path, error=error.strerror or str(error))) from None


def check_regular(path: Path, found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        code = "file.link" if stat.S_ISLNK(found.st_mode) else "file.irregular"
        raise UserError(notice(code, path=path))
    if found.st_size > most:
        raise UserError(notice("file.too_large", path=path, size=found.st_size, most=most))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(notice("file.damaged", path=path, problem=notice("value.not_object")))
    return found


def read_json(path: Path, follow: bool = True) -> Any:
    try:
        return json.loads(read_file(path, follow).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(notice("file.missing", path=path)) from None
    except UserError:
        raise
    except RecursionError:
        raise UserError(notice("file.nested", path=path)) from None
    except ValueError as error:
        raise UserError(notice("file.unreadable", path=path, error=first_line(error))) from None


def copy_file(path: Path, to: Path, most: int) -> None:
    """Copy a regular file of at most so many bytes; a link is not followed."""
    check_regular(path, path.lstat(), most)
    with path.open("rb") as file, to.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def delete(path: Path) -> None:
    """Delete whatever is there; `shutil.rmtree` would wait for a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def lock_file(path: Path, wait: bool = False) -> IO[bytes]:
    """Hold a file's lock as long as the returned file is open; the kernel lets go when the holder dies.

    Without `wait`, raises BlockingIOError where another process holds it. A link or anything else that is
    not a regular file is refused: to lock it would open, or make, a file that is not ours.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = open(os.open(path, flags, 0o666), "r+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _no_lock(path) from None
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _no_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


def _no_lock(path: Path) -> UserError:
    return UserError(f"{path} should be a lock, and is a link or no regular file: delete it")


@contextlib.contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """A new folder beside `final`, to be filled and renamed; deleted where it was not renamed.

    Its name is one that nothing of the user's has, and while it is in use it is locked, so that what a
    killed process left can be told from it and is deleted here.
    """
    prefix, suffix = f".{final.name}.oelm-", ".part"
    for path in final.parent.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(suffix):
            with contextlib.suppress(OSError), _locked_folder(path):
                shutil.rmtree(path, ignore_errors=True)
    beside = final.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")
    beside.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks: then leftovers stay
                stack.enter_context(_locked_folder(beside))
            yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def check_name(path: Path) -> None:
    """Refuse a name that is not UTF-8: it could be written, but in no record, page or message."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{path} is not a name in UTF-8; name another folder") from None


def folder_name(name: str, most: int, also: str = "-_") -> str:
    """A name as a folder's: letters and digits, what is in `also`, and nothing that means something there."""
    return "".join(letter if letter.isalnum() or letter in also else "-" for letter in name)[:most].strip(".")
