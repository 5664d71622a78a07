"""Learned additions to frozen q and k: factors of heads or head dimensions, and low-rank adapters.

A frozen projection of weight W and bias b computes with diag(s) W + B A and diag(s) b. The factors s belong
to the queries, so that a head's scores are those of W_Q diag(s) W_K'; the low-rank adapters B A are on
queries and keys. At the start s is 1 and B is 0, so that no output changes. The additions are applied to the
weights, not to the tokens: q, k and v stay one product, and the extra cost does not grow with the batch.

The state dict is that of the plain projection with the additions merged into its weight and bias, so that any
code that saves the model saves an ordinary checkpoint.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.errors import UserError
from oelm.method import Method
from oelm.orthogonal import generator
from oelm.system.private_transformers import mark_initialized
from oelm.system.shards import gathered

if TYPE_CHECKING:
    from oelm.models.families import Site

SCALE, UP, DOWN = "learned_scale", "learned_up", "learned_down"


class LearnedLinear(nn.Linear):
    """A frozen projection with learned additions: `scale` factors, each for equally many rows of the weight
    (0: none), and an adapter whose A starts as `down` (None: none)."""

    holds_learned = False  # whether a plain state dict was loaded, whose weights may include merged additions

    def __init__(self, frozen: nn.Linear, scale: int, down: Tensor | None) -> None:
        super().__init__(frozen.in_features, frozen.out_features, frozen.bias is not None, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        own, start = self.weight.detach(), dict.fromkeys((SCALE, UP, DOWN))
        if scale:
            start[SCALE] = own.new_ones(scale)
        if down is not None:
            start |= {UP: own.new_zeros(self.out_features, len(down)), DOWN: down.to(own.device, own.dtype)}
        for name, value in start.items():
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self.register_state_dict_post_hook(_save_merged)
        self.register_load_state_dict_pre_hook(_load_plain)
        mark_initialized(self)

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias with the additions, merged in their own precision, then cast by autocast."""
        scale, up, down = (getattr(self, name) for name in (SCALE, UP, DOWN))
        kind = self.weight.device.type
        with torch.autocast(kind, enabled=False):
            weight, bias = merge(self.weight, self.bias, scale, up, down)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return weight.to(dtype), None if bias is None else bias.to(dtype)
        return weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.effective())

    def merged(self) -> nn.Linear:
        """A plain projection that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        with torch.no_grad():
            weight, bias = merge(self.weight, self.bias, *(getattr(self, name) for name in (SCALE, UP, DOWN)))
        plain.weight = nn.Parameter(weight)
        if bias is not None:
            plain.bias = nn.Parameter(bias.detach())
        return plain.train(self.training)


def merge(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, up: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """diag(scale) weight + up down, and diag(scale) bias."""
    if scale is not None:
        groups = (len(scale), -1)
        weight = (weight.unflatten(0, groups) * scale[:, None, None]).flatten(0, 1)
        bias = None if bias is None else (bias.unflatten(0, groups) * scale[:, None]).flatten()
    if up is not None and down is not None:
        weight = torch.addmm(weight, up, down)
    return weight, bias


def effective(part: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a projection, learned additions included."""
    return part.effective() if isinstance(part, LearnedLinear) else (part.weight, part.bias)


def learned_layers(model: nn.Module) -> dict[str, LearnedLinear]:
    """The projections with learned additions, by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LearnedLinear)}


def is_factor(name: str) -> bool:
    return name.endswith(f".{SCALE}")


def is_qk_adapter(name: str) -> bool:
    return name.endswith((f".{UP}", f".{DOWN}"))


def changed_kinds(method: Method, site: "Site") -> tuple[str, ...]:
    """Which of this projection's "weight" and "bias" the method's learned additions change when merged."""
    if not method.freezes(site.role, site.layer, site.num_layers):
        return ()
    if site.role == "q" and method.qk_scale != "none":
        return ("weight", "bias")
    return ("weight",) if site.role in ("q", "k") and method.qk_lora else ()


def check_learned(model: nn.Module, method: Method, sites: Iterable["Site"]) -> None:
    """Refuse, before the model is touched, an addition that the architecture cannot merge or would undo."""
    for site in sites:
        if not changed_kinds(method, site):
            continue
        if method.qk_scale != "none" and has_qk_norm(model, site):
            family = model.config.model_type  # type: ignore[union-attr]
            raise UserError(
                f"qk_scale = {method.qk_scale!r} is not for {family}: it norms queries after their "
                "projection, which undoes a factor per head, and its norm has factors of its own"
            )
        if site.part is None and type(site.module) is not nn.Linear:
            kind = type(site.module).__name__
            raise UserError(f"{site.path} is a {kind}: qk_scale and qk_lora need plain linear layers")


def add_learned(model: nn.Module, method: Method, seed: int, sites: Iterable["Site"]) -> None:
    """Add the method's learned factors and adapters to the frozen projections among the `sites` (fused
    matrices already split). Adapters start as PEFT's: A uniform within 1/sqrt(width), B zero."""
    for site in sites:
        if not changed_kinds(method, site):
            continue
        assert isinstance(site.module, nn.Linear)
        factors, down = 0, None
        if site.role == "q" and method.qk_scale != "none":
            factors = site.heads if method.qk_scale == "head" else site.module.out_features
        if method.qk_lora:
            shape = (method.qk_lora, site.module.in_features)
            draw = generator(seed, f"{site.name}.{DOWN}").random(shape, dtype="float32")
            down = torch.from_numpy((2 * draw - 1) * shape[1] ** -0.5)
        learned = LearnedLinear(site.module, factors, down)
        model.set_submodule(site.path, learned.train(site.module.training))


def has_qk_norm(model: nn.Module, site: "Site") -> bool:
    """Whether the attention normalises queries and keys after their projections, as Qwen3 does."""
    attention = model.get_submodule(site.attention)
    return hasattr(attention, "q_norm") and hasattr(attention, "k_norm")


def _save_merged(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    names = ("weight", "bias", SCALE, UP, DOWN)
    with torch.no_grad():
        parts = [state.pop(prefix + name, None) for name in names]
        whole: list[Any] = [None if part is None else gathered(part) for part in parts]
        weight, bias = merge(*whole)
    state[prefix + "weight"] = weight
    if bias is not None:
        state[prefix + "bias"] = bias


def _load_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a plain projection's weights unchanged, and reset the additions to their start."""
    assert isinstance(module, LearnedLinear)
    starts = {SCALE: torch.ones_like, UP: torch.zeros_like, DOWN: torch.clone}
    own = {name: value for name in starts if (value := getattr(module, name)) is not None}
    if prefix + "weight" in state and not any(prefix + name in state for name in own):
        state |= {prefix + name: starts[name](value.detach()) for name, value in own.items()}
        module.holds_learned = True
