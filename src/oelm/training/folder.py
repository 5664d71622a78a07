"""A run's folder: its lock, checks before it is written, and the records in it."""

import contextlib
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from oelm.config import LATER, RunConfig, make_config, read_toml, rebuild_config, to_toml
from oelm.errors import FolderInUse, UserError
from oelm.system.files import check_name, delete, lock_file, read_file, read_object, write_json, write_text
from oelm.system.messages import Notice, notice
from oelm.system.version import NUMERICS, __version__

RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "tokenizers", "safetensors", "triton")


class RunFolder:
    """The folder of one run, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fresh = False  # whether the run is new, not resumed
        self._extends = False  # whether a finished run is trained for more steps
        self._lock: IO[bytes] | None = None

    def open(self, config: RunConfig, overwrite: bool, data: str) -> None:
        """Lock the folder for a run of this configuration on the data with this fingerprint. The folder must
        be new, or hold an unfinished run of the same. A folder that is not a run is never touched, even with
        `overwrite`."""
        config_file = self.path / "config.toml"
        check_name(self.path)
        self._check_kind()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / "lock")
        except BlockingIOError:
            raise FolderInUse(
                f"{self.path} is in use by another process; wait for it or name another folder"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full disk is a fault, not a wrong path
                raise
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        for path in self.path.glob(".*.part"):  # left by a process that was killed
            delete(path)
        if overwrite:
            self._clear()
        elif config_file.exists():
            self._check_resumable(config, data)
        self.fresh = not config_file.exists()
        write_text(config_file, to_toml(config.to_dict()))
        if self._extends:
            delete(self.path / "results.json")  # it is unfinished again

    def extended(self, config: RunConfig, steps: int) -> RunConfig | None:
        """The config that trains the finished run of this folder for more steps, if `config` differs from it
        only in a larger number of `steps`; also for a run that was extended before. Otherwise None."""
        if not (self.path / "config.toml").is_file():
            return None
        existing, results_file = read_config(self.path), self.path / "results.json"
        results = read_object(results_file) if results_file.exists() else {}
        requested, recorded = (_without_length(c.identity(files=False)) for c in (config, existing))
        if requested != recorded or config.training.extended_from:
            return None
        ends = existing.training.extended_from
        if results.get("status") == "completed" and not results.get("stopped_early"):
            if not isinstance(ended := results.get("steps_planned"), int) or steps < ended:
                return None
            self._extends = steps > ended
            if self._extends:
                ends = ends if ended in ends else (*ends, ended)  # in it if an extension failed to start
        return replace(config, training=replace(config.training, extended_from=ends)) if ends else None

    def _check_kind(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a folder for a run")
        if (self.path / "config.toml").exists():
            read_config(self.path)
            return
        for name in sorted(path.name for path in self.path.iterdir()):
            # Only these are left by a run that was killed before it had written its configuration.
            if name != "lock" and not fnmatch(name, ".config.toml.*.part"):
                raise UserError(f"{self.path} is not a run (it holds {name}); name a new folder")

    def _clear(self) -> None:
        """Delete a run. Its checkpoints go first and in one step, so that a half-deleted run is never resumed
        from one of them; its configuration goes last, so that the folder is still recognised as a run."""
        checkpoints = self.path / "checkpoints"
        if checkpoints.exists():
            checkpoints.rename(self.path / ".checkpoints.part")
        for path in self.path.iterdir():
            if path.name not in ("config.toml", "lock"):
                delete(path)
        delete(self.path / "config.toml")

    def discard(self) -> None:
        """Undo `open` for a new run that could not start."""
        if self.fresh:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check_resumable(self, config: RunConfig, data: str) -> None:
        environment_file = self.path / "environment.json"
        used = read_object(environment_file).get("data") if environment_file.exists() else None
        # File names count only if the data differs, as a file may have moved.
        requested, recorded = (c.identity(files=used != data) for c in (config, read_config(self.path)))
        if self._extends and used == data:
            return
        if requested != recorded:
            raise UserError(
                f"{self.path} holds a run of another configuration ({difference(recorded, requested)}); "
                "name another folder, or --overwrite it"
            )
        results = self.path / "results.json"
        if results.exists() and read_object(results).get("status") == "completed":
            raise UserError(f"{self.path} holds a finished run; --overwrite it, or name another folder")
        if used not in (None, data):
            raise UserError(
                f"{self.path} holds a run on other data: it has changed since; "
                "name another folder, or --overwrite it"
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)


class MetricsLog:
    """metrics.jsonl: one object per log step and per evaluation, in the order of the steps.

    A resumed run cuts off what was logged after its checkpoint, so that a run that was killed and one that
    was not leave the same lines, times aside. `evaluated`: whether the checkpoint includes the evaluation of
    its step; `logged`: the number of lines when it was written, None if it was not recorded.
    """

    def __init__(self, path: Path, from_step: int, evaluated: bool, logged: int | None = None) -> None:
        kept: list[str] = []
        last = 0  # the step of the last line before the first damaged one
        undamaged = True
        exists = path.exists() or path.is_symlink()
        text = read_file(path, most=1 << 34).decode("utf-8", "replace") if exists else ""
        for line in text.splitlines():
            entry = read_entry(line)
            if entry is None:  # cut short by a crash, or damaged
                undamaged = False
                continue
            repeated = entry["step"] == from_step and entry["kind"] == "eval" and not evaluated
            if entry["step"] > from_step or repeated:
                break
            kept.append(line)
            last = entry["step"] if undamaged else last
        self.missing: Notice | None = None
        if logged is not None and len(kept) < logged:
            lost = logged - len(kept)
            self.missing = notice("training.metrics_lost", step=from_step, lost=lost, last=last)
        write_text(path, "".join(f"{line}\n" for line in kept))
        self.lines = len(kept)
        self.file = path.open("a", encoding="utf-8")

    def add(self, **values: Any) -> dict[str, Any]:
        """Write a line; returns its values."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        self.lines += 1
        return values

    def sync(self) -> None:
        """Flush all lines to disk, as those before a checkpoint are not written again by a resumed run."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the line was added
            self.file.close()


def read_entry(line: str) -> dict[str, Any] | None:
    """The values of a line of metrics.jsonl; None if it is damaged or cut short."""
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        entry = json.loads(line)
        if isinstance(entry["step"], int) and isinstance(entry["kind"], str):
            return entry
    return None


def read_config(folder: Path, follow: bool = True) -> RunConfig:
    """The configuration of the run in a folder; `follow`: read the file even if it is a link."""
    path = folder / "config.toml"
    if not path.exists():
        raise UserError(f"{folder} is not a run: it has no config.toml")
    values = read_toml(path, follow)
    if not isinstance(values.get("task"), dict) or not isinstance(values.get("training"), dict):
        raise UserError(f"{folder} is not a run: its config.toml is of something else")
    try:
        config = rebuild_config(values)
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder} is not a run of this version: config.toml: {error}") from None
    with contextlib.suppress(ImportError):  # training works without pydantic
        if make_config(values, str(path)) != config:
            raise UserError(f"{path} is damaged: a value is not of its kind")
    return config


def _without_length(identity: dict[str, Any]) -> dict[str, Any]:
    training = identity["training"]
    left = {key: value for key, value in training.items() if key not in ("steps", "epochs", "extended_from")}
    return identity | {"training": left}


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first key in which two configurations differ, in words."""
    left_out = flat(LATER)  # keys that an identity omits where they have their default
    old, new = left_out | flat(there), left_out | flat(here)
    for key in [*old, *new]:
        if old.get(key) != new.get(key):
            return f"{key} is {old.get(key)} there, {new.get(key)} here"
    return "no difference"


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one dict, with keys such as `training.lr`."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    return {k: v for key, value in values.items() for k, v in flat(value, f"{prefix}{key}.").items()}


def environment(device: Any, processes: int, numerics: int = NUMERICS) -> dict[str, Any]:
    """The environment of a run: versions, commit, hardware. No user name, no host name, no paths."""
    import torch

    packages = {}
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    values: dict[str, Any] = {
        "oelm": __version__,
        "numerics": numerics,
        "python": platform.python_version(),
        "packages": packages,
        "commit": source_commit(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cpu_threads": torch.get_num_threads(),
        "processes": processes,
        "device": str(device.type),
    }
    if device.type == "cuda":
        values |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return values


def arithmetic(about: dict[str, Any]) -> dict[str, str]:
    """The values of an environment that may change the last bits of a run's numbers."""
    names = {"threads": "cpu_threads", "processes": "processes", "device": "gpu" if "gpu" in about else "cpu"}
    return {name: str(about[key]) for name, key in names.items()} | about["packages"]


def changes(before: dict[str, str], now: dict[str, str]) -> list[Notice]:
    """A notice for each value that differs between two results of `arithmetic`."""
    keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    return [notice("training.changed", name=key, now=now.get(key), before=before.get(key)) for key in keys]


def source_commit() -> str | None:
    """The commit of the source tree that this package runs from, marked if the tree has uncommitted changes;
    None in a wheel."""
    if "OELM_COMMIT" in os.environ:  # set for a copy of the tree without its history
        return os.environ["OELM_COMMIT"]
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    run = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10
    ).stdout.strip()
    try:
        changed = "+changes" if run("status", "--porcelain", "--", "src") else ""
        return (run("rev-parse", "HEAD") + changed) or None
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    name = platform.processor() or sys.platform
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} x {os.cpu_count()}"
