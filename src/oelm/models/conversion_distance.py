"""How far a conversion moves each head: the angle between its old and new row space, the scale of its scores.

The scale of a head's scores is their standard deviation over the keys of one query, which is all that a
softmax sees of it; over queries and texts it is averaged as a root mean square. It is taken before rotary
positions, position biases and masks. On a sample batch it is measured, with the inputs each layer really
gets. Without one it is predicted from the weights alone, for inputs of independent entries of variance 1.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from oelm.errors import UserError
from oelm.method import HEAD_ROLES
from oelm.models.families import Site, find_sites
from oelm.models.gpt_config import OelmGPTConfig
from oelm.orthogonal import principal_angles, to_blocks
from oelm.system.library_errors import first_line

Sample = Mapping[str, Any] | Tensor
Scales = dict[tuple[str, int], float | None]  # (attention, head of the queries) -> standard deviation


@dataclass(frozen=True)
class HeadMove:
    """The principal angles, in degrees, between one head's old and new row space; None where it had none."""

    role: str
    layer: int
    head: int
    path: str
    largest_angle: float | None
    mean_angle: float | None


@dataclass(frozen=True)
class ScoreScale:
    """The standard deviation of one head's scores before and after; None where weights do not tell."""

    attention: str
    layer: int
    head: int
    before: float | None
    after: float | None


def head_moves(site: Site, new: Tensor) -> list[HeadMove]:
    """What replacing this projection's weight by `new` does to its heads."""
    moves = []
    for head, (old_block, new_block) in enumerate(
        zip(to_blocks(site.weight, site.heads), to_blocks(new, site.heads), strict=True)
    ):
        angles = np.zeros(0)
        if np.isfinite(old_block).all():
            angles = principal_angles(old_block, new_block)
        largest, mean = (float(angles.max()), float(angles.mean())) if len(angles) else (None, None)
        moves.append(HeadMove(site.role, site.layer, head, site.path, largest, mean))
    return moves


def score_changes(model: PreTrainedModel, before: Scales, after: Scales) -> list[ScoreScale]:
    """Two findings of `score_scales` on one model, side by side."""
    layers = {site.attention: site.layer for site in find_sites(model) if site.role == "q"}
    return [
        ScoreScale(attention, layers[attention], head, value, after[attention, head])
        for (attention, head), value in before.items()
    ]


def score_scales(model: PreTrainedModel, sample: Sample | None) -> Scales:
    """The standard deviation of every head's scores, measured on the sample or predicted from the weights."""
    pairs = [*_pairs(model)]
    if sample is not None:
        return _measured(model, pairs, sample)
    return {
        (q.attention, head): value for q, k in pairs for head, value in enumerate(_predicted(model, q, k))
    }


def _pairs(model: nn.Module) -> Iterable[tuple[Site, Site]]:
    sites = [site for site in find_sites(model) if site.role in HEAD_ROLES]
    keys = {site.attention: site for site in sites if site.role == "k"}
    return ((site, keys[site.attention]) for site in sites if site.role == "q")


def _norms(model: nn.Module, site: Site) -> tuple[nn.Module, nn.Module] | None:
    """What Qwen3 and its like put between a projection and the scores."""
    attention = model.get_submodule(site.attention)
    found = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return None if None in found else found  # type: ignore[return-value]


def _predicted(model: nn.Module, q: Site, k: Site) -> list[float | None]:
    """For x and y of independent entries: Var_y (Wx + b).(Vy) = tr(W'W V'V) + b'V V'b, for each head."""
    if _norms(model, q) is not None:
        return [None] * q.heads  # the scale is the norm's, whatever the weights
    wq, wk = (site.weight.detach().float().unflatten(0, (site.heads, -1)) for site in (q, k))  # (H, D, C)
    wk = wk.repeat_interleave(q.heads // k.heads, 0)
    gram_q, gram_k = wq @ wq.mT, wk @ wk.mT
    variance = (gram_q * gram_k).sum((1, 2))
    if q.bias is not None:
        bias = q.bias.detach().float().unflatten(0, (q.heads, -1))
        variance = variance + torch.einsum("hd,hde,he->h", bias, gram_k, bias)
    return _floats(variance.clamp_min(0).sqrt() * q.score_scale)


@torch.no_grad()
def _measured(model: PreTrainedModel, pairs: list[tuple[Site, Site]], sample: Sample) -> Scales:
    batch = _batch(model, sample)
    scales: Scales = {}
    watch = [_watch(model, q, k, batch, scales) for q, k in pairs]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()(**batch)
    except (TypeError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        text = f"the sample does not fit this {type(model).__name__}: {first_line(error)}"
        raise UserError(text) from error
    finally:
        for module, was in training.items():
            module.training = was
        for handle in (handle for handles in watch for handle in handles):
            handle.remove()
    return scales


def _batch(model: PreTrainedModel, sample: Sample) -> dict[str, Any]:
    batch = {"input_ids": sample} if isinstance(sample, Tensor) else dict(sample)
    if "input_ids" not in batch:
        raise UserError("a sample is a batch as the model takes it, with 'input_ids' at least")
    if model.config.is_encoder_decoder and not {"labels", "decoder_input_ids"} & batch.keys():
        batch["decoder_input_ids"] = batch["input_ids"]
        if "attention_mask" in batch:
            batch["decoder_attention_mask"] = batch["attention_mask"]
    return {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _watch(model: PreTrainedModel, q: Site, k: Site, batch: dict[str, Any], scales: Scales) -> list[Any]:
    """Hooks that take the inputs of q and k as they pass by, and the scale of their scores."""
    inputs: dict[str, Tensor] = {}

    def hook(*roles: str) -> Callable[..., None]:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            inputs.update(dict.fromkeys(roles, value))
            if len(inputs) == 2:
                found = _spread(model, q, k, inputs["q"], inputs["k"], batch)
                scales.update({(q.attention, head): value for head, value in enumerate(_floats(found))})
                inputs.clear()

        return take

    one_product = q.split or model.config.model_type == OelmGPTConfig.model_type
    if q.part is not None or one_product:
        called = model.get_submodule(q.path.rpartition(".")[0]) if one_product else q.module
        return [called.register_forward_pre_hook(hook("q", "k"), with_kwargs=True)]
    return [site.module.register_forward_pre_hook(hook(site.role), with_kwargs=True) for site in (q, k)]


def _spread(
    model: PreTrainedModel, q: Site, k: Site, xq: Tensor, xk: Tensor, batch: dict[str, Any]
) -> Tensor:
    """The scale of each head's scores between the real tokens of these inputs, (heads,)."""
    queries, keys = (
        F.linear(x.float(), site.weight.float(), None if site.bias is None else site.bias.float()).unflatten(
            -1, (site.heads, -1)
        )
        for x, site in ((xq, q), (xk, k))
    )  # (B, T, H, D)
    norms = _norms(model, q)
    if norms is not None:
        queries, keys = (norm(x).float() for norm, x in zip(norms, (queries, keys), strict=True))
    keys = keys.repeat_interleave(q.heads // k.heads, 2)
    encoder_mask = batch.get("attention_mask")
    in_decoder = model.config.is_encoder_decoder and "decoder" in q.path.split(".")
    query_mask = batch.get("decoder_attention_mask") if in_decoder else encoder_mask
    key_mask = query_mask if xk is xq else encoder_mask
    total, count = torch.zeros(q.heads, device=xq.device), 0
    for text in range(len(queries)):  # one at a time: a batch's scores may not fit
        a, b = _real(queries[text], query_mask, text), _real(keys[text], key_mask, text)
        scores = torch.einsum("qhd,khd->hqk", a, b) * q.score_scale
        total += scores.var(-1, correction=0).sum(-1)
        count += len(a)
    return (total / max(count, 1)).sqrt()


def _real(x: Tensor, mask: Tensor | None, text: int) -> Tensor:
    return x if mask is None or mask.shape[1] != len(x) else x[mask[text].bool()]


def _floats(values: Tensor) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
