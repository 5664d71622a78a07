"""Resolves `Method.freeze_ratio`: the layers of each role that together are at most this share of a model.

Frozen first are q and k of all layers, then the weights of the feed-forward networks' first products (ffn_in)
and then of their second ones (ffn_out), each from the bottom layer up, until the next matrix would exceed the
share. Matrices of one role in layers of one number (gate and up of a gated network, encoder and decoder) go
together. Biases of q and k go with them and count in "all"; those of the feed-forward networks train.
"""

from dataclasses import replace

from torch import nn

from oelm.errors import UserError
from oelm.method import HEAD_ROLES, RATIO_OF, START_ROLES, Method
from oelm.models.families import Site, find_sites


def resolve_ratio(model: nn.Module, method: Method) -> Method:
    """The method with the `freeze` and `start` that its `freeze_ratio` means in this model."""
    ratio, of = method.freeze_ratio, method.freeze_ratio_of
    if ratio is None:
        return method
    total, parts, sites = _total(model, of), RATIO_OF[of], find_sites(model)
    sizes: dict[tuple[str, int], int] = {}
    for site in sites:
        if site.role in START_ROLES:
            key = site.role, site.layer
            sizes[key] = sizes.get(key, 0) + _size(site, of)
    layers: dict[str, list[int]] = {}
    frozen, share = 0, 0.0
    for role, layer in sorted(sizes, key=_order):
        frozen += sizes[role, layer]
        share = frozen / total
        if share > ratio:
            if not layers:
                first = f"{role} of layer {layer} alone is {100 * share:.2f} % of {parts}"
                raise UserError(f"freeze_ratio {ratio} freezes nothing: {first}")
            break
        layers.setdefault(role, []).append(layer)
    else:
        if ratio > share:
            largest = f"{100 * share:.2f} % of {parts} ({share!r})"
            raise UserError(
                f"freeze_ratio {ratio} is out of reach: q, k and the feed-forward weights are {largest}"
            )
    depths = {role: max(site.num_layers for site in sites if site.role == role) for role in layers}
    return replace(
        method,
        start={role: method.start.get(role, "orthogonal") for role in layers},
        freeze={
            role: "all" if len(numbers) == depths[role] else ",".join(map(str, numbers))
            for role, numbers in layers.items()
        },
    )


def reached_share(model: nn.Module, method: Method) -> float | None:
    """The share that `freeze_ratio` has frozen, of all that it refers to; None for a method without it."""
    if method.freeze_ratio is None:
        return None
    frozen = [s for s in find_sites(model) if method.freezes(s.role, s.layer, s.num_layers)]
    return sum(_size(site, method.freeze_ratio_of) for site in frozen) / _total(model, method.freeze_ratio_of)


def _order(key: tuple[str, int]) -> tuple[int, int, int]:
    role, layer = key
    number = START_ROLES.index(role)
    return (0 if role in HEAD_ROLES else number), layer, number


def _total(model: nn.Module, of: str) -> int:
    if of == "all":
        return sum(p.numel() for p in model.parameters())
    return sum(site.weight.numel() for site in find_sites(model))


def _size(site: Site, of: str) -> int:
    return site.parameters if of == "all" and site.role in HEAD_ROLES else site.weight.numel()
