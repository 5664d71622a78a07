"""Check that what is frozen stayed frozen, bit for bit, and is still orthonormal."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import AuditError, UserError
from oelm.method import HEAD_ROLES, Method
from oelm.models.families import block_gain, find_sites, frozen_names, relative_name
from oelm.models.frozen_state import START, At, frozen_at, timeline_of, unfreezing_groups
from oelm.models.learned import changed_kinds, is_factor, is_qk_adapter
from oelm.models.lora import adapted_layers
from oelm.orthogonal import ORTHONORMAL_KINDS, deviation, one_blas_thread, to_blocks, tolerance
from oelm.system.messages import Notice, notice
from oelm.system.private_peft import BASE_LAYER, is_adapted, is_adapter, plain_name
from oelm.system.private_torch import unwrap
from oelm.system.shards import gathered

# Kind of parameter that is learned beside frozen weights and merged into them -> whether a name is one.
LEARNED = {"lora": is_adapter, "qk_scale": is_factor, "qk_lora": is_qk_adapter}
ENOUGH_STEPS = 10  # of training, after which an unfrozen matrix must have changed


@dataclass(frozen=True)
class Fingerprint:
    """A model's parameters at one step: digests of the frozen ones, names of the trainable ones, and digests
    (`later`) of those trainable ones that a schedule freezes later."""

    frozen: dict[str, str]
    trainable: tuple[str, ...]
    later: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value or key != "later"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        return cls(dict(values["frozen"]), tuple(values["trainable"]), dict(values.get("later", {})))

    def merged(self, into: Collection[str], present: Collection[str]) -> "Fingerprint":
        """The fingerprint after learned adapters or factors were merged, by PEFT or `into` these weights,
        whose digests are cleared. `present` are the names of all parameters that the model has now."""
        learned = {name for name in self.trainable if any(test(name) for test in LEARNED.values())}
        if not learned:  # taken of the merged weights themselves
            return self
        blank = {name for name in self.frozen if name in into or (is_adapted(name) and name not in present)}
        now = {name: name if name in present else plain_name(name) for name in self.frozen}
        return Fingerprint(
            {now[name]: "" if name in blank else digest for name, digest in self.frozen.items()},
            tuple(name for name in self.trainable if name in present or name not in learned),
            self.later,
        )


@dataclass(frozen=True)
class Audit:
    """The result of a passed audit: counts, and the largest deviation from orthonormality."""

    frozen_tensors: int
    frozen_parameters: int
    trainable_parameters: int
    orthonormal_heads: int
    largest_deviation: float
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(model: nn.Module) -> Fingerprint:
    """The model's fingerprint, to take after `convert` and before training, for `audit` after training."""
    model = unwrap(model)
    converted = getattr(getattr(model, "config", None), "oelm", None)
    method = method_of(model) if converted else Method()
    scheduled = frozen_names(model, method) if method.schedule else set()
    return Fingerprint(
        frozen={name: _digest(p) for name, p in model.named_parameters() if not p.requires_grad},
        trainable=tuple(name for name, p in model.named_parameters() if p.requires_grad),
        later={n: _digest(p) for n, p in model.named_parameters() if p.requires_grad and n in scheduled},
    )


def audit(model: nn.Module, before: Fingerprint | None = None) -> Audit:
    """Check a converted model and return the counts; raise `AuditError` with all problems.

    A problem is a frozen parameter whose bits differ from `before`; a parameter that is trainable although
    the method freezes it, or the reverse; a block that is no longer orthonormal. Without `before`, bits are
    compared with the digests that conversion wrote into the config.

    A method with a schedule is checked at the last step given to `oelm.Freezing`: a parameter frozen during
    training must have the bits it was frozen with, and one that trained, before it was frozen or after it was
    unfrozen, must have changed since `before`.
    """
    model = unwrap(model)
    method = method_of(model)
    into = merged_into(model, method)
    if before is not None and (into or (method.lora and not adapted_layers(model))):
        before = before.merged(into, {name for name, _ in model.named_parameters()})
    kept = {n: since for n, since in frozen_at(model, method, at_of(model)).items() if n not in into}
    problems = [*_state_problems(model, method, before)]
    problems += _digest_problems(model, [name for name, since in kept.items() if since or before is None])
    if before is not None:
        problems += [*_changes(model, method, before), *_untrained(model, method, before)]
    heads, largest, allowed = 0, 0.0, 0.0
    with one_blas_thread():
        for path, weight, blocks, gain in _orthonormal(model, method, kept):
            deviations, limit = deviation(weight, blocks, gain), _allowed(weight)
            problems += [
                notice("audit.not_orthonormal", name=path, head=head, deviation=float(value), tolerance=limit)
                for head, value in enumerate(deviations)
                if not value <= limit  # NaN is a problem too
            ]
            heads += blocks
            largest, allowed = max(largest, float(deviations.max())), max(allowed, limit)
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
    return Method.from_dict(record_of(model)["method"])


def at_of(model: nn.Module) -> At:
    """The step that a converted model has reached in its schedule."""
    return At(*record_of(model).get("at", START))


def _state_problems(model: nn.Module, method: Method, before: Fingerprint | None) -> Iterable[Notice]:
    wanted = {*frozen_at(model, method, at_of(model))}
    released = frozen_names(model, method) - wanted
    expected = (
        set(record_of(model)["already_frozen"] if before is None else before.frozen) - released | wanted
    )
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


def _changes(model: nn.Module, method: Method, before: Fingerprint) -> Iterable[Notice]:
    now = frozen_at(model, method, at_of(model))
    trained = {name for name in frozen_names(model, method) if now.get(name) != 0}  # at some step, so far
    for name, parameter in model.named_parameters():
        if before.frozen.get(name) and name not in trained and _digest(parameter) != before.frozen[name]:
            yield notice("audit.changed", name=name)


def _untrained(model: nn.Module, method: Method, before: Fingerprint) -> Iterable[Notice]:
    """Matrices that were trainable for many steps and have not changed, even if they are frozen again: the
    optimizer did not have them."""
    if not method.schedule:
        return
    groups, at = unfreezing_groups(model, method), at_of(model)
    timeline, start = timeline_of(method.schedule, groups.values(), at.total), before.frozen | before.later
    for name, parameter in model.named_parameters():
        steps = timeline.trained_steps(groups[name], at.step) if name in groups else 0
        # Some steps may be skipped (fp16), and the gradients of a bias may be 0.
        if steps >= ENOUGH_STEPS and parameter.dim() > 1 and _digest(parameter) == start.get(name):
            yield notice("audit.untrained", name=name, steps=steps)


def merged_into(model: nn.Module, method: Method) -> set[str]:
    """The frozen parameters into which learned adapters or factors may have been merged: all with such,
    except where these are still separate since the conversion."""
    sites = find_sites(model) if method.learns else []
    merged = [site for site in sites if getattr(site.module, "holds_learned", True)]
    adapted = {
        path for path, layer in adapted_layers(model).items() if getattr(layer, "holds_learned", False)
    }
    return {f"{path}.{BASE_LAYER}.weight" for path in adapted} | {
        f"{site.path}.{kind}" for site in merged for kind in changed_kinds(method, site)
    }


def holds_learned(model: nn.Module) -> bool:
    """Whether anything was learned and merged into frozen weights since the conversion."""
    into = merged_into(model, method_of(model))
    return any(True for _ in _digest_problems(model, into))


def _orthonormal(
    model: nn.Module, method: Method, kept: Mapping[str, int]
) -> Iterable[tuple[str, Tensor, int, Any]]:
    """(path, weight, number of blocks, gains) of the projections in `kept`, parameter -> step at which it was
    frozen, that must be orthonormal."""
    for site in find_sites(model):
        since, kind = kept.get(f"{site.path}.weight"), method.start.get(site.role)
        if since:  # frozen during training
            kind = "polar" if method.schedule and method.schedule.polar and site.role in HEAD_ROLES else None
        if since is None or kind not in (*ORTHONORMAL_KINDS, "polar"):
            continue
        weight = gathered(site.weight)
        if site.role in HEAD_ROLES:
            yield site.path, weight, site.heads, block_gain(site, method, to_blocks(weight, site.heads))
        else:  # one block, orthonormal along its smaller side
            yield site.path, weight if weight.shape[0] <= weight.shape[1] else weight.t(), 1, 1.0


def frozen_digest(model: nn.Module, method: Method, at: At) -> dict[str, dict[str, str]]:
    """Name -> dtype -> digest of every tensor the method has frozen, for all dtypes it may be loaded in."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {
        name: {
            str(dtype).removeprefix("torch."): _digest(tensor, dtype)
            for dtype in dict.fromkeys((tensor.dtype, *dtypes))
        }
        for name, tensor in _tensors(model, frozen_at(model, method, at))
    }


def _digest_problems(model: nn.Module, names: Collection[str]) -> Iterable[Notice]:
    """Compare these with the digests in the config, in a dtype that holds the weights exactly.

    A model loaded in a narrower dtype than it was saved in has the digest of that dtype. One loaded in a
    wider dtype holds values that fit the narrower one, and has the digest of that. A tensor without a digest
    belongs to another task's head.
    """
    recorded = record_of(model)["digest"]
    for name, tensor in _tensors(model, names):
        digests = recorded.get(name, {})
        if digests and not any(
            _fits(tensor, getattr(torch, dtype)) and _digest(tensor, getattr(torch, dtype)) == digest
            for dtype, digest in digests.items()
        ):
            yield notice("audit.other_digest", name=name)


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype holds these values exactly. The first row is tried first, where most misfits show."""
    parts = (tensor[:1], tensor) if tensor.dim() else (tensor,)
    return all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts)


def _allowed(weight: Tensor) -> float:
    """The deviation from orthonormality that rounding explains, including that of an earlier save in bf16."""
    narrower = [dtype for dtype in (torch.bfloat16, torch.float16) if _fits(weight, dtype)]
    return max(tolerance(dtype) for dtype in (weight.dtype, *narrower))


def _tensors(model: nn.Module, names: Collection[str]) -> list[tuple[str, Tensor]]:
    """The parameters of these names, under names that do not depend on the task's head."""
    return [
        (relative_name(model, name), gathered(parameter.detach()))
        for name, parameter in model.named_parameters()
        if name in names
    ]


def _digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    # A copy, as FSDP cannot free memory that numpy refers to.
    full = gathered(tensor.detach()).to("cpu", dtype or tensor.dtype, copy=True).contiguous()
    digest = hashlib.blake2b(f"{tuple(full.shape)} {full.dtype}".encode(), digest_size=16)
    digest.update(full.view(torch.uint8).numpy().data)
    return digest.hexdigest()
