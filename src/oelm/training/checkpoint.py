"""Checkpoints: atomic, checksummed, safetensors only.

    checkpoints/index.json                  {"last": "step-00000500", "best": "step-00000400"}
    checkpoints/step-00000500/model.safetensors      every parameter, by name
                             /optimizer.safetensors  AdamW's moments, by parameter and moment
                             /state.json             the run's progress: step, best evaluation, ...
                             /checksums.json         SHA-256 of the three

A model that is sharded over processes (FSDP2) is saved in shards, one of model and optimizer per process:
`shards.py`. Any number of processes, one too, reads either form.

A folder gets its name only when all of it is on disk, so one that can be seen was written whole. The index
is for readers: which checkpoint is last and best follows from the folders and their states, and a run that
was killed before it wrote the index writes it when it resumes.
"""

import functools
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oelm.data.manifest import sha256
from oelm.errors import RunError, UserError
from oelm.system.files import delete, read_json, sync_files, sync_folder, write_json
from oelm.system.library_errors import first_line, is_out_of_memory
from oelm.system.messages import Notice, notice
from oelm.training.parallel import gather_values
from oelm.training.shards import Rows, StoredTensors, local, sharded_files, stored_rows, write_shards

MODEL, OPTIMIZER, STATE, SUMS = "model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"
FILES = (MODEL, OPTIMIZER, STATE)
NAME = re.compile(r"step-\d{8,}")
MARGIN = 64 << 20  # bytes that must stay free beside a checkpoint, for the records of the run

FREE_FACTOR = 8  # copies stay on a GPU that has this many times their size free

Tensors = dict[str, Tensor]
# By the name of their weights, embeddings whose parameter holds only the rows in use, as
# `speed.live_rows.LiveEmbedding` does; a checkpoint holds all rows.
LiveEmbeddings = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, in memory or read from its files on access."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]
    rows: Rows = field(default_factory=dict)  # of a sharded model: the rows that `model` and `optimizer` hold


class TensorCopies(Mapping[str, Tensor]):
    """Copies of tensors, by name, on their device or the CPU. An embedding of which only some rows train is
    put together with its other rows on access."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.copies: dict[str, tuple[Tensor, Any, Tensor | None]] = {}

    def keep(self, name: str, tensor: Tensor, rows: Any, idle_rows: Tensor | None = None) -> None:
        if isinstance(tensor, DTensor) or self.on_cpu:
            copy = local(tensor)
        else:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.copies[name] = copy, rows if copy.dim() else None, idle_rows

    def __getitem__(self, name: str) -> Tensor:
        copy, rows, idle_rows = self.copies[name]
        return rows.all_rows(copy, idle_rows) if rows else copy

    def __iter__(self) -> Iterator[str]:
        return iter(self.copies)

    def __len__(self) -> int:
        return len(self.copies)


def copy_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, live: LiveEmbeddings
) -> tuple[TensorCopies, TensorCopies]:
    """Copies of every parameter and of every AdamW moment, by name; of a sharded model, the rows of this
    process. They stay on a GPU that has enough memory, as copying them to the CPU takes as long as hundreds
    of small steps."""
    parameters = dict(model.named_parameters())
    states = {
        f"{name}/{key}": (name, torch.as_tensor(moment))
        for name, parameter in parameters.items()
        for key, moment in optimizer.state.get(parameter, {}).items()
    }
    tensors = [*parameters.values(), *(moment for _, moment in states.values())]
    device = tensors[0].device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    on_cpu = free is not None and free < FREE_FACTOR * sum(tensor.nbytes for tensor in tensors)
    weights, moments = TensorCopies(on_cpu), TensorCopies(on_cpu)
    for name, parameter in parameters.items():
        rows = live.get(name)
        weights.keep(name, parameter, rows, rows.idle_rows if rows else None)
    for key, (name, moment) in states.items():
        moments.keep(key, moment, live.get(name))
    return weights, moments


def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer, live: LiveEmbeddings
) -> tuple[Tensors, Tensors]:
    """As `copy_state`, as plain tensors on the CPU."""
    weights, moments = copy_state(model, optimizer, live)
    return {k: v.to("cpu") for k, v in weights.items()}, {k: v.to("cpu") for k, v in moments.items()}


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, live: LiveEmbeddings
) -> None:
    """Load a checkpoint's values into the model and, if given, the optimizer; they are sharded as it is."""
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            if isinstance(parameter, DTensor):
                own = name in checkpoint.rows  # a checkpoint in memory holds this process's rows
                rows_here = checkpoint.model[name] if own else stored_rows(checkpoint.model, name, parameter)
                parameter.to_local().copy_(rows_here)
                continue
            value, rows = checkpoint.model[name], live.get(name)
            parameter.copy_((rows.select_live(value) if rows else value).to(parameter.device))
    if optimizer is None:
        return
    # A fused AdamW keeps its step counts on the parameters' device, the plain one on the CPU.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for key in checkpoint.optimizer:
        name, _, moment = key.rpartition("/")
        parameter, rows = names[name], live.get(name)
        state = optimizer.state[parameter]
        if isinstance(parameter, DTensor) and moment != "step":
            state.setdefault(moment, torch.zeros_like(parameter, requires_grad=False))
            own, tensors = name in checkpoint.rows, checkpoint.optimizer
            state[moment].to_local().copy_(tensors[key] if own else stored_rows(tensors, key, parameter))
            continue
        value = checkpoint.optimizer[key]
        value = rows.select_live(value) if rows and value.dim() else value
        placed = value if moment == "step" and not on_device else value.to(parameter.device)
        if moment in state:  # in place, as a recorded CUDA graph may read it
            state[moment].copy_(placed)
        else:  # cloned, as a loaded tensor may be mapped from its file, which is deleted later
            state[moment] = placed.clone()


class Checkpoints:
    """The checkpoints of a run. With several processes, all of them must call a method that loads."""

    def __init__(self, folder: Path, keep: int, state: PartialState | None = None) -> None:
        self.folder, self.keep, self.state = folder, keep, state
        self.problems: list[Notice] = []  # broken checkpoints that `load_last` passed over

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and delete those no longer kept; a failure leaves the existing ones intact. One
        process calls this for a whole checkpoint, every process for one in shards."""
        if checkpoint.rows:
            self._save_shards(checkpoint)
            return
        step = checkpoint.state["step"]
        beside = self._beside(step)
        delete(beside)
        self.check_space(_size(checkpoint))
        try:
            beside.mkdir()
            save_file(dict(checkpoint.model), beside / MODEL)
            save_file(dict(checkpoint.optimizer), beside / OPTIMIZER)
            self._complete(checkpoint.state, {name: sha256(beside / name) for name in (MODEL, OPTIMIZER)})
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            if is_out_of_memory(error):
                raise
            raise RunError(self._unsaved(step, error), "disk", notice("advice.free_space")) from None
        self._prune(checkpoint.state)

    def _beside(self, step: int) -> Path:
        return self.folder / f".{_name(step)}.part"

    def _unsaved(self, step: int, error: BaseException) -> Notice:
        return notice("run.unsaved", step=step, error=first_line(error), checkpoint=self.last())

    def _complete(self, state: dict[str, Any], sums: dict[str, str]) -> None:
        """Write state and checksums beside the tensors, then give the folder its name."""
        name, beside = _name(state["step"]), self._beside(state["step"])
        write_json(beside / STATE, state)
        write_json(beside / SUMS, sums | {STATE: sha256(beside / STATE)})
        sync_files(beside)
        self._drop(self.folder / name)  # a broken checkpoint of the same step, from before the run resumed
        beside.rename(self.folder / name)
        sync_folder(self.folder)
        write_json(self.folder / "index.json", _index(state))

    def _save_shards(self, checkpoint: Checkpoint) -> None:
        """Each process writes the rows that it holds; the first one makes the folder, and gives it its name
        when every shard is on disk."""
        assert self.state is not None
        state, number, count = checkpoint.state, self.state.process_index, self.state.num_processes
        beside, tensors = self._beside(state["step"]), (checkpoint.model, checkpoint.optimizer)
        size = sum(gather_values(_size(checkpoint), self.state))

        def begin() -> None:
            delete(beside)
            self.check_space(size)
            beside.mkdir()

        self._in_every_process(state["step"], begin, first_only=True)
        write = functools.partial(write_shards, beside, number, count, tensors, checkpoint.rows)
        sums = {
            name: value
            for part in self._in_every_process(state["step"], write)
            for name, value in part.items()
        }
        complete = functools.partial(self._complete, state, sums)
        self._in_every_process(state["step"], complete, first_only=True)
        if number == 0:
            self._prune(state)

    def _in_every_process(self, step: int, action: Callable[[], T], first_only: bool = False) -> list[T]:
        """Run the action in every process, or the first only, and return each process's value. If one fails,
        all raise its RunError, so that none waits for the others."""
        assert self.state is not None
        number, value, failure = self.state.process_index, None, None
        try:
            value = action() if number == 0 or not first_only else None
        except RunError as error:
            failure = (error.notice, error.kind, error.advice)
        except (OSError, SafetensorError, MemoryError) as error:
            memory = is_out_of_memory(error)
            advice = notice("advice.accumulate" if memory else "advice.free_space")
            failure = (self._unsaved(step, error), "memory" if memory else "disk", advice)
        values, failures = zip(*gather_values((value, failure), self.state), strict=True)
        if failed := next(filter(None, failures), None):
            if number == 0:
                shutil.rmtree(self._beside(step), ignore_errors=True)
            raise RunError(*failed)
        return list(values)

    def names(self) -> list[str]:
        """The checkpoints on disk, oldest first."""
        return sorted(path.name for path in self.folder.glob("step-*") if NAME.fullmatch(path.name))

    def last(self) -> str | None:
        """The name of the newest checkpoint; None if there is none."""
        return next(reversed(self.names()), None)

    def load_last(self) -> Checkpoint | None:
        """The newest intact checkpoint; broken ones are skipped and reported in `problems`."""
        for name in reversed(gather_values(self.names(), self.state)[0]):
            try:
                checkpoint = read_checkpoint(self.folder / name, self.state)
            except UserError as error:
                self.problems.append(notice("checkpoint.use_previous", problem=error.notice))
                continue
            self._check_best(checkpoint.state)
            return checkpoint
        if self.problems:
            self.problems.append(notice("checkpoint.none_whole"))
        return None

    def _check_best(self, state: dict[str, Any]) -> None:
        """Reset the best score if the weights of the best evaluation are lost, so that the best is determined
        again from this step on. This happens when the newest checkpoint, which was the best, is broken: the
        best one before it was deleted when it was written. Training then reaches the same best again."""
        best = state.get("best")
        if best is None or best["step"] == state["step"]:
            return
        try:
            _same_outcome(
                functools.partial(_check, self.folder / _name(best["step"]), self.state), self.state
            )
        except UserError as error:
            self.problems.append(notice("checkpoint.best_lost", problem=error.notice, step=state["step"]))
            final = state["final"]
            state["best"] = final if final and final["step"] == state["step"] else None

    def clean_up(self, state: dict[str, Any]) -> None:
        """Write the index and delete what is no longer kept, in case a process was killed before it did
        so."""
        write_json(self.folder / "index.json", _index(state))
        if not self.problems:  # a broken checkpoint stays until another is written in its place
            self._prune(state)

    def load(self, step: int) -> Checkpoint:
        try:
            return read_checkpoint(self.folder / _name(step), self.state)
        except UserError as error:
            raise RunError(error.notice, "disk", notice("advice.resume")) from None

    def check_space(self, size: int) -> None:
        """Raise RunError if the disk has too little space for a checkpoint of `size` bytes."""
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
        """Delete a checkpoint. It is renamed first, so that a kill halfway leaves no half checkpoint."""
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


def _size(checkpoint: Checkpoint) -> int:
    return sum(t.nbytes for t in (*checkpoint.model.values(), *checkpoint.optimizer.values()))


def read_checkpoint(path: Path, state: PartialState | None = None) -> Checkpoint:
    """Read a checkpoint whose checksums match; UserError, with what is wrong, for any other. Several
    processes share the checking, and all return or raise alike."""
    # All processes finish checking before one opens a file that another has checked.
    shards = _same_outcome(lambda: _check(path, state), state)
    return _same_outcome(lambda: _read(path, shards), state)


def _same_outcome(action: Callable[[], T], state: PartialState | None) -> T:
    """The value of the action; if it raises a UserError in one process, all processes raise it."""
    try:
        value, problem = action(), None
    except UserError as error:
        value, problem = None, error.notice
    if problems := [*filter(None, gather_values(problem, state))]:
        raise UserError(problems[0]) from None
    return value  # type: ignore[return-value]


def _read(path: Path, shards: list[str]) -> Checkpoint:
    try:
        state = read_json(path / STATE)
        if not isinstance(state, dict) or _name(state["step"]) != path.name:
            raise UserError(notice("checkpoint.other_state", file=STATE))
        if shards:
            half = len(shards) // 2
            parts = [[path / name for name in names] for names in (shards[:half], shards[half:])]
            return Checkpoint(StoredTensors(parts[0]), StoredTensors(parts[1]), state)
        return Checkpoint(load_file(path / MODEL), load_file(path / OPTIMIZER), state)
    except (UserError, SafetensorError, KeyError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"there is not enough memory to read {path}") from None
        raise _broken(path, error.notice if isinstance(error, UserError) else first_line(error)) from None


def _check(path: Path, state: PartialState | None) -> list[str]:
    """Check this process's share of the files; returns the names of the shards, empty for a whole
    checkpoint."""
    try:
        sums = read_json(path / SUMS)
    except UserError as error:
        raise _broken(path, error.notice) from None
    shards = sharded_files([*sums]) if isinstance(sums, dict) else []
    files = [*shards, STATE] if shards else list(FILES)
    if not isinstance(sums, dict) or sorted(sums) != sorted(files):
        raise _broken(path, notice("checkpoint.no_files", file=SUMS))
    first, count = (state.process_index, state.num_processes) if state else (0, 1)
    for name in files[first::count]:
        try:
            if not stat.S_ISREG((path / name).stat().st_mode):  # reading a pipe would block
                raise _broken(path, notice("checkpoint.irregular", file=name))
            actual = sha256(path / name)
        except OSError as error:
            raise _broken(path, notice("checkpoint.unreadable", file=name, error=error.strerror)) from None
        if actual != sums[name]:
            raise _broken(path, notice("checkpoint.checksum", file=name))
    return shards


def _broken(path: Path, problem: Notice | str) -> UserError:
    return UserError(notice("checkpoint.broken", name=path.name, problem=problem))
