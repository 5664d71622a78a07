"""Load a checkpoint from a folder or the hub, and refuse one that does not match its config.

Only safetensors of its own folder are read, and no code that comes with a checkpoint is run: transformers
unpickles a shard whose name in the index does not end in .safetensors, and loads an adapter from the same
folder, even a pickled one. transformers fills missing tensors with random numbers and drops superfluous ones;
here both are errors, except in the head of a new task.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from oelm.errors import AuditError, UserError
from oelm.models.families import family_row
from oelm.system.hub import not_in_cache, with_cache_only
from oelm.system.library_errors import first_line, is_out_of_memory, wants_remote_code
from oelm.system.private_transformers import hub_file, initialize_again

HUB = ("subfolder", "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
# Arguments of every `from_pretrained`. Tensors of the wrong shape are reported here, by name.
ALWAYS = {
    "use_safetensors": True,
    "trust_remote_code": False,
    "ignore_mismatched_sizes": True,
    "output_loading_info": True,
}
MOST = 1000  # layers, and heads of one; they are made one by one
LAYER = re.compile(r"\.\d+\.")
INDEX, ADAPTER = "model.safetensors.index.json", "adapter_config.json"
PLAIN = re.compile(r"[^/\\\x00]+\.safetensors")  # a file of the checkpoint's own folder


def hub_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that locate a checkpoint."""
    return {key: kwargs[key] for key in HUB if key in kwargs}


def load_config(name: str, **hub: Any) -> PreTrainedConfig:
    """A checkpoint's config; `hub` are arguments that locate it (`hub_arguments`)."""
    import oelm.models.gpt  # noqa: F401 - registers the reference GPT

    path = str(name)
    if not Path(path).is_dir() and (path.count("/") > 1 or path.startswith((".", "/", "~"))):
        raise UserError(f"{name}: there is no such folder")  # and it cannot be a hub id
    try:
        hub = with_cache_only(path, hub)
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **hub)
    except Exception as error:  # a broken file, the hub and the network raise many kinds
        if is_out_of_memory(error):
            raise
        if wants_remote_code(error):
            raise _own_code(name) from None
        if hub.get("local_files_only") and not Path(path).exists():
            raise UserError(not_in_cache(path)) from None
        raise UserError(f"{name} is not a model that can be loaded: {first_line(error)}") from None
    if getattr(config, "auto_map", None):
        raise _own_code(name)
    for key in ("num_hidden_layers", "num_attention_heads"):
        value = getattr(config, key, None)
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise UserError(f"{name}: config.json says {key} = {value:,}; it must be between 1 and {MOST:,}")
    if getattr(config, "quantization_config", None):
        raise UserError(f"{name} is quantised: use the full-precision model, and quantise it afterwards")
    return config


def check_checkpoint(name: str) -> None:
    """Refuse a checkpoint that cannot be read or converted, before anything is prepared for it."""
    family_row(load_config(name).model_type)
    check_files(name)


def check_files(name: str, **kwargs: Any) -> None:
    """Refuse a checkpoint if loading it would read anything but safetensors of its own folder. `kwargs` are
    arguments of `from_pretrained`."""
    hub = with_cache_only(name, hub_arguments(kwargs))
    weights = getattr(load_config(name, **hub), "transformers_weights", None)  # a file, if it names one
    if Path(name).is_file():
        raise UserError(f"{name} is a file: name the folder of a model")
    if weights is not None and not (
        isinstance(weights, str) and PLAIN.fullmatch(weights.removesuffix(".index.json"))
    ):
        raise UserError(
            f"{name}: config.json names the weights {weights!r}, which are no safetensors of its own"
        )
    _refuse_pickles(Path(name, hub.get("subfolder") or ""), name)
    if any(True for _ in _files(name, ADAPTER, hub)):
        raise UserError(f"{name} holds an adapter ({ADAPTER}): merge it into its model, and save that")
    index = weights if weights is not None and weights.endswith(".json") else INDEX
    for path in _files(name, index, hub):
        _check_index(name, path)


def _files(name: str, file: str, hub: Mapping[str, Any]) -> Iterator[Path]:
    """The file of that name, if the checkpoint has it; in a folder, also the indices of its variants."""
    if Path(name).is_dir():
        pattern = f"{file.removesuffix('.json')}*.json" if file.endswith(".index.json") else file
        yield from sorted(Path(name, hub.get("subfolder") or "").glob(pattern))
    elif (path := hub_file(name, file, hub)) is not None:
        yield path


def _check_index(name: str, path: Path) -> None:
    try:
        if not path.is_file():
            raise OSError
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{name}: {path.name} is not the index of a checkpoint; save the model again"
        ) from None
    for file in files:
        if not isinstance(file, str) or not PLAIN.fullmatch(file):
            raise UserError(
                f"{name}: {path.name} names {file!r}, which is not a safetensors file of that folder: "
                "nothing else is read, since a pickle can run code"
            )


def _refuse_pickles(folder: Path, name: str) -> None:
    if any(folder.glob("*.safetensors")):
        return
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for path in folder.glob(pattern):
            raise UserError(
                f"{name} has its weights in {path.name} only, a pickle, which can run code when it is read: "
                "save the model as safetensors where you trust it"
            )


def load_as_saved(name: str, **kwargs: Any) -> PreTrainedModel:
    """A whole checkpoint in the class that saved it, its task's head included. Nothing is frozen."""
    import oelm.models.gpt as gpt

    config = load_config(name, **hub_arguments(kwargs))
    architecture = str((config.architectures or [""])[0])
    cls = getattr(gpt, architecture, None) or getattr(transformers, architecture, None)
    if cls is None:
        named = f"the architecture {architecture!r}, which transformers does not know"
        raise UserError(f"{name}: config.json names {named if architecture else 'no architecture'}")
    return load_checkpoint(cls, name, new_head=False, **kwargs)[0]


def load_checkpoint(
    cls: Any, name: str, *, new_head: bool, **kwargs: Any
) -> tuple[PreTrainedModel, set[str]]:
    """A model of this class, or of this Auto class, with a checkpoint's weights, and the names of the
    parameters that are not from the checkpoint: the task's head with `new_head`, else none."""
    kwargs = with_cache_only(name, kwargs)
    check_files(name, **kwargs)
    with _quiet():
        try:
            model, info = cls.from_pretrained(name, **kwargs | ALWAYS)
        except Exception as error:  # a config may hold any value, such as 0 heads
            if isinstance(error, UserError | AuditError) or is_out_of_memory(error):
                raise
            known = isinstance(error, OSError | ValueError | KeyError | RuntimeError | SafetensorError)
            why = "" if known else f"its config.json may be wrong: {type(error).__name__}, "
            raise UserError(f"{name} cannot be loaded: {why}{first_line(error)}") from None
    shapes = {key: (tuple(saved), tuple(wanted)) for key, saved, wanted in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - set(shapes)
    heads = _heads(model, missing, shapes if "num_labels" in kwargs else ()) if new_head else set()
    for key, (saved, wanted) in sorted(shapes.items()):
        if key not in heads:
            raise _mismatch(name, f"{key} has the shape {saved}, but its config says {wanted}")
    if lost := sorted(missing - heads):
        raise _mismatch(name, f"{_tensors(lost)} of {type(model).__name__} not there: {lost[0]}")
    if extra := _unexpected(model, info["unexpected_keys"], every=not new_head):
        raise _mismatch(name, f"{_tensors(extra)} its config has no place for: {extra[0]}")
    for key, weight in model.named_parameters():
        if not weight.is_meta and not weight.isfinite().all():
            raise UserError(f"{name}: {key} holds infinity or NaN; use a model with finite weights")
    return model, heads


def _heads(model: PreTrainedModel, missing: Collection[str], shapes: Collection[str]) -> set[str]:
    """The parameters of the task's head among those `missing` or of another shape in the checkpoint.

    A head is outside the base model or, if the base model has no prefix, as in some T5s, a part of which no
    parameter was saved. A pooler is inside the base model, but some tasks do not save it.
    """
    prefix = f"{model.base_model_prefix}."
    names = [name for name, _ in model.named_parameters()]
    saved = {name.partition(".")[0] for name in names if name not in missing}
    embedding = model.get_input_embeddings().weight
    new = {
        name
        for name in missing
        if (
            name.removeprefix(prefix).startswith("pooler.")
            if name.startswith(prefix)
            else name.partition(".")[0] not in saved and model.get_parameter(name) is not embedding
        )
    }
    return new | {name for name in shapes if not name.startswith(prefix) and not LAYER.search(name)}


@torch.no_grad()
def renew_scores(model: PreTrainedModel, new: Collection[str]) -> set[str]:
    """Initialise the last layer of the task's head again and return the names of its parameters; an empty
    set, and no change, if they are all `new` already."""
    prefix = f"{model.base_model_prefix}."
    path = [
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and not name.startswith(prefix)
    ][-1]
    names = {f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()}
    return set() if names <= set(new) else initialize_again(model, path)


def _unexpected(model: PreTrainedModel, unexpected: Collection[str], every: bool) -> list[str]:
    """The tensors a checkpoint should not have: with `every`, all `unexpected` ones, otherwise only layers
    beyond the config's, as fine-tuning drops another task's head. Buffers of older versions are ignored."""
    buffers = (".position_ids", ".attn.bias", ".masked_bias", ".inv_freq")
    if every:
        return sorted(name for name in unexpected if not name.endswith(buffers))
    prefix = f"{model.base_model_prefix}."
    known = {LAYER.sub(".*.", name.removeprefix(prefix)) for name in model.state_dict()}
    return sorted(name for name in unexpected if LAYER.sub(".*.", name.removeprefix(prefix)) in known)


def _own_code(name: str) -> UserError:
    return UserError(
        f"{name} asks for code of its own (auto_map in config.json), which is never run here: use a "
        "checkpoint of an architecture that transformers has"
    )


def _mismatch(name: str, what: str) -> UserError:
    return UserError(f"{name} does not match its config: {what}")


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context without transformers' own loading report and progress bar."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
