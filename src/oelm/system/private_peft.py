"""The internals of PEFT's adapted layers that this package relies on. PEFT itself is not imported."""

from typing import Any

from torch import Tensor, nn

BASE_LAYER = "base_layer"  # the attribute of an adapted layer that is the projection it adapts
ADAPTER = "default"  # PEFT's name for an only adapter


def base_layer(module: nn.Module) -> nn.Module | None:
    """The projection inside an adapted layer; None if the module is not adapted."""
    base = getattr(module, BASE_LAYER, None)
    return base if isinstance(base, nn.Module) else None


def has_lora(module: nn.Module) -> bool:
    return base_layer(module) is not None and hasattr(module, "lora_A")


def weight_change(layer: Any) -> Tensor:
    """The product B A (scaled) by which an adapter changes the weight of its projection, (out, in)."""
    return layer.get_delta_weight(ADAPTER)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_second_factor(name: str) -> bool:
    """Whether this is the B of an adapter B A. While B is 0, the adapter changes nothing."""
    return "lora_B." in name


def is_adapted(name: str) -> bool:
    """Whether a parameter of this name is a weight that an adapter will change when it is merged."""
    return name.endswith(f".{BASE_LAYER}.weight")


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(f".{BASE_LAYER}.", ".")
