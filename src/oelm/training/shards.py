"""Checkpoints in shards: under FSDP2 every process writes the rows that it holds, and reads those it needs.

    model-00002-of-00003.safetensors        of every parameter, the rows of the second of three processes
    optimizer-00002-of-00003.safetensors    of every moment, the same rows

The metadata of a shard say, as JSON under `rows`, with which row of how many each of its tensors begins. So
any number of processes can read them, and none has to hold a whole model. What has no rows, such as AdamW's
step counts, is in the first shard only.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from oelm.data.manifest import sha256
from oelm.system.files import sync_file

Rows = dict[str, tuple[int, int]]  # by name: the first row of this process, and the rows of the whole tensor
KINDS = ("model", "optimizer")
NAME = re.compile(r"(?:model|optimizer)-\d{5,}-of-(\d{5,})\.safetensors")


def shard_files(kind: str, of: int) -> list[str]:
    return [f"{kind}-{number + 1:05d}-of-{of:05d}.safetensors" for number in range(of)]


def sharded_files(names: list[str]) -> list[str]:
    """The shards of a checkpoint, of which these are files; empty where it is not in shards."""
    of = {int(match[1]) for name in names if (match := NAME.fullmatch(name))}
    return [file for kind in KINDS for file in shard_files(kind, min(of))] if of else []


def own_rows(parameter: Tensor) -> tuple[int, int] | None:
    """The first row of a parameter that this process holds, and how many it has in all; None where it is not
    sharded."""
    if not isinstance(parameter, DTensor):
        return None
    assert parameter.placements == (Shard(0),), f"sharded by rows only, not {parameter.placements}"
    total, processes = parameter.shape[0], parameter.device_mesh.size()
    each = -(-total // processes)  # the last ones may have fewer, or none
    return min(parameter.device_mesh.get_local_rank() * each, total), total


def rows_of(model: nn.Module) -> Rows:
    """Which rows of its parameters this process holds; empty where the model is not sharded."""
    found = {name: own_rows(parameter) for name, parameter in model.named_parameters()}
    return {name: rows for name, rows in found.items() if rows is not None}


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, on the CPU, as a copy."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().to("cpu", copy=True).contiguous()


def full_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """The state dict as a whole model would give it; what is tied stays one tensor. Every process must ask;
    one that does not `keep` it gets an empty one, and holds one whole tensor at a time."""
    values = model.state_dict(keep_vars=True)
    tensors: dict[int, Tensor] = {}
    for value in {id(v): v for v in values.values()}.values():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            tensors[id(value)] = full.detach().to("cpu", copy=True).contiguous()
    return {name: tensors[id(value)] for name, value in values.items()} if keep else {}


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter that holds infinities or NaN; of a sharded model, in this process's
    rows. Looked for on the device: a CPU takes as long for it as for copying all of them."""
    held = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    finite = torch.stack([value.detach().isfinite().all() for value in held.values()]).tolist()
    return next((name for name, fine in zip(held, finite, strict=True) if not fine), None)


def write_shards(
    folder: Path, number: int, of: int, kinds: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], rows: Rows
) -> dict[str, str]:
    """Write the shards of process `number` of `of`, its parameters and moments. Returns their checksums."""
    sums = {}
    for kind, tensors in zip(KINDS, kinds, strict=True):
        at = {key: rows[key if kind == "model" else key.rpartition("/")[0]] for key in tensors}
        divided = {key: value for key, value in tensors.items() if value.dim()}
        held = {key: value for key, value in divided.items() if len(value)}
        if number == 0:
            held |= {key: value for key, value in tensors.items() if not value.dim()}
        path = folder / shard_files(kind, of)[number]
        save_file(held, path, {"rows": json.dumps({key: at[key] for key in held if key in divided})})
        sync_file(path)
        sums[path.name] = sha256(path)
    return sums


class Stored(Mapping[str, Tensor]):
    """The tensors of all shards of one kind, read when they are asked for, whole or some of their rows."""

    def __init__(self, files: list[Path]) -> None:
        """Raises ValueError where rows of a tensor are missing, SafetensorError for what is no such file."""
        self.parts: dict[str, list[tuple[int, Any]]] = {}  # by name: first row, and the file it is in
        totals: dict[str, int] = {}
        for path in files:
            file = safe_open(path, framework="pt")
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118
                first, totals[name] = rows.get(name, (0, 1))
                self.parts.setdefault(name, []).append((first, file))
        self.shapes = {name: self._shape(name, totals[name]) for name in self.parts}

    def _shape(self, name: str, total: int) -> tuple[int, ...]:
        self.parts[name].sort(key=lambda part: part[0])
        shapes = [(first, file.get_slice(name).get_shape()) for first, file in self.parts[name]]
        if not shapes[0][1]:
            return ()
        there = 0
        for first, shape in shapes:
            if first != there:
                raise ValueError(f"rows {there} to {first} of {name} are missing")
            there += shape[0]
        if there != total:
            raise ValueError(f"rows {there} to {total} of {name} are missing")
        return total, *shapes[0][1][1:]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor, the last one left out."""
        found = []
        for at, file in self.parts[name]:
            part = file.get_slice(name)
            begin, end = max(first - at, 0), min(last - at, part.get_shape()[0])
            if begin < end:
                found.append(part[begin:end])
        if not found:
            return file.get_slice(name)[0:0]
        return found[0] if len(found) == 1 else torch.cat(found)

    def __getitem__(self, name: str) -> Tensor:
        if not self.shapes[name]:
            return self.parts[name][0][1].get_tensor(name)
        return self.rows(name, 0, self.shapes[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def stored_rows(tensors: Mapping[str, Tensor], key: str, parameter: DTensor) -> Tensor:
    """The rows of a stored tensor that this process holds of a sharded parameter. Raises ValueError where the
    whole ones have not the same shape."""
    shape = tensors.shapes[key] if isinstance(tensors, Stored) else tuple(tensors[key].shape)
    if shape != tuple(parameter.shape):
        raise ValueError(f"{key} has the shape {shape}, not {tuple(parameter.shape)}")
    rows = own_rows(parameter)
    assert rows is not None
    first, last = rows[0], rows[0] + len(parameter.to_local())
    return tensors.rows(key, first, last) if isinstance(tensors, Stored) else tensors[key][first:last]
