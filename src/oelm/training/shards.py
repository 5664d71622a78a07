"""Checkpoints in shards: under FSDP2 every process writes the rows that it holds, and reads those it needs.

    model-00002-of-00003.safetensors        of every parameter, the rows of the second of three processes
    optimizer-00002-of-00003.safetensors    of every moment, the same rows

The metadata of a shard hold, as JSON under `rows`, the first row of each of its tensors and the number of
rows of the whole tensor. So any number of processes can read them, and none has to hold a whole model.
Scalars, such as AdamW's step counts, are in the first shard only.
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


def shard_files(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def sharded_files(names: list[str]) -> list[str]:
    """All shard files of the checkpoint to which these files belong; empty if it is not in shards."""
    counts = {int(match[1]) for name in names if (match := NAME.fullmatch(name))}
    return [file for kind in KINDS for file in shard_files(kind, min(counts))] if counts else []


def own_rows(parameter: Tensor) -> tuple[int, int] | None:
    """The first row of a parameter that this process holds, and the number of rows of the whole parameter;
    None if it is not sharded."""
    if not isinstance(parameter, DTensor):
        return None
    assert parameter.placements == (Shard(0),), f"sharded by rows only, not {parameter.placements}"
    total, processes = parameter.shape[0], parameter.device_mesh.size()
    each = -(-total // processes)  # the last ones may have fewer, or none
    return min(parameter.device_mesh.get_local_rank() * each, total), total


def rows_of(model: nn.Module) -> Rows:
    """`own_rows` of every sharded parameter, by name; empty if the model is not sharded."""
    rows_by_name = {name: own_rows(parameter) for name, parameter in model.named_parameters()}
    return {name: rows for name, rows in rows_by_name.items() if rows is not None}


def local(tensor: Tensor) -> Tensor:
    """A copy on the CPU of the part of a tensor that this process holds."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().to("cpu", copy=True).contiguous()


def full_state(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """The state dict of the unsharded model; tied weights stay one tensor. Every process must call this; one
    that does not `keep` it gets an empty dict, and holds one whole tensor at a time."""
    values = model.state_dict(keep_vars=True)
    tensors: dict[int, Tensor] = {}
    for value in {id(v): v for v in values.values()}.values():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            tensors[id(value)] = full.detach().to("cpu", copy=True).contiguous()
    return {name: tensors[id(value)] for name, value in values.items()} if keep else {}


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter with infinities or NaN, in this process's rows; None if there is none.
    Checked on the parameters' device, as copying them to a CPU would take longer."""
    held = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    finite = torch.stack([value.detach().isfinite().all() for value in held.values()]).tolist()
    return next((name for name, fine in zip(held, finite, strict=True) if not fine), None)


def write_shards(
    folder: Path,
    number: int,
    count: int,
    kinds: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    rows: Rows,
) -> dict[str, str]:
    """Write the shards of process `number` of `count`: parameters and moments. Returns their checksums."""
    sums = {}
    for kind, tensors in zip(KINDS, kinds, strict=True):
        at = {key: rows[key if kind == "model" else key.rpartition("/")[0]] for key in tensors}
        divided = {key: value for key, value in tensors.items() if value.dim()}
        held = {key: value for key, value in divided.items() if len(value)}
        if number == 0:
            held |= {key: value for key, value in tensors.items() if not value.dim()}
        path = folder / shard_files(kind, count)[number]
        save_file(held, path, {"rows": json.dumps({key: at[key] for key in held if key in divided})})
        sync_file(path)
        sums[path.name] = sha256(path)
    return sums


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of all shards of one kind, read on access, whole or some of their rows."""

    def __init__(self, files: list[Path]) -> None:
        """Raises ValueError if rows of a tensor are missing, SafetensorError for an invalid file."""
        self.parts: dict[str, list[tuple[int, Any]]] = {}  # by name: the first row in a file, and the file
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
        next_row = 0
        for first, shape in shapes:
            if first != next_row:
                raise ValueError(f"rows {next_row} to {first} of {name} are missing")
            next_row += shape[0]
        if next_row != total:
            raise ValueError(f"rows {next_row} to {total} of {name} are missing")
        return total, *shapes[0][1][1:]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of a tensor, `last` excluded."""
        parts = []
        for at, file in self.parts[name]:
            part = file.get_slice(name)
            begin, end = max(first - at, 0), min(last - at, part.get_shape()[0])
            if begin < end:
                parts.append(part[begin:end])
        if not parts:
            return file.get_slice(name)[0:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __getitem__(self, name: str) -> Tensor:
        if not self.shapes[name]:
            return self.parts[name][0][1].get_tensor(name)
        return self.rows(name, 0, self.shapes[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def stored_rows(tensors: Mapping[str, Tensor], key: str, parameter: DTensor) -> Tensor:
    """The rows of a stored tensor that this process holds of a sharded parameter. Raises ValueError if the
    whole tensor and the whole parameter differ in shape."""
    shape = tensors.shapes[key] if isinstance(tensors, StoredTensors) else tuple(tensors[key].shape)
    if shape != tuple(parameter.shape):
        raise ValueError(f"{key} has the shape {shape}, not {tuple(parameter.shape)}")
    rows = own_rows(parameter)
    assert rows is not None
    first, last = rows[0], rows[0] + len(parameter.to_local())
    return tensors.rows(key, first, last) if isinstance(tensors, StoredTensors) else tensors[key][first:last]
