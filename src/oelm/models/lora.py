"""LoRA, for comparison: low-rank adapters of q and v, by PEFT, in a model that keeps its class.

Only the adapters and the task's head train. The state dict is that of the plain model with the adapters
merged, so that any code that saves the model saves an ordinary checkpoint. Loaded again, it stays merged, and
new adapters start from zero.
"""

import importlib.util
import warnings
from typing import Any

import torch
from torch import nn
from transformers import Conv1D

from oelm.errors import UserError
from oelm.models.families import find_sites
from oelm.models.gpt_config import OelmGPTConfig
from oelm.system.private_peft import (
    BASE_LAYER,
    base_layer,
    has_lora,
    is_adapter,
    is_second_factor,
    plain_name,
    weight_change,
)

ADAPTED = ("q", "v")


def check_lora(model: nn.Module) -> None:
    """Raise UserError, before the model is touched, if adapters cannot be added."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("method lora needs PEFT, which is not installed: pip install peft")
    if model.config.model_type == OelmGPTConfig.model_type:  # type: ignore[union-attr]
        raise UserError("method lora is for pretrained architectures, not for the reference GPT")


def add_lora(model: nn.Module, rank: int, seed: int) -> None:
    """Add adapters of this rank, scaled by 2, to every q and v. B starts as zero, so no output changes."""
    from peft import LoraConfig, inject_adapter_in_model

    sites = [site for site in find_sites(model) if site.role in ADAPTED]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted({site.path for site in sites}),
        fan_in_fan_out=isinstance(sites[0].module, Conv1D),
    )
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():  # undo PEFT's freezing, as the method decides
        parameter.requires_grad_(trains.get(plain_name(name), True))
    for layer in adapted_layers(model).values():
        layer.register_state_dict_post_hook(_save_merged)
        layer.register_load_state_dict_pre_hook(_load_plain)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if has_lora(module)}


def merged(layer: Any) -> nn.Module:
    """The adapted projection, with its adapter added to its weight."""
    projection: Any = base_layer(layer)
    with torch.no_grad():
        projection.weight += weight_change(layer)
    return projection


def _save_merged(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        value = state.pop(key)
        kind = key.removeprefix(f"{prefix}{BASE_LAYER}.")
        if kind == "weight":
            value = value.detach() + weight_change(layer).detach()
        if kind in ("weight", "bias"):
            state[prefix + kind] = value


def _load_plain(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a plain projection's weights unchanged, and reset the adapter so that it changes nothing."""
    if prefix + "weight" not in state:
        return
    for name, value in layer.named_parameters():
        plain = prefix + name.removeprefix(f"{BASE_LAYER}.")
        if plain in state:
            state[prefix + name] = state.pop(plain)
        elif is_adapter(f".{name}"):
            state[prefix + name] = (torch.zeros_like if is_second_factor(name) else torch.clone)(
                value.detach()
            )
    layer.holds_learned = True
