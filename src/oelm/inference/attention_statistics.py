"""Statistics of every attention head of a model: of its attention on a sample of texts, and of its weights.

Statistics of attention are means over queries: all tokens of a text but the first, which in a causal model
attends only to itself. Scores are the model's own: scaled, after rotary positions and norms of queries and
keys, with position biases. The effective rank of W_Q W_K' and the distance depend on the weights alone.

Shapes in comments: B texts of one length without padding, H heads, T queries, S keys, D head dimension.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from oelm.models.families import Site, family_of, find_sites
from oelm.models.gpt_block import SelfAttention, rotate
from oelm.orthogonal import Array, to_blocks
from oelm.system.private_transformers import attention_name, sdpa_functions

NAME = "oelm_statistics"
SDPA, SDPA_MASK = sdpa_functions()


@dataclass(frozen=True)
class Head:
    """One head. `previous` and `same` are None for cross-attention (of a decoder to its source)."""

    attention: str  # its path in every layer: "h.*.attn"
    layer: int
    head: int
    entropy: float  # in nats
    relative_entropy: float  # 1: uniform over the visible tokens; 0: all on one token
    first: float  # share of the attention on the text's first token
    previous: float | None  # on the token before the query's own
    same: float | None  # on the query's own token
    score_std: float  # of the scores of one query over its visible keys, pooled over the queries
    effective_rank: float  # of W_Q W_K', at most the head dimension
    distance: float | None  # of W_Q and W_K from their start, relative to the start's Frobenius norm


MEASURES = (
    "relative_entropy", "first", "previous", "same", "score_std", "effective_rank", "distance",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionStatistics:
    """The heads of one model on one sample. `uniform`: attention -> the share that uniform attention would
    put on one token; `notes` say what is missing, and why."""

    heads: list[Head]
    uniform: dict[str, float]
    head_dim: int
    texts: int
    tokens: int
    sample: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def attentions(self) -> list[str]:
        return list(dict.fromkeys(head.attention for head in self.heads))

    def grid(self, attention: str, measure: str) -> Array | None:
        """The measure of each head, (layers, heads); None if it is not known."""
        heads = [head for head in self.heads if head.attention == attention]
        values = [getattr(head, measure) for head in heads]
        if None in values:
            return None
        return np.array(values).reshape(1 + max(head.layer for head in heads), -1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Sums:
    """Sums over queries of one layer's attention, by head."""

    queries: int = 0
    keys: int = 0  # degrees of freedom: visible keys, less one for each query
    uniform: float = 0.0
    most_entropy: float = 0.0
    # Entropy, first, previous, same, squares.
    by_head: Array = field(default_factory=lambda: np.zeros((5, 1)))

    def add(self, scores: Tensor, visible: Tensor, cross: bool) -> None:
        """Add scores (B, H, T, S), with the mask of visible keys, (T, S) or broadcastable."""
        length, keys = scores.shape[-2:]
        position = torch.arange(keys - length, keys, device=scores.device)  # of each query among the keys
        chosen = torch.arange(length, device=scores.device) if cross else (position > 0).nonzero()[:, 0]
        if not len(chosen):
            return
        visible = visible.expand(len(scores), 1, length, keys)[:, :, chosen]
        scores, position = scores[:, :, chosen].double(), position[chosen]
        counts = visible.sum(-1, keepdim=True)  # (B, 1, T, 1)
        logs = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
        shares = logs.exp()
        means = (scores * visible).sum(-1, keepdim=True) / counts
        rows = [-(shares * logs.masked_fill(~visible, 0)).sum(-1), shares[..., 0]]
        for back in (1, 0):
            index = (position - back).clamp(0)[:, None].expand(*shares.shape[:-1], 1)
            rows.append(torch.zeros_like(rows[0]) if cross else shares.gather(-1, index)[..., 0])
        rows.append((((scores - means) * visible) ** 2).sum(-1))
        self.by_head = self.by_head + torch.stack(rows).sum((1, 3)).cpu().numpy()  # (5, H)
        self.queries += len(scores) * len(chosen)
        self.keys += int((counts - 1).sum())
        self.uniform += float((1 / counts).sum())
        self.most_entropy += float(counts.log().sum())


class _Recorder:
    """Records the sums of every attention that a model computes, by the path of its module."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): path for path, module in model.named_modules()}
        self.cross = cross_attentions(model)
        self.sums: dict[str, _Sums] = {}

    def add(self, module: nn.Module, scores: Tensor, visible: Tensor) -> None:
        path = self.names[id(module)]
        self.sums.setdefault(path, _Sums()).add(scores, visible, path in self.cross)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *,
        scaling: float | None = None, position_bias: Tensor | None = None, is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """SDPA as transformers calls it, with its scores recorded."""
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q @ keys.transpose(-1, -2) * scale
        if position_bias is not None:
            scores = scores + position_bias
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        self.add(module, scores, visible_keys(scores, mask, causal))
        more = {} if position_bias is None else {"position_bias": position_bias}
        return SDPA(module, q, k, v, mask, scaling=scaling, is_causal=is_causal, **more, **rest)

    def record_inputs(self, attention: SelfAttention, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of the reference GPT's attention, which records the scores it will compute."""
        x, mask, causal, rotation, _ = inputs
        q, k = (
            part(x).unflatten(-1, (attention.num_heads, -1)) for part in (attention.q_proj, attention.k_proj)
        )
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, H, T, D)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        self.add(attention, scores, visible_keys(scores, mask, causal))


def visible_keys(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The keys that each query sees by an SDPA mask: where it is true, or not very negative. Without a mask
    all keys or, if `causal`, those up to the query."""
    length, keys = scores.shape[-2:]
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    everything = torch.ones(length, keys, dtype=torch.bool, device=scores.device)
    return everything.tril(keys - length) if causal and length > 1 else everything


def cross_attentions(model: nn.Module) -> set[str]:
    """The paths of cross-attentions: in the family's table, the second attention of a stack."""
    stacks: set[str] = set()
    patterns = set()
    for attention in family_of(model).attentions:
        stack = attention.at.partition(".*")[0]
        if stack in stacks:
            patterns.add(attention.at)
        stacks.add(stack)
    return {q.attention for q, _, at in _pairs(model) if at in patterns}


def _pairs(model: nn.Module) -> Iterator[tuple[Site, Site, str]]:
    """q and k of every attention of every layer, and the pattern of its path in the family's table."""
    sites = find_sites(model)
    keys = {site.attention: site for site in sites if site.role == "k"}
    patterns = [attention.at for attention in family_of(model).attentions]
    for site in sites:
        if site.role == "q":
            here = (at for at in patterns if site.name.startswith(at.replace("*", str(site.layer)) + "."))
            yield site, keys[site.attention], next(here)


# Active ones. The function that transformers registers is never removed, so it must not hold a model.
_recorders: list[_Recorder] = []


def _attend(*given: Any, **more: Any) -> Any:
    return _recorders[-1].attend(*given, **more)


@contextmanager
def _recording(model: Any) -> Iterator[_Recorder]:
    own = [module for module in model.modules() if isinstance(module, SelfAttention)]  # the reference GPT's
    recorder = _Recorder(model)
    if own:
        handles = [module.register_forward_pre_hook(recorder.record_inputs) for module in own]
        try:
            yield recorder
        finally:
            for handle in handles:
                handle.remove()
        return
    before = attention_name(model)
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, SDPA_MASK)
    model.set_attn_implementation(NAME)
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.pop()
        model.set_attn_implementation(before)


def measure_heads(
    model: Any, passes: Iterable[int], start: Any = None, notes: list[str] | None = None,
    sample: str = "",
) -> AttentionStatistics:  # fmt: skip
    """The statistics of a model's heads. `passes` calls the model on one text at a time, without padding, and
    yields its number of tokens; `start` is the model before its training, if that is known."""
    model.eval()
    with _recording(model) as recorder, torch.no_grad():
        lengths = list(passes)
    starts = {} if start is None else {q.attention: (q, k) for q, k, _ in _pairs(start)}
    heads: list[Head] = []
    uniform: dict[str, float] = {}
    head_dim = 0
    for q, k, at in _pairs(model):
        if (sums := recorder.sums.get(q.attention)) is None or not sums.queries:
            continue
        head_dim = max(head_dim, q.head_dim)
        ranks = effective_ranks(q, k)
        moved = distances((q, k), starts[q.attention]) if q.attention in starts else [None] * q.heads
        entropy, first, previous, same, squares = sums.by_head
        uniform[at] = uniform.get(at, 0.0) + sums.uniform / sums.queries / q.num_layers
        for head in range(q.heads):
            cross = q.attention in recorder.cross
            heads.append(Head(
                at, q.layer, head, float(entropy[head] / sums.queries),
                float(entropy[head] / sums.most_entropy) if sums.most_entropy else 0.0,
                float(first[head] / sums.queries),
                None if cross else float(previous[head] / sums.queries),
                None if cross else float(same[head] / sums.queries),
                float((squares[head] / max(sums.keys, 1)) ** 0.5), float(ranks[head]), moved[head],
            ))  # fmt: skip
    return AttentionStatistics(heads, uniform, head_dim, len(lengths), sum(lengths), sample, notes or [])


def effective_ranks(q: Site, k: Site) -> Array:
    """For each head, the exponential of the entropy of the singular values of W_Q W_K', scaled to sum 1:
    their number if all are equal, 1 if one is much larger than the others."""
    of_q, of_k = to_blocks(q.weight, q.heads), to_blocks(k.weight, k.heads)  # (H, C, D)
    of_k = np.repeat(of_k, q.heads // k.heads, axis=0)
    # The orthonormal factors of the blocks do not change the singular values of the product.
    left, right = (np.asarray(np.linalg.qr(blocks, mode="r")) for blocks in (of_q, of_k))
    core = left @ right.transpose(0, 2, 1)
    values = np.linalg.svd(core, compute_uv=False)
    shares = values / np.maximum(values.sum(-1, keepdims=True), np.finfo(float).tiny)
    return np.exp(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1))


def distances(now: tuple[Site, Site], start: tuple[Site, Site]) -> list[float]:
    """For each head, the distance that W_Q and W_K moved together, relative to their norm at the start."""
    heads, moved, size = now[0].heads, 0.0, 0.0
    for after, before in zip(now, start, strict=True):
        new, old = (
            np.repeat(to_blocks(site.weight, site.heads), heads // site.heads, axis=0)
            for site in (after, before)
        )
        moved, size = moved + ((new - old) ** 2).sum((1, 2)), size + (old**2).sum((1, 2))
    return [float(value) for value in np.sqrt(moved / np.maximum(size, np.finfo(float).tiny))]


def differences(one: AttentionStatistics, other: AttentionStatistics) -> dict[str, dict[str, Any]]:
    """Measure -> attention -> `difference`, as lists."""
    by_measure = {measure: difference(one, other, measure) for measure in MEASURES}
    return {m: {at: grid.tolist() for at, grid in by_at.items()} for m, by_at in by_measure.items()}


def difference(one: AttentionStatistics, other: AttentionStatistics, measure: str) -> dict[str, Array]:
    """Attention -> the measure of the other's heads minus that of `one`'s; only where both are known."""
    grids = {at: (one.grid(at, measure), other.grid(at, measure)) for at in one.attentions}
    return {at: b - a for at, (a, b) in grids.items() if a is not None and b is not None}
