"""Build the model of a configuration for its data: create or load it, check it, convert it."""

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import oelm.models.gpt as gpt
from oelm.config import RunConfig
from oelm.convert import ConversionReport, convert, release
from oelm.data import Store
from oelm.data.tasks import task_kind
from oelm.data.tasks.base import TaskKind
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.families import family_row
from oelm.models.fit import positions_of
from oelm.models.gpt_config import PRESETS, OelmGPTConfig, gpt_config
from oelm.models.pretrained import load_checkpoint, load_config, renew_scores
from oelm.models.roles import role_scales
from oelm.models.starts import start_folder
from oelm.system.messages import Notice, notice
from oelm.system.private_torch import Undrawn


def default_model(device: torch.device) -> str:
    return "gpt-tiny" if device.type == "cpu" else "gpt-medium-512"


def build_model(config: RunConfig, store: Store) -> tuple[PreTrainedModel, ConversionReport]:
    """The model of a run, on the CPU, converted by its method."""
    assert config.model.name is not None, "the config of a model to build is resolved"
    kind, name, seed = task_kind(store.kind), start_folder(config), config.training.seed
    model: PreTrainedModel
    note = None
    if name in PRESETS:
        cls, values = check_gpt(name, kind), _gpt_config(config, store, name)
        with Undrawn():  # the reference GPT draws its own weights
            model = cls(values)
    else:
        torch.manual_seed(seed)  # so that a new task head is the same for every method
        model, note = _load(config, store, kind, name)
    _check_fit(model, store, config)
    kind.fit_model(model, store, name)
    report = convert(model, Method.from_dict(config.method.overrides()), seed=seed)
    if not report.trainable:
        raise UserError(
            f"method {report.method} freezes all of {config.model.name}, which has no separate head for this "
            "task: nothing is left to train"
        )
    for key in ("lr_scale", "weight_decay_scale"):
        role_scales(model, config.training, key)  # raises if the model does not support it
    if note:
        report = replace(report, notes=(note,))
    return model, report


def check_gpt(name: str, kind: TaskKind) -> type[PreTrainedModel]:
    """The reference GPT's class for a kind of task; UserError if it has none."""
    kind.check_config(OelmGPTConfig(), name)
    cls: type[PreTrainedModel] = getattr(gpt, kind.auto_class.replace("AutoModel", "OelmGPT"))
    return cls


def _gpt_config(config: RunConfig, store: Store, name: str) -> OelmGPTConfig:
    preset = gpt_config(name)
    fields: dict[str, Any] = {
        "vocab_size": store.vocab_size,
        # As many positions as the size has, or more for longer texts.
        "max_position_embeddings": max(preset.max_position_embeddings, config.task.max_length),
        "init_seed": config.training.seed,
        **task_kind(store.kind).config_fields(store),
    }
    for key in ("dropout", "attention_dropout", "positions", "pooling"):
        if (value := getattr(config.model, key)) is not None:
            fields[key] = value
    tokenizer = store.tokenizer()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[key] = getattr(tokenizer, key, None)
    return gpt_config(name, **fields)


def _load(
    config: RunConfig, store: Store, kind: TaskKind, name: str
) -> tuple[PreTrainedModel, Notice | None]:
    """A pretrained model from a folder or the hub, with a head for this task, and a note on new weights."""
    fields = kind.config_fields(store)
    for key in ("positions", "pooling"):
        if getattr(config.model, key) is not None:
            raise UserError(f"model.{key} is for a reference GPT from scratch; {name} has its own")
    known = load_config(name)
    family_row(known.model_type)  # before its weights are fetched
    fields |= _dropout(known, config)
    kind.check_config(known, name)
    model, new = load_checkpoint(
        getattr(transformers, kind.auto_class), name, new_head=True, dtype=torch.float32, **fields
    )
    for module in model.modules():
        if config.model.dropout is not None and isinstance(module, torch.nn.Dropout):
            module.p = config.model.dropout  # some heads have a rate outside the config: Llama's for tags
    note = notice("training.new_weights", names=sorted(new)) if new else None
    others = store.label_names and known.id2label != dict(enumerate(store.label_names))
    # With as many labels as the checkpoint has, each would inherit the weights of another label.
    if others and (renewed := renew_scores(model, new)):
        note = notice("training.new_labels", names=sorted(new | renewed))
    if getattr(model.config, "oelm", None):  # trained here before: start from its weights, as any model
        release(model)
    return model, note


def _dropout(known: Any, config: RunConfig) -> dict[str, float]:
    """`model.dropout` for every dropout field in the config of a pretrained architecture."""
    if config.model.attention_dropout is not None:
        raise UserError(
            "model.attention_dropout is for the reference GPT; model.dropout sets all of a model's"
        )
    if config.model.dropout is None:
        return {}
    # The families name the fields hidden_dropout_prob, resid_pdrop, seq_classif_dropout and more; `None` is a
    # rate that follows another.
    rates = {
        key: config.model.dropout
        for key, value in known.to_dict().items()
        if ("dropout" in key or key.endswith("pdrop"))
        and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    }
    if not rates:
        raise UserError(f"model.dropout: {known.model_type} has no dropout to set")
    return rates


def _check_fit(model: PreTrainedModel, store: Store, config: RunConfig) -> None:
    """Refuse a tokenizer with more ids than the embedding, and texts longer than the model's positions."""
    rows = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if store.vocab_size > rows:
        raise UserError(
            f"the tokenizer {store.meta['tokenizer']['name']} has {store.vocab_size:,} tokens, but the model "
            f"{config.model.name} knows {rows:,}; use the model's own tokenizer (task.tokenizer)"
        )
    positions = positions_of(model.config)
    if positions is None:
        return
    for key in ("max_length", "max_target_length"):
        length = getattr(config.task if key == "max_length" else store, key)
        if length and length > positions:
            raise UserError(f"task.{key} {length} exceeds the {positions} positions of {config.model.name}")
