"""The report on a conversion, as data and as a table, with the scale of each head's scores before and after.

The scale is the standard deviation of the scores over the keys of one query, predicted from the weights for
inputs of independent entries of variance 1, before rotary positions, position biases and masks.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from oelm.method import HEAD_ROLES, RATIO_OF
from oelm.models.families import Site, find_sites
from oelm.models.learned import has_qk_norm
from oelm.system.messages import Notice


@dataclass(frozen=True)
class Row:
    """One role: how its weights start and which of its layers are frozen."""

    role: str
    tensors: int
    heads: int
    start: str
    gain: str
    frozen: str
    parameters: int


@dataclass(frozen=True)
class ScoreScale:
    """The standard deviation of a head's scores before and after; None if it cannot be predicted."""

    attention: str
    layer: int
    head: int
    before: float | None
    after: float | None


@dataclass(frozen=True)
class ConversionReport:
    """The result of `convert`. Prints as a table; `scores` has the scale of each head's scores."""

    model: str
    method: str
    seed: int
    init: str
    total: int
    frozen: int
    rows: tuple[Row, ...] = field(repr=False)
    scores: tuple[ScoreScale, ...] = field(default=(), repr=False)
    notes: tuple[Notice, ...] = field(default=(), repr=False)
    freeze_ratio: float | None = None
    freeze_ratio_of: str = "all"
    reached: float | None = None  # the share that freeze_ratio froze
    schedule: Mapping[str, Any] = field(default_factory=dict)  # the method's freeze_schedule
    frozen_at_end: int | None = None  # when the schedule is over; None without one

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
        lines = [("role", "tensors", "heads", "starts as", "gain", "frozen", "parameters")]
        for r in self.rows:
            numbers = str(r.tensors), str(r.heads or "-")
            lines.append((r.role, *numbers, r.start, r.gain, r.frozen, f"{r.parameters:,}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        form = "  ".join(f"{{:{'>' if i in (1, 2, 6) else '<'}{width}}}" for i, width in enumerate(widths))
        head, *body = (form.format(*line).rstrip() for line in lines)
        return "\n".join(
            [
                f"{self.model}: method {self.method}, seed {self.seed}",
                head,
                "  ".join("-" * width for width in widths),
                *body,
                f"parameters {self.total:,} = {self.trainable:,} trainable"
                f" + {self.frozen:,} frozen ({100 * self.frozen_share:.1f} %)",
                *self._summary(),
            ]
        )

    def _summary(self) -> Iterable[str]:
        if self.frozen_at_end is not None:
            words = ", ".join(f"{key} = {value}" for key, value in self.schedule.items())
            yield (
                f"these are the numbers of the first step; by the schedule ({words}) it ends with "
                f"{self.total - self.frozen_at_end:,} trainable + {self.frozen_at_end:,} frozen"
            )
        if self.reached is not None:
            parts = RATIO_OF[self.freeze_ratio_of]
            yield f"freeze_ratio {self.freeze_ratio}: {100 * self.reached:.2f} % of {parts}"
        if self.scores:
            before = _median([scale.before for scale in self.scores], ".3g")
            after = _median([scale.after for scale in self.scores], ".3g")
            yield f"scores' standard deviation, predicted from the weights: {before}, now {after}"
        yield from (f"note: {note}" for note in self.notes)


def _median(values: Iterable[float | None], form: str) -> str:
    """The median and the range of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, middle, high = (format(v, form) for v in (min(known), statistics.median(known), max(known)))
    return f"{middle} ({low} to {high})"


def score_scales(model: nn.Module) -> list[ScoreScale]:
    """The current standard deviation of every head's scores, as both `before` and `after`."""
    sites = [site for site in find_sites(model) if site.role in HEAD_ROLES]
    keys = {site.attention: site for site in sites if site.role == "k"}
    return [
        ScoreScale(q.attention, q.layer, head, value, value)
        for q in sites
        if q.role == "q"
        for head, value in enumerate(_predicted(model, q, keys[q.attention]))
    ]


def _predicted(model: nn.Module, q: Site, k: Site) -> list[float | None]:
    """For x and y of independent entries: Var_y (Wx + b).(Vy) = tr(W'W V'V) + b'V V'b, for each head."""
    if has_qk_norm(model, q):
        return [None] * q.heads  # as in Qwen3: the norms set the scale, not the weights
    wq, wk = (site.weight.detach().float().unflatten(0, (site.heads, -1)) for site in (q, k))  # (H, D, C)
    wk = wk.repeat_interleave(q.heads // k.heads, 0)
    gram_q, gram_k = wq @ wq.mT, wk @ wk.mT
    variance = (gram_q * gram_k).sum((1, 2))
    if q.bias is not None:
        bias = q.bias.detach().float().unflatten(0, (q.heads, -1))
        variance = variance + torch.einsum("hd,hde,he->h", bias, gram_k, bias)
    scales = (variance.clamp_min(0).sqrt() * q.score_scale).tolist()
    return [value if np.isfinite(value) else None for value in scales]
