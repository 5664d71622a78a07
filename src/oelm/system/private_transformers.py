"""The private and unstable parts of transformers that this package uses, each behind a function with a test.

What `models/gpt.py` overrides (`_init_weights`, `_no_split_modules`, `_supports_sdpa`, `_tied_weights_keys`,
`_input_embed_layer`) is transformers' documented interface of a custom model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file


def has_model_for(auto_class: str, config: PreTrainedConfig) -> bool:
    """Whether an Auto class, by its name, has a model for the architecture of this config."""
    return type(config) in getattr(transformers, auto_class)._model_mapping


def attention_name(model: PreTrainedModel) -> str:
    """The attention implementation that a model uses now: "sdpa", "eager", ..."""
    return str(model.config._attn_implementation)


def sdpa_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The attention function registered as "sdpa", and the function that makes its masks."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def block_class_names(model: PreTrainedModel) -> set[str]:
    """The classes of the blocks that a sharded model is divided into."""
    return set(model._no_split_modules or ())


def is_loaded(parameter: Tensor) -> bool:
    """Whether `from_pretrained` filled this parameter, so that `_init_weights` must leave it alone."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def mark_initialized(module: nn.Module) -> None:
    """Mark a module that was made outside a model's `__init__`, so that transformers does not initialise
    it."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def is_default_causal_lm_loss(function: Callable[..., Any]) -> bool:
    """Whether a model's `loss_function` is the one that transformers gives to a causal language model."""
    return function is ForCausalLMLoss


def initialize_again(model: PreTrainedModel, path: str) -> set[str]:
    """Initialise the module at `path` as transformers does for a module that a checkpoint lacks.

    Returns the names of its parameters; no other parameter changes.
    """
    names = {f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()}
    for name, parameter in model.named_parameters():
        parameter._is_hf_initialized = name not in names  # type: ignore[attr-defined]
    model._init_weights(model.get_submodule(path))
    while path:  # in some families a parent module initialises the head
        path = path.rpartition(".")[0]
        model._init_weights(model.get_submodule(path))
    return names


def hub_file(name: str, file: str, hub: Mapping[str, Any]) -> Path | None:
    """The path of a checkpoint's file, from the hub or its cache as in `from_pretrained`; None if the
    checkpoint has no such file.

    `hub` has the arguments of `from_pretrained` that locate the checkpoint.
    """
    path = cached_file(
        name, file, **hub,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return None if path is None else Path(path)
