"""The inside of PEFT's adapted layers, as far as this package relies on it. PEFT itself is not imported."""

from typing import Any

from torch import Tensor, nn

BASE_LAYER = "base_layer"  # what an adapted layer calls the projection it adapts
ADAPTER = "default"  # PEFT's name for the one adapter there is


def base_layer(module: nn.Module) -> nn.Module | None:
    """The projection inside an adapted layer; None where the module is not adapted."""
    base = getattr(module, BASE_LAYER, None)
    return base if isinstance(base, nn.Module) else None


def has_lora(module: nn.Module) -> bool:
    return base_layer(module) is not None and hasattr(module, "lora_A")


def weight_change(layer: Any) -> Tensor:
    """What an adapted layer's adapter adds to the weight of its projection."""
    return layer.get_delta_weight(ADAPTER)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_second_factor(name: str) -> bool:
    """Whether this is the B of an adapter B A: where it is 0, the adapter changes nothing."""
    return "lora_B." in name


def is_adapted(name: str) -> bool:
    """Whether a parameter of this name is a weight that an adapter will change when it is merged."""
    return name.endswith(f".{BASE_LAYER}.weight")


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(f".{BASE_LAYER}.", ".")
