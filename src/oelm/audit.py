"""Proof that what is frozen stayed frozen, bit for bit, and is still orthonormal."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import AuditError, UserError
from oelm.families import Site, block_gain, find_sites, frozen_names
from oelm.method import HEAD_ROLES, Method
from oelm.orthogonal import ORTHONORMAL_KINDS, deviation, tolerance


@dataclass(frozen=True)
class Fingerprint:
    """What a model's parameters were at one moment: the frozen ones by digest, the others by name."""

    frozen: dict[str, str]
    trainable: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        return cls(dict(values["frozen"]), tuple(values["trainable"]))


@dataclass(frozen=True)
class Audit:
    """A passed audit: how much was checked, and how orthonormal the blocks are."""

    frozen_tensors: int
    frozen_parameters: int
    trainable_parameters: int
    orthonormal_heads: int
    largest_deviation: float
    tolerance: float
    problems: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Take it after `convert` and before training; hand it to `audit` afterwards."""
    model = unwrap(model)
    return Fingerprint(
        frozen={name: _digest([(name, p)]) for name, p in model.named_parameters() if not p.requires_grad},
        trainable=tuple(name for name, p in model.named_parameters() if p.requires_grad),
    )


def audit(model: nn.Module, before: Fingerprint | None = None) -> Audit:
    """Check a converted model and return what was checked; raise `AuditError` naming everything wrong.

    Wrong is: a frozen parameter whose bits differ from `before`; a parameter that trains though its
    method freezes it, or is frozen though it was to train; a block that is no longer orthonormal.
    Without `before`, bits are checked against the digest that conversion left in the config.
    """
    model = unwrap(model)
    method = method_of(model)
    problems = [*_state_problems(model, method, before)]
    if before is None:
        problems += _digest_problems(model, method)
    else:
        now = fingerprint(model)
        problems += [
            f"{name}: a frozen weight changed"
            for name, digest in before.frozen.items()
            if now.frozen.get(name, digest) != digest
        ]
    heads, largest, allowed = 0, 0.0, 0.0
    for site, gain in orthonormal_sites(model, method):
        found = deviation(site.weight, site.heads, gain)
        limit = _allowed(site.weight)
        problems += [
            f"{site.path}: head {head} is off from orthonormal by {value:.2g} (tolerance {limit:.2g})"
            for head, value in enumerate(found)
            if not value <= limit  # NaN is a problem too
        ]
        heads, largest, allowed = heads + site.heads, max(largest, float(found.max())), max(allowed, limit)
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise AuditError(
            f"the audit found {len(problems)} problem(s):\n  " + "\n  ".join(problems[:20]) + more
        )
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return Audit(
        frozen_tensors=len(frozen),
        frozen_parameters=sum(p.numel() for p in frozen),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        orthonormal_heads=heads,
        largest_deviation=largest,
        tolerance=allowed,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def record_of(model: nn.Module) -> dict[str, Any]:
    """What conversion left in the config."""
    record = getattr(getattr(model, "config", None), "oelm", None)
    if not record:
        raise UserError(
            "this model was not converted: its config has no 'oelm' entry; call oelm.convert first"
        )
    return record


def method_of(model: nn.Module) -> Method:
    """The method a model was converted with."""
    return Method.from_dict(record_of(model)["method"])


def _state_problems(model: nn.Module, method: Method, before: Fingerprint | None) -> Iterable[str]:
    wanted = frozen_names(model, method)
    expected = wanted | set(record_of(model)["already_frozen"] if before is None else before.frozen)
    known = None if before is None else set(before.frozen) | set(before.trainable)
    for name, parameter in model.named_parameters():
        if name in wanted and parameter.requires_grad:
            yield f"{name}: the method freezes it, but it is trainable"
        elif name in expected and parameter.requires_grad:
            yield f"{name}: it was frozen, but it is trainable now"
        elif not parameter.requires_grad and name not in expected:
            yield f"{name}: it should train, but it is frozen"
        if known is not None and name not in known:
            yield f"{name}: it was not there when the fingerprint was taken"
    if known is not None:
        present = {name for name, _ in model.named_parameters()}
        yield from (f"{name}: it is gone" for name in sorted(known - present))


def orthonormal_sites(model: nn.Module, method: Method) -> Iterable[tuple[Site, float]]:
    """The frozen projections whose blocks must be orthonormal, each with its gain."""
    wanted = frozen_names(model, method)
    for site in find_sites(model):
        kind = method.start.get(site.role)
        if (
            site.role in HEAD_ROLES
            and kind in (*ORTHONORMAL_KINDS, "polar")
            and f"{site.path}.weight" in wanted
        ):
            yield site, block_gain(site, method)


def frozen_digest(model: nn.Module, method: Method) -> dict[str, str]:
    """One digest of all that the method freezes, for each dtype a checkpoint may be loaded in."""
    tensors = _frozen(model, method)
    dtypes = {tensor.dtype for _, tensor in tensors} | {torch.bfloat16, torch.float16}
    return {str(dtype).removeprefix("torch."): _digest(tensors, dtype) for dtype in sorted(dtypes, key=str)}


def _digest_problems(model: nn.Module, method: Method) -> Iterable[str]:
    """Compare with the digest in the config, in a dtype that holds the weights as they are.

    A model loaded narrower than it was saved matches the digest of that dtype. One loaded wider
    holds values that fit the narrower dtype exactly: then the narrower digest must match.
    """
    tensors = _frozen(model, method)
    for name, recorded in record_of(model)["digest"].items():
        dtype = getattr(torch, name)
        if all(_fits(tensor, dtype) for _, tensor in tensors) and _digest(tensors, dtype) == recorded:
            return
    yield "frozen weights: they are not the ones that were frozen (their digest differs from config.oelm)"


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype holds these values exactly."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _allowed(weight: Tensor) -> float:
    """How far from orthonormal rounding can have put these values: one saved in bf16 keeps its error."""
    narrower = [dtype for dtype in (torch.bfloat16, torch.float16) if _fits(weight, dtype)]
    return max(tolerance(dtype) for dtype in (weight.dtype, *narrower))


def _frozen(model: nn.Module, method: Method) -> list[tuple[str, Tensor]]:
    wanted = frozen_names(model, method)
    prefix = getattr(model, "base_model_prefix", "") + "."
    found = [(n.removeprefix(prefix), p.detach()) for n, p in model.named_parameters() if n in wanted]
    return sorted(found, key=lambda item: item[0])


def _digest(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    sha = hashlib.sha256()
    for name, tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # an FSDP2 shard
        full = full.detach().to("cpu", dtype or tensor.dtype).contiguous()
        sha.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
        sha.update(full.view(torch.uint8).numpy().data)
    return sha.hexdigest()
