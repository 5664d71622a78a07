"""Apply a Method to a model in place. The model keeps its class and works with any trainer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from oelm.audit import LEARNED, at_of, audit, frozen_digest, holds_learned, method_of, record_of
from oelm.errors import UserError
from oelm.method import HEAD_ROLES, QK_SCALES, Method, freezes_only_embeddings, get_method, select_layers
from oelm.models.conversion_report import ConversionReport, Row, ScoreScale, score_scales
from oelm.models.families import Site, block_gain, family_of, find_sites, frozen_names, whole_model_roles
from oelm.models.freeze_ratio import reached_share, resolve_ratio
from oelm.models.frozen_state import START, At, frozen_at
from oelm.models.fused import PARTS, SplitQKV
from oelm.models.gpt_config import OelmGPTConfig
from oelm.models.learned import add_learned, changed_kinds, check_learned, learned_layers
from oelm.models.lora import adapted_layers, add_lora, check_lora, merged
from oelm.models.pretrained import hub_arguments, load_as_saved, load_config
from oelm.orthogonal import (
    check_shape,
    draw_blocks,
    one_blas_thread,
    polar_factor,
    q_factor,
    to_blocks,
    to_weight,
)
from oelm.system.version import __version__


def convert(model: PreTrainedModel, method: str | Method = "oelm", seed: int = 0) -> ConversionReport:
    """Initialise and freeze a model's parameters by a method, in place, and report them.

    The model keeps its class; `config.oelm` records the conversion and is saved with it. A conversion that is
    impossible raises UserError before the model is changed.
    """
    method = get_method(method)
    _refuse_unfit(model)
    method = resolve_ratio(model, method)
    own_config = copy.deepcopy(model.config)
    scratch = model.config.model_type == OelmGPTConfig.model_type and not model.config.name_or_path
    init = method.init if method.init != "auto" else "fresh" if scratch else "own"
    report = apply_method(model, method, seed, init, measure=not scratch)
    # Two models may share one config object, and the record of one must not be in the other's.
    shared, own_config.oelm = model.config, model.config.oelm
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own_config  # type: ignore[assignment]
    del shared.oelm
    return report


def apply_method(
    model: PreTrainedModel, method: Method, seed: int, init: str, measure: bool = False
) -> ConversionReport:
    """`convert` on the model's own config, with `init` resolved to "fresh" or "own" and `freeze_ratio` to
    `freeze`. With `measure` the report has the scales of the scores."""
    if not isinstance(seed, int | np.integer):
        raise UserError(f"seed must be a whole number, not {seed!r}")
    seed = int(seed)
    if method.lora:
        check_lora(model)
    sites = find_sites(model)
    _refuse_unfit_weights(sites)
    _refuse_empty_selections(sites, method)
    check_learned(model, method, sites)
    if method.scores == "constant" and model.config.model_type != OelmGPTConfig.model_type:
        raise UserError(f"scores = 'constant' is for the reference GPT, not for {model.config.model_type}")
    with one_blas_thread():
        new = [
            (site, kind, _new_weight(site, kind, init, method, seed))
            for site in sites
            if (kind := method.start.get(site.role)) is not None
            and (method.freeze_ratio is None or method.freezes(site.role, site.layer, site.num_layers))
        ]
    measure = measure and any(site.role in HEAD_ROLES for site, *_ in new)
    scales = score_scales(model) if measure else []
    # All checks are done: from here on the model is changed.
    for site, kind, weight in new:
        site.write(weight)
        if _is_drawn(kind, init):
            site.zero_bias()  # a bias belongs to the weight it was trained with
    if method.lora:
        add_lora(model, method.lora, seed)
    wanted = _freeze(model, method, START)
    if method.learns:
        add_learned(model, method, seed, find_sites(model))
    model.config.oelm = {
        "method": method.to_dict(),
        "seed": seed,
        "init": init,
        # Frozen by the architecture or the user, not by the method.
        "already_frozen": [n for n, p in model.named_parameters() if not p.requires_grad and n not in wanted],
        "version": __version__,
        "digest": frozen_digest(model, method, START),
    }
    if measure:
        now = score_scales(model)
        scales = [replace(old, after=new.after) for old, new in zip(scales, now, strict=True)]
    return _report(model, method, seed, init, tuple(scales))


def refreeze(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the frozen state of a converted model after a plain `from_pretrained`, which loses it.

    The frozen weights are compared with the digests in the config: a checkpoint in which they were trained is
    refused. Factors or adapters learned beside them (`Method.qk_scale`, `Method.qk_lora`) are merged into
    them and stay frozen; a model that was not trained since its conversion gets them again, to be learned.
    """
    method, record = method_of(model), record_of(model)
    _freeze(model, method, at_of(model))
    if method.learns and not learned_layers(model) and not holds_learned(model):
        add_learned(model, method, record["seed"], find_sites(model))
    already = set(record["already_frozen"])
    for name, parameter in model.named_parameters():
        if name in already:
            parameter.requires_grad_(False)
    audit(model)
    return model


def load(path: str, **kwargs: Any) -> PreTrainedModel:
    """Load a converted model with its own class and its frozen state. `kwargs` go to `from_pretrained`."""
    if (Path(path) / "config.toml").is_file():
        raise UserError(f"{path} is the folder of a run; its model is {Path(path) / 'model'}")
    if not getattr(load_config(path, **hub_arguments(kwargs)), "oelm", None):
        raise UserError(f"{path} was not converted by oelm: its config.json has no 'oelm' entry")
    return refreeze(load_as_saved(path, **kwargs))


def release(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a converted model back into an ordinary one: everything trains, fused matrices are fused again."""
    already = set(record_of(model)["already_frozen"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in already)
    for path, layer in learned_layers(model).items():
        model.set_submodule(path, layer.merged())
    for path, module in [*model.named_modules()]:
        if isinstance(module, SplitQKV):
            model.set_submodule(path, module.to_fused().train(model.training))
    for path, adapted in adapted_layers(model).items():
        model.set_submodule(path, merged(adapted).train(model.training))
    _set_scores(model, Method.scores)
    del model.config.oelm
    return model


def _refuse_unfit(model: PreTrainedModel) -> None:
    family_of(model)
    record = getattr(model.config, "oelm", None)
    if record:
        raise UserError(
            f"this model is already converted (method {record['method']['name']}, seed {record['seed']}); "
            "call oelm.release(model) first to make it an ordinary model again"
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        raise UserError("this model is quantised: convert the full-precision model, then quantise it")
    if getattr(model.config, "add_cross_attention", False) and model.config.model_type == "gpt2":
        raise UserError("GPT-2 with cross-attention is not supported: its cross-attention fuses K and V only")


def _refuse_unfit_weights(sites: list[Site]) -> None:
    owners: dict[int, Site] = {}
    for site in sites:
        weight = site.module.weight
        assert isinstance(weight, Tensor)
        if weight.is_meta:
            raise UserError(f"{site.path} is on the meta device and has no values: load the weights first")
        if hasattr(weight, "full_tensor"):
            raise UserError(f"{site.path} is sharded: convert the model before FSDP wraps it")
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise UserError(
                f"{site.path} is quantised ({weight.dtype}): convert the full-precision model instead"
            )
        other = owners.setdefault(weight.data_ptr(), site)
        if other.module is not site.module:
            raise UserError(
                f"{other.path} and {site.path} share one weight (tied): "
                "one cannot start or freeze without the other"
            )


def _refuse_empty_selections(sites: list[Site], method: Method) -> None:
    """Reject a selection that matches no layer. ":-n" in a model of n layers is accepted if the method
    freezes something else, as `top-2` does in a model of two layers."""
    freezes_something, empty = "embeddings" in method.freeze, {}
    for role, layers in method.freeze.items():
        depths = {site.num_layers for site in sites if role in (site.role, "norms")}
        if any(select_layers(layers, depth) for depth in depths):
            freezes_something = True
        elif depths:
            empty[role] = max(depths)
    for role, depth in empty.items():
        layers = method.freeze[role]
        if not (freezes_something and freezes_only_embeddings(layers, depth)):
            raise UserError(f"freeze {role} = {layers!r} selects none of the model's {depth} layers")


def _is_drawn(kind: str, init: str) -> bool:
    return kind != "polar" and not (kind == "orthogonal" and init == "own")


def _new_weight(site: Site, kind: str, init: str, method: Method, seed: int) -> Tensor:
    weight = site.weight
    out, in_ = weight.shape
    if site.role in HEAD_ROLES:
        blocks, transposed = to_blocks(weight, site.heads), False
    else:  # one block for the whole matrix, its smaller side orthonormal
        transposed = out > in_
        blocks = to_blocks(weight.t() if transposed else weight, 1)
    check_shape(blocks.shape[1], blocks.shape[0], blocks.shape[2])
    own = blocks
    if _is_drawn(kind, init):
        heads, d_model, head_dim = blocks.shape
        blocks = draw_blocks(kind, d_model, heads, head_dim, seed=seed, name=site.name)
    else:
        if not np.isfinite(blocks).all():
            raise UserError(f"{site.path} holds values that are not finite: it has no orthogonal factor")
        blocks = polar_factor(blocks) if kind == "polar" else q_factor(blocks)
    if site.role in HEAD_ROLES and kind != "normal":
        gains = block_gain(site, method, own)
        if not (np.isfinite(gains) & (gains > 0)).all():
            raise UserError(f"{site.path} has a head of scale 0 or infinity, which gain = 'own' cannot keep")
        blocks = blocks * gains[:, None, None]
    new = torch.from_numpy(to_weight(blocks))
    return (new.t() if transposed else new).to(weight.device, weight.dtype)


def _freeze(model: PreTrainedModel, method: Method, at: At) -> set[str]:
    """Freeze the parameters that the method freezes at this step; return the names of those that it freezes
    at any step. A fused matrix is split if a part of it is frozen or has factors or adapters."""
    for site in find_sites(model):
        frozen = [role for role in PARTS if method.freezes(role, site.layer, site.num_layers)]
        if site.part is not None and (0 < len(frozen) < len(PARTS) or changed_kinds(method, site)):
            module = model.get_submodule(site.path)
            if isinstance(module, nn.Linear | Conv1D):  # not split before for another of its parts
                split = SplitQKV(module, site.heads, site.layout)
                model.set_submodule(site.path, split.train(model.training))
    now = frozen_at(model, method, at)
    for name, parameter in model.named_parameters():
        if name in now:
            parameter.requires_grad_(False)
    _set_scores(model, method.scores)
    return frozen_names(model, method)


def _set_scores(model: PreTrainedModel, scores: str) -> None:
    for module in model.modules():
        if hasattr(module, "value_only"):
            module.value_only = scores == "constant"  # type: ignore[assignment]


def _report(
    model: PreTrainedModel, method: Method, seed: int, init: str, scales: tuple[ScoreScale, ...]
) -> ConversionReport:
    wanted = frozen_names(model, method)
    frozen_ids = {id(p) for name, p in model.named_parameters() if name in wanted}
    by_role: dict[str, list[Site]] = {}
    for site in find_sites(model):
        by_role.setdefault(site.role, []).append(site)
    rows = []
    for role, sites in by_role.items():
        kind = method.start.get(role)
        start = "as it was"
        if kind is not None:
            start = f"{kind}, fresh" if _is_drawn(kind, init) else f"{kind}, from its own weight"
            if method.freeze_ratio is not None and method.freeze[role] != "all":
                start += ", where frozen"
        gains = {"-"}
        if role in HEAD_ROLES and kind not in (None, "normal"):
            numbers = {f"{block_gain(site, method, np.ones((1, 1, 1)))[0]:.3g}" for site in sites}
            gains = {"own"} if method.gain == "own" else numbers
        heads = sum(site.heads for site in sites) if role in HEAD_ROLES else 0
        share = _share(sum(f"{site.path}.weight" in wanted for site in sites), len(sites), method)
        size = sum(site.parameters for site in sites)
        rows.append(Row(role, len(sites), heads, start, "/".join(sorted(gains)), share, size))
    for role, modules in whole_model_roles(model).items():
        # A norm or a tied matrix may be registered twice but counts once.
        unique = {id(p): p for module in modules.values() for p in module.parameters(recurse=False)}
        frozen = sum(id(p) in frozen_ids for p in unique.values())
        size = sum(p.numel() for p in unique.values())
        share = _share(frozen, len(unique), method)
        rows.append(Row(role, len(unique), 0, "as it was", "-", share, size))
    starts = {
        "lora": f"rank {method.lora}, no change yet",
        "qk_scale": f"1 for each {QK_SCALES[method.qk_scale]}",
        "qk_lora": f"rank {method.qk_lora}, no change yet",
    }
    for role, is_learned in LEARNED.items():
        if learned := [p for name, p in model.named_parameters() if is_learned(name)]:
            size = sum(p.numel() for p in learned)
            rows.append(Row(role, len(learned), 0, starts[role], "-", "no", size))
    parameters = [*model.parameters()]
    return ConversionReport(
        model=type(model).__name__,
        method=method.name,
        seed=seed,
        init=init,
        total=sum(p.numel() for p in parameters),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        rows=tuple(rows),
        scores=scales,
        freeze_ratio=method.freeze_ratio,
        freeze_ratio_of=method.freeze_ratio_of,
        reached=reached_share(model, method),
        schedule=dict(method.freeze_schedule),
        frozen_at_end=_frozen_at_end(parameters, frozen_ids, method),
    )


def _frozen_at_end(parameters: list[nn.Parameter], scheduled: set[int], method: Method) -> int | None:
    """The number of parameters that are frozen at the end of the schedule; None without one."""
    if not (schedule := method.schedule):
        return None
    ends = schedule.unfreeze_at is None or schedule.refreeze_at is not None
    return sum(p.numel() for p in parameters if (ends if id(p) in scheduled else not p.requires_grad))


def _share(frozen: int, total: int, method: Method) -> str:
    share = {0: "no", total: "yes"}.get(frozen, f"{frozen} of {total} tensors")
    return f"{share}, by schedule" if frozen and method.schedule else share
