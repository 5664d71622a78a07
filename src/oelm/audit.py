"""Check that what is frozen stayed frozen, bit for bit, and is still orthonormal."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import AuditError, UserError
from oelm.method import HEAD_ROLES, Method
from oelm.models.families import block_gain, find_sites, frozen_names, relative_name
from oelm.models.lora import adapted_layers
from oelm.orthogonal import ORTHONORMAL_KINDS, deviation, to_blocks, tolerance
from oelm.system.messages import Notice, notice
from oelm.system.private_peft import is_adapted, is_adapter, plain_name
from oelm.system.private_torch import unwrap


@dataclass(frozen=True)
class Fingerprint:
    """A model's parameters at one moment: the digests of the frozen ones, the names of the others."""

    frozen: dict[str, str]
    trainable: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        return cls(dict(values["frozen"]), tuple(values["trainable"]))

    def merged(self) -> "Fingerprint":
        """The same after adapters were merged: the weights they were merged into have no digest any more."""
        return Fingerprint(
            {plain_name(name): "" if is_adapted(name) else digest for name, digest in self.frozen.items()},
            tuple(name for name in self.trainable if not is_adapter(name)),
        )


@dataclass(frozen=True)
class Audit:
    """A passed audit: how much was checked, and how orthonormal the blocks are."""

    frozen_tensors: int
    frozen_parameters: int
    trainable_parameters: int
    orthonormal_heads: int
    largest_deviation: float
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Take it after `convert` and before training; hand it to `audit` afterwards."""
    model = unwrap(model)
    return Fingerprint(
        frozen={name: _digest(p) for name, p in model.named_parameters() if not p.requires_grad},
        trainable=tuple(name for name, p in model.named_parameters() if p.requires_grad),
    )


def audit(model: nn.Module, before: Fingerprint | None = None) -> Audit:
    """Check a converted model and return what was checked; raise `AuditError` naming everything wrong.

    Wrong is: a frozen parameter whose bits differ from `before`; a parameter that is trainable although the
    method freezes it, or the reverse; a block that is no longer orthonormal. Without `before`, bits are
    compared with the digests that conversion left in the config.
    """
    model = unwrap(model)
    method = method_of(model)
    if before is not None and method.lora and not adapted_layers(model):
        before = before.merged()
    problems = [*_state_problems(model, method, before)]
    problems += _digest_problems(model, method) if before is None else _changes(model, before)
    heads, largest, allowed = 0, 0.0, 0.0
    for path, weight, blocks, gain in _orthonormal(model, method):
        deviations, limit = deviation(weight, blocks, gain), _allowed(weight)
        problems += [
            notice("audit.not_orthonormal", name=path, head=head, deviation=float(value), tolerance=limit)
            for head, value in enumerate(deviations)
            if not value <= limit  # NaN is a problem too
        ]
        heads, largest, allowed = heads + blocks, max(largest, float(deviations.max())), max(allowed, limit)
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        hint = "\n(a plain from_pretrained unfreezes a converted model; oelm.refreeze freezes it again)"
        raise AuditError(
            f"the audit failed, it found {len(problems)} problem(s):\n  "
            + "\n  ".join(map(str, problems[:20]))
            + more
            + (hint if before is None and any(p.code == "audit.trains" for p in problems) else ""),
            problems,
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


def record_of(model: nn.Module) -> dict[str, Any]:
    """The record of the conversion in the model's config."""
    record = getattr(getattr(model, "config", None), "oelm", None)
    if not record:
        raise UserError(
            "this model was not converted: its config has no 'oelm' entry; call oelm.convert first"
        )
    return record


def method_of(model: nn.Module) -> Method:
    """The method a model was converted with."""
    return Method.from_dict(record_of(model)["method"])


def _state_problems(model: nn.Module, method: Method, before: Fingerprint | None) -> Iterable[Notice]:
    wanted = frozen_names(model, method)
    expected = wanted | set(record_of(model)["already_frozen"] if before is None else before.frozen)
    known = None if before is None else set(before.frozen) | set(before.trainable)
    for name, parameter in model.named_parameters():
        if name in wanted and parameter.requires_grad:
            yield notice("audit.trains", name=name)
        elif name in expected and parameter.requires_grad:
            yield notice("audit.unfrozen", name=name)
        elif not parameter.requires_grad and name not in expected:
            yield notice("audit.frozen", name=name)
        if known is not None and name not in known:
            yield notice("audit.new", name=name)
    for name in sorted((known or set()) - {name for name, _ in model.named_parameters()}):
        yield notice("audit.gone", name=name)


def _changes(model: nn.Module, before: Fingerprint) -> Iterable[Notice]:
    for name, parameter in model.named_parameters():
        if before.frozen.get(name) and _digest(parameter) != before.frozen[name]:
            yield notice("audit.changed", name=name)


def _orthonormal(model: nn.Module, method: Method) -> Iterable[tuple[str, Tensor, int, Any]]:
    """Path, weight, number of blocks and gains of the frozen projections that must be orthonormal."""
    wanted = frozen_names(model, method)
    for site in find_sites(model):
        kind = method.start.get(site.role)
        if kind not in (*ORTHONORMAL_KINDS, "polar") or f"{site.path}.weight" not in wanted:
            continue
        weight = _full(site.weight)
        if site.role in HEAD_ROLES:
            yield site.path, weight, site.heads, block_gain(site, method, to_blocks(weight, site.heads))
        else:  # one block, orthonormal along its smaller side
            yield site.path, weight if weight.shape[0] <= weight.shape[1] else weight.t(), 1, 1.0


def frozen_digest(model: nn.Module, method: Method) -> dict[str, dict[str, str]]:
    """The digests of every tensor the method freezes, in each dtype a checkpoint may be loaded in."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {
        name: {
            str(dtype).removeprefix("torch."): _digest(tensor, dtype)
            for dtype in dict.fromkeys((tensor.dtype, *dtypes))
        }
        for name, tensor in _frozen(model, method)
    }


def _digest_problems(model: nn.Module, method: Method) -> Iterable[Notice]:
    """Compare with the digests in the config, in a dtype that holds the weights exactly.

    A model loaded in a narrower dtype than it was saved in has the digest of that dtype. One loaded in a
    wider dtype holds values that fit the narrower one, and has the digest of that. A tensor without a digest
    belongs to another task's head.
    """
    recorded = record_of(model)["digest"]
    for name, tensor in _frozen(model, method):
        digests = recorded.get(name, {})
        if digests and not any(
            _fits(tensor, getattr(torch, dtype)) and _digest(tensor, getattr(torch, dtype)) == digest
            for dtype, digest in digests.items()
        ):
            yield notice("audit.other_digest", name=name)


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor; shards are gathered, so every process must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype holds these values exactly."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _allowed(weight: Tensor) -> float:
    """The deviation from orthonormality that rounding explains; what was saved in bf16 keeps its error."""
    narrower = [dtype for dtype in (torch.bfloat16, torch.float16) if _fits(weight, dtype)]
    return max(tolerance(dtype) for dtype in (weight.dtype, *narrower))


def _frozen(model: nn.Module, method: Method) -> list[tuple[str, Tensor]]:
    """What the method freezes, under names that do not depend on the task's head."""
    wanted = frozen_names(model, method)
    return [
        (relative_name(model, name), _full(parameter.detach()))
        for name, parameter in model.named_parameters()
        if name in wanted
    ]


def _digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    full = _full(tensor.detach()).to("cpu", dtype or tensor.dtype).contiguous()
    digest = hashlib.blake2b(f"{tuple(full.shape)} {full.dtype}".encode(), digest_size=16)
    digest.update(full.view(torch.uint8).numpy().data)
    return digest.hexdigest()
