"""Files: written completely or not at all (a synced temporary file is renamed), read safely, locked,
named."""

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

LONGEST_NAME = 200  # bytes of a new name; file systems allow 255, and temporary names are longer


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Replace a file in one step: a reader sees the old bytes or the new ones, even after a crash."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = str(path)  # which the user knows
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_file(path: Path, follow: bool = True, most: int = 1 << 28) -> bytes:
    """The bytes of a regular file. Pipes and devices, which may never end, are refused; so are links with
    `follow=False`. Raises FileNotFoundError, or UserError for every other reason."""
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


def check_regular(path: Path, status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        code = "file.link" if stat.S_ISLNK(status.st_mode) else "file.irregular"
        raise UserError(notice(code, path=path))
    if status.st_size > most:
        raise UserError(notice("file.too_large", path=path, size=status.st_size, most=most))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(notice("file.damaged", path=path, problem=notice("value.not_object")))
    return value


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
    """Copy a regular file of at most `most` bytes; links are refused."""
    check_regular(path, path.lstat(), most)
    with path.open("rb") as file, to.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def delete(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_files(folder: Path) -> None:
    """Write every file of this folder to the disk, so that it is complete after a power cut."""
    for path in folder.iterdir():
        sync_file(path)


def sync_file(path: Path) -> None:
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
    """Lock a file for as long as the returned file is open; the system unlocks it when the process dies.

    Without `wait`, raises BlockingIOError if another process holds the lock. Only a regular file is locked:
    opening a link could open, or create, another user's file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    no_lock = UserError(f"{path} is a link or a special file where a lock was expected; delete it")
    try:
        file = open(os.open(path, flags, 0o666), "r+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise no_lock if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) else error from None
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise no_lock
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        # Continue if the file system, such as some NFS, has no locks: a study's workers do not need them.
        if getattr(error, "errno", None) not in (errno.ENOLCK, errno.EOPNOTSUPP):
            file.close()
            raise
    return file


@contextlib.contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """A new folder beside `final` to write into; the caller renames it, otherwise it is deleted.

    It is locked while in use. Folders that killed processes left are not locked, and are deleted here.
    """
    prefix, suffix = f".{final.name}.oelm-", ".part"
    for path in final.parent.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(suffix):
            with contextlib.suppress(OSError), locked_folder(path):
                shutil.rmtree(path, ignore_errors=True)
    beside = final.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")
    beside.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # on a file system without locks, leftovers stay
                stack.enter_context(locked_folder(beside))
            yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(path: Path, wait: bool = False) -> Iterator[None]:
    """As `lock_file`, on the folder itself, so that no lock file is left."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def cache_dir(folder: str | Path | None = None) -> Path:
    """The folder of prepared data: `folder`, else OELM_CACHE_DIR, else ~/.cache/oelm."""
    return Path(folder or os.environ.get("OELM_CACHE_DIR") or Path.home() / ".cache" / "oelm")


def check_name(path: Path) -> None:
    """Refuse a name of a new file or folder that is not UTF-8 or is too long for file systems."""
    try:
        lengths = [len(part.encode("utf-8")) for part in path.parts]
    except UnicodeEncodeError:
        raise UserError(f"{path} is not a name in UTF-8; name another folder") from None
    if max(lengths, default=0) > LONGEST_NAME:
        raise UserError(f"{path} is a name of more than {LONGEST_NAME} bytes; choose a shorter one")


def folder_name(name: str, most: int, also: str = "-_") -> str:
    """A folder's name from any text: letters, digits and the characters of `also` stay, others become "-"."""
    safe = "".join(letter if letter.isalnum() or letter in also else "-" for letter in name)[:most]
    return safe.strip(".") or "-"
