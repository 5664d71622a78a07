"""Checkpoints: atomic, checksummed, safetensors only.

    checkpoints/index.json                  {"last": "step-00000500", "best": "step-00000400"}
    checkpoints/step-00000500/model.safetensors      every parameter, by name
                             /optimizer.safetensors  AdamW's moments, by parameter and moment
                             /state.json             where the run stood
                             /checksums.json         SHA-256 of the three

A folder gets its name only when all of it is on disk, so one that can be seen was written whole. The index
is for readers: what is last and best follows from the folders and their states, and a run that was killed
before the index was written puts it right when it resumes.
"""

import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.data.manifest import sha256
from oelm.errors import RunError, UserError
from oelm.system.files import delete, read_json, sync_files, sync_folder, write_json
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import Notice, notice

MODEL, OPTIMIZER, STATE, SUMS = "model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"
FILES = (MODEL, OPTIMIZER, STATE)
NAME = re.compile(r"step-\d{8,}")
MARGIN = 64 << 20  # bytes that must stay free beside a checkpoint: the records of the run

Tensors = dict[str, Tensor]
# By the name of their weights, embeddings whose parameter holds only the rows in use, as
# `speed.live_rows.LiveEmbedding` does; a checkpoint holds all rows.
Short = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, in memory."""

    model: Tensors
    optimizer: Tensors
    state: dict[str, Any]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on the CPU; a shard is gathered, so every process must ask."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, short: Short) -> tuple[Tensors, Tensors]:
    """Every parameter, and every moment of those that have any, by name."""
    parameters, moments = {}, {}
    for name, parameter in model.named_parameters():
        value, rows = whole(parameter), short.get(name)
        parameters[name] = rows.widened(value, rows.aside) if rows else value
        for key, moment in optimizer.state.get(parameter, {}).items():
            value = whole(torch.as_tensor(moment))
            moments[f"{name}/{key}"] = rows.widened(value) if rows and value.dim() else value
    return parameters, moments


def full_state(model: nn.Module) -> Tensors:
    """The state dict as a whole model would give it; what is tied stays one tensor."""
    values = model.state_dict(keep_vars=True)
    tensors = {id(value): whole(value) for value in {id(v): v for v in values.values()}.values()}
    return {name: tensors[id(value)] for name, value in values.items()}


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, short: Short
) -> None:
    """Put a checkpoint's values where they came from, sharded as the model is."""
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            value, rows = checkpoint.model[name], short.get(name)
            parameter.copy_(_like(rows.narrowed(value) if rows else value, parameter))
    if optimizer is None:
        return
    # A fused AdamW keeps its step counts beside the parameters, the plain one on the CPU.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for key, value in checkpoint.optimizer.items():
        name, _, moment = key.rpartition("/")
        parameter, rows = names[name], short.get(name)
        value = rows.narrowed(value) if rows and value.dim() else value
        placed = value if moment == "step" and not on_device else _like(value, parameter)
        state = optimizer.state[parameter]
        if moment in state:  # where it is, it may be part of a recorded step
            state[moment].copy_(placed)
        else:  # a copy: what is read from a file may still be that file, and checkpoints are deleted in time
            state[moment] = placed.clone()


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if hasattr(parameter, "full_tensor") and value.dim():
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return value.to(parameter.device)


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.problems: list[Notice] = []  # broken checkpoints met while looking for a good one

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop those no longer kept. A failure leaves all that was there intact."""
        step = checkpoint.state["step"]
        name = _name(step)
        beside = self.folder / f".{name}.part"
        delete(beside)
        self.check_space(sum(t.nbytes for t in (*checkpoint.model.values(), *checkpoint.optimizer.values())))
        try:
            beside.mkdir()
            save_file(checkpoint.model, beside / MODEL)
            save_file(checkpoint.optimizer, beside / OPTIMIZER)
            write_json(beside / STATE, checkpoint.state)
            write_json(beside / SUMS, {name: sha256(beside / name) for name in FILES})
            sync_files(beside)
            self._drop(self.folder / name)  # the same step, found broken when the run resumed
            beside.rename(self.folder / name)
            sync_folder(self.folder)
            write_json(self.folder / "index.json", _index(checkpoint.state))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            if is_out_of_memory(error):
                raise
            reason = notice("run.unsaved", step=step, error=first_line(error), checkpoint=self.last())
            raise RunError(reason, "disk", notice("advice.free_space")) from None
        self._prune(checkpoint.state)

    def names(self) -> list[str]:
        """The checkpoints on disk, oldest first."""
        return sorted(path.name for path in self.folder.glob("step-*") if NAME.fullmatch(path.name))

    def last(self) -> str | None:
        """The newest checkpoint: one that can be seen was written whole."""
        return next(reversed(self.names()), None)

    def load_last(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; broken ones are reported in `problems` and passed over."""
        for name in reversed(self.names()):
            try:
                checkpoint = read_checkpoint(self.folder / name)
            except UserError as error:
                self.problems.append(notice("checkpoint.use_previous", problem=error.notice))
                continue
            self._check_best(checkpoint.state)
            return checkpoint
        if self.problems:
            self.problems.append(notice("checkpoint.none_whole"))
        return None

    def _check_best(self, state: dict[str, Any]) -> None:
        """Where the weights of the best evaluation are gone, look for the best anew from this step on. A run
        that falls back to the checkpoint before a best one meets that case: the best before it was deleted
        when the new one was written. It finds the new one again, because the best score is reset."""
        best = state.get("best")
        if best is None or best["step"] == state["step"]:
            return
        try:
            _check(self.folder / _name(best["step"]))
        except UserError as error:
            self.problems.append(notice("checkpoint.best_lost", problem=error.notice, step=state["step"]))
            final = state["final"]
            state["best"] = final if final and final["step"] == state["step"] else None

    def clean_up(self, state: dict[str, Any]) -> None:
        """Do what a killed process could not: write the index and delete what is no longer kept."""
        write_json(self.folder / "index.json", _index(state))
        if not self.problems:  # a broken checkpoint stays until another was written in its place
            self._prune(state)

    def load(self, step: int) -> Checkpoint:
        try:
            return read_checkpoint(self.folder / _name(step))
        except UserError as error:
            raise RunError(error.notice, "disk", notice("advice.resume")) from None

    def check_space(self, size: int) -> None:
        """Refuse to start a write that the disk has no room for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < size + MARGIN:
            needed = (size + MARGIN) / 1e6
            reason = notice("run.no_space", folder=self.folder, free_mb=free / 1e6, needed_mb=needed)
            raise RunError(reason, "disk", notice("advice.free_space"))

    def _prune(self, state: dict[str, Any]) -> None:
        index, names = _index(state), self.names()
        good = [name for name in names if name <= index["last"]]  # a later one is broken
        for name in set(names) - {index.get("best"), *good[-self.keep :]}:
            self._drop(self.folder / name)
        for path in self.folder.glob(".*.part"):  # left by a process that was killed
            delete(path)

    def _drop(self, path: Path) -> None:
        """Delete a checkpoint. It loses its name first: a kill halfway leaves nothing that looks like one."""
        if path.exists() or path.is_symlink():
            gone = self.folder / f".{path.name}.old.part"
            delete(gone)
            path.rename(gone)
            delete(gone)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _index(state: dict[str, Any]) -> dict[str, str]:
    best = state.get("best")
    return {"last": _name(state["step"])} | ({"best": _name(best["step"])} if best else {})


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose checksums are right; anything else is a UserError that says what is wrong."""
    _check(path)
    try:
        state = read_json(path / STATE)
        if not isinstance(state, dict) or _name(state["step"]) != path.name:
            raise UserError(notice("checkpoint.other_state", file=STATE))
        return Checkpoint(load_file(path / MODEL), load_file(path / OPTIMIZER), state)
    except (UserError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"there is not enough memory to read {path}") from None
        raise _broken(path, error.notice if isinstance(error, UserError) else first_line(error)) from None


def _check(path: Path) -> None:
    try:
        sums = read_json(path / SUMS)
    except UserError as error:
        raise _broken(path, error.notice) from None
    if not isinstance(sums, dict) or sorted(sums) != sorted(FILES):
        raise _broken(path, notice("checkpoint.no_files", file=SUMS))
    for name, recorded in sums.items():
        try:
            if not stat.S_ISREG((path / name).stat().st_mode):  # a pipe would be waited for
                raise _broken(path, notice("checkpoint.irregular", file=name))
            actual = sha256(path / name)
        except OSError as error:
            raise _broken(path, notice("checkpoint.unreadable", file=name, error=error.strerror)) from None
        if actual != recorded:
            raise _broken(path, notice("checkpoint.checksum", file=name))


def _broken(path: Path, problem: Notice | str) -> UserError:
    return UserError(notice("checkpoint.broken", name=path.name, problem=problem))
