"""What a conversion did, as data and as a table; and how far it moved each head.

How far a head moved is the angle between its old and its new row space, and the change of the scale of its
scores: their standard deviation over the keys of one query, averaged over queries and texts as a root mean
square, before rotary positions, position biases and masks. Given a sample batch, the scale is measured with
the inputs that each layer really gets. Without one it is predicted from the weights, for inputs of
independent entries of variance 1.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from oelm.system.messages import Notice

Sample = Mapping[str, Any] | Tensor
Scales = dict[tuple[str, int], float | None]  # (attention, head of the queries) -> standard deviation


@dataclass(frozen=True)
class Row:
    """What happened to one role: how it starts and what of it is frozen."""

    role: str
    tensors: int
    heads: int
    start: str
    gain: str
    frozen: str
    parameters: int


@dataclass(frozen=True)
class HeadMove:
    """The principal angles, in degrees, between a head's old and new row space; None where it had none."""

    role: str
    layer: int
    head: int
    path: str
    largest_angle: float | None
    mean_angle: float | None


@dataclass(frozen=True)
class ScoreScale:
    """The standard deviation of a head's scores before and after; None where it cannot be predicted."""

    attention: str
    layer: int
    head: int
    before: float | None
    after: float | None


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did. Prints as a table; `heads` and `scores` say how far each head moved."""

    model: str
    method: str
    seed: int
    init: str
    total: int
    frozen: int
    rows: tuple[Row, ...] = field(repr=False)
    heads: tuple[HeadMove, ...] = field(default=(), repr=False)
    scores: tuple[ScoreScale, ...] = field(default=(), repr=False)
    scores_from: str = "weights"  # or "sample"
    notes: tuple[Notice, ...] = field(default=(), repr=False)

    @property
    def trainable(self) -> int:
        return self.total - self.frozen

    @property
    def frozen_share(self) -> float:
        return self.frozen / self.total

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"trainable": self.trainable}

    def __str__(self) -> str:
        header = ("role", "tensors", "heads", "starts as", "gain", "frozen", "parameters")
        body = [
            (r.role, str(r.tensors), str(r.heads or "-"), r.start, r.gain, r.frozen, f"{r.parameters:,}")
            for r in self.rows
        ]
        lines = [
            f"{self.model}: method {self.method}, seed {self.seed}",
            *_table(header, body, numeric=(1, 2, 6)),
            f"parameters {self.total:,} = {self.trainable:,} trainable"
            f" + {self.frozen:,} frozen ({100 * self.frozen_share:.1f} %)",
            *self._summary(),
        ]
        return "\n".join(lines)

    def _summary(self) -> Iterable[str]:
        """How far the heads moved: the median head, and the range."""
        turned = [
            f"{role} {_median([m.largest_angle for m in self.heads if m.role == role], '.1f')}"
            for role in dict.fromkeys(move.role for move in self.heads)
        ]
        if turned:
            yield f"a head's row space turned by, in degrees: {', '.join(turned)}"
        if self.scores:
            before = _median([scale.before for scale in self.scores], ".3g")
            after = _median([scale.after for scale in self.scores], ".3g")
            yield f"scores' standard deviation, {self._source()}: {before}, now {after}"
        yield from (f"note: {note}" for note in self.notes)

    def _source(self) -> str:
        return "measured on the sample" if self.scores_from == "sample" else "predicted from the weights"

    def head_table(self) -> str:
        """Every head: its angles and the scale of its scores."""
        moves = [
            (m.path, m.role, str(m.head), _number(m.largest_angle, ".1f"), _number(m.mean_angle, ".1f"))
            for m in self.heads
        ]
        scales = [
            (s.attention, str(s.head), _number(s.before, ".3g"), _number(s.after, ".3g")) for s in self.scores
        ]
        parts = []
        if moves:
            names = ("projection", "role", "head", "largest angle", "mean angle")
            parts += ["", *_table(names, moves, numeric=(2, 3, 4))]
        if scales:
            parts += ["", f"standard deviation of the scores, {self._source()}"]
            parts += _table(("attention", "head", "before", "after"), scales, numeric=(1, 2, 3))
        return "\n".join(parts[1:]) or "no head moved"


def _table(header: tuple[str, ...], body: Sequence[tuple[str, ...]], numeric: tuple[int, ...]) -> list[str]:
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *body)
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _median(values: Iterable[float | None], form: str) -> str:
    """The median and the range of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, middle, high = (format(v, form) for v in (min(known), statistics.median(known), max(known)))
    return f"{middle} ({low} to {high})"


def head_moves(site: Site, new: Tensor) -> list[HeadMove]:
    """How far the heads of this projection move if its weight is replaced by `new`."""
    moves = []
    for head, (old_block, new_block) in enumerate(
        zip(to_blocks(site.weight, site.heads), to_blocks(new, site.heads), strict=True)
    ):
        angles = principal_angles(old_block, new_block) if np.isfinite(old_block).all() else np.zeros(0)
        largest, mean = (float(angles.max()), float(angles.mean())) if len(angles) else (None, None)
        moves.append(HeadMove(site.role, site.layer, head, site.path, largest, mean))
    return moves


def score_changes(model: PreTrainedModel, before: Scales, after: Scales) -> list[ScoreScale]:
    """Two results of `score_scales` on one model, side by side."""
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
    """The norms that Qwen3 and similar models apply to queries and keys."""
    attention = model.get_submodule(site.attention)
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return None if None in norms else norms  # type: ignore[return-value]


def _predicted(model: nn.Module, q: Site, k: Site) -> list[float | None]:
    """For x and y of independent entries: Var_y (Wx + b).(Vy) = tr(W'W V'V) + b'V V'b, for each head."""
    if _norms(model, q) is not None:
        return [None] * q.heads  # the norm sets the scale, whatever the weights
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
    handles = [handle for q, k in pairs for handle in _add_hooks(model, q, k, batch, scales)]
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()(**batch)
    except (TypeError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = first_line(error)
        raise UserError(f"the sample does not fit this {type(model).__name__}: {reason}") from error
    finally:
        for module, was in training.items():
            module.training = was
        for handle in handles:
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


def _add_hooks(model: PreTrainedModel, q: Site, k: Site, batch: dict[str, Any], scales: Scales) -> list[Any]:
    """Have the scales of one attention computed from the inputs of q and k when the model is called."""
    inputs: dict[str, Tensor] = {}

    def hook(*roles: str) -> Callable[..., None]:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            inputs.update(dict.fromkeys(roles, value))
            if len(inputs) == 2:
                per_head = _score_scale(model, q, k, inputs["q"], inputs["k"], batch)
                scales.update({(q.attention, head): value for head, value in enumerate(_floats(per_head))})
                inputs.clear()

        return take

    one_product = q.split or model.config.model_type == OelmGPTConfig.model_type
    if q.part is not None or one_product:
        called = model.get_submodule(q.path.rpartition(".")[0]) if one_product else q.module
        return [called.register_forward_pre_hook(hook("q", "k"), with_kwargs=True)]
    return [site.module.register_forward_pre_hook(hook(site.role), with_kwargs=True) for site in (q, k)]


def _score_scale(
    model: PreTrainedModel, q: Site, k: Site, xq: Tensor, xk: Tensor, batch: dict[str, Any]
) -> Tensor:
    """The scale of each head's scores between the tokens of these inputs, padding left out, (heads,)."""
    queries, keys = (
        F.linear(x.float(), site.weight.float(), None if site.bias is None else site.bias.float()).unflatten(
            -1, (site.heads, -1)
        )
        for x, site in ((xq, q), (xk, k))
    )  # (B, T, H, D)
    if (norms := _norms(model, q)) is not None:
        queries, keys = (norm(x).float() for norm, x in zip(norms, (queries, keys), strict=True))
    keys = keys.repeat_interleave(q.heads // k.heads, 2)
    encoder_mask = batch.get("attention_mask")
    in_decoder = model.config.is_encoder_decoder and "decoder" in q.path.split(".")
    query_mask = batch.get("decoder_attention_mask") if in_decoder else encoder_mask
    key_mask = query_mask if xk is xq else encoder_mask
    total, count = torch.zeros(q.heads, device=xq.device), 0
    for text in range(len(queries)):  # one at a time: a batch's scores may not fit
        a, b = _without_padding(queries[text], query_mask, text), _without_padding(keys[text], key_mask, text)
        scores = torch.einsum("qhd,khd->hqk", a, b) * q.score_scale
        total += scores.var(-1, correction=0).sum(-1)
        count += len(a)
    return (total / max(count, 1)).sqrt()


def _without_padding(x: Tensor, mask: Tensor | None, text: int) -> Tensor:
    return x if mask is None or mask.shape[1] != len(x) else x[mask[text].bool()]


def _floats(values: Tensor) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
