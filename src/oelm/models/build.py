"""From a configuration to a model that fits its data: built or loaded, checked, converted."""

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import oelm.models.gpt as gpt
from oelm.config import RunConfig
from oelm.convert import ConversionReport, convert
from oelm.data import Store
from oelm.data.catalogue import SEQ2SEQ
from oelm.data.tasks.seq2seq import set_writing
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.families import family_row
from oelm.models.fit import agree_on_padding, positions_of
from oelm.models.gpt_config import PRESETS, OelmGPTConfig, gpt_config
from oelm.models.pretrained import load_checkpoint, load_config, renew_scores
from oelm.system.messages import Notice, notice
from oelm.system.private_transformers import has_model_for

_REFERENCE = {
    "AutoModelForSequenceClassification": gpt.OelmGPTForSequenceClassification,
    "AutoModelForCausalLM": gpt.OelmGPTForCausalLM,
    "AutoModelForTokenClassification": gpt.OelmGPTForTokenClassification,
    "AutoModelForQuestionAnswering": gpt.OelmGPTForQuestionAnswering,
}


def default_model(device: torch.device) -> str:
    return "gpt-tiny" if device.type == "cpu" else "gpt-medium-512"


def build_model(config: RunConfig, store: Store, auto_class: str) -> tuple[PreTrainedModel, ConversionReport]:
    """The model of a run, on the CPU, converted by its method."""
    name, seed = config.model.name, config.training.seed
    assert name is not None, "the config of a model to build is resolved"
    model: PreTrainedModel
    note = None
    if name in PRESETS:
        refuse_seq2seq(name, store.kind)
        model = _REFERENCE[auto_class](_reference_config(config, store, name))
    else:
        torch.manual_seed(seed)  # a new task head starts the same for every method
        model, note = _load(config, store, auto_class, name)
    _check_fit(model, store, config)
    if store.kind == SEQ2SEQ:
        set_writing(model, store)
    report = convert(model, Method.from_dict(config.method.overrides()), seed=seed)
    if not report.trainable:
        raise UserError(
            f"method {report.method} freezes all of {config.model.name}, which has no separate head for this "
            "task: nothing is left to train"
        )
    if note:
        report = replace(report, notes=(note,))
    return model, report


def refuse_seq2seq(name: str, kind: str) -> None:
    """Say of a model without a decoder of its own that it cannot write targets."""
    if kind == SEQ2SEQ:
        raise UserError(
            f"{name} is not an encoder-decoder, and writing targets (task.target, --target) needs one; "
            "name a T5, a BART or their like with --model (a folder or a hub id)"
        )


def _reference_config(config: RunConfig, store: Store, name: str) -> OelmGPTConfig:
    preset = gpt_config(name)
    fields: dict[str, Any] = {
        "vocab_size": store.vocab_size,
        # A longer text than the size was made for gets its positions; a shorter one changes nothing.
        "max_position_embeddings": max(preset.max_position_embeddings, config.task.max_length),
        "init_seed": config.training.seed,
        **_labels(store),
    }
    for key in ("dropout", "attention_dropout", "positions", "pooling"):
        if (value := getattr(config.model, key)) is not None:
            fields[key] = value
    tokenizer = store.tokenizer()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields[key] = getattr(tokenizer, key, None)
    return gpt_config(name, **fields)


def _labels(store: Store) -> dict[str, Any]:
    if not store.label_names:
        return {}
    return {
        "num_labels": len(store.label_names),
        "id2label": dict(enumerate(store.label_names)),
        "label2id": {label: i for i, label in enumerate(store.label_names)},
    }


def _load(
    config: RunConfig, store: Store, auto_class: str, name: str
) -> tuple[PreTrainedModel, Notice | None]:
    """A pretrained model from a folder or the hub, with a head for this task; and a note on what is new."""
    fields = _labels(store) if auto_class != "AutoModelForCausalLM" else {}
    if auto_class == "AutoModelForQuestionAnswering":
        fields["num_labels"] = 2  # where an answer starts and ends, whatever the checkpoint was made for
    for key in ("positions", "pooling"):
        if getattr(config.model, key) is not None:
            raise UserError(f"model.{key} is for a reference GPT from scratch; {name} has its own")
    known = load_config(name)
    family_row(known.model_type)  # before its weights are fetched
    fields |= _dropout(known, config)
    if not known.is_encoder_decoder:
        refuse_seq2seq(name, store.kind)
    _refuse_other_kinds(known, auto_class, name)
    model, new = load_checkpoint(
        getattr(transformers, auto_class), name, new_head=True, dtype=torch.float32, **fields
    )
    for module in model.modules():
        if config.model.dropout is not None and isinstance(module, torch.nn.Dropout):
            module.p = config.model.dropout  # some heads have a rate that no config names: Llama's for tags
    if auto_class == "AutoModelForCausalLM":
        _refuse_seeing_ahead(model, name)
    note = notice("training.new_weights", names=sorted(new)) if new else None
    others = store.label_names and known.id2label != dict(enumerate(store.label_names))
    # Where there are as many, each label would inherit the weights of another.
    if others and (anew := renew_scores(model, new)):
        note = notice("training.new_labels", names=sorted(new | anew))
    if auto_class == "AutoModelForSequenceClassification":
        agree_on_padding(model, store.tokenizer())
        if model.config.problem_type is not None:  # what it was for another task
            model.config.problem_type = "single_label_classification"
    if getattr(model.config, "oelm", None):  # trained here before: start from its weights, as any model
        from oelm.convert import release

        release(model)
    return model, note


_TASKS = {
    "AutoModelForSequenceClassification": "classify texts",
    "AutoModelForCausalLM": "continue texts (language modelling)",
    "AutoModelForTokenClassification": "tag words",
    "AutoModelForQuestionAnswering": "answer questions",
    "AutoModelForSeq2SeqLM": "write targets",
}


def _refuse_other_kinds(known: Any, auto_class: str, name: str) -> None:
    """Say of an architecture that it does not do a task. Half of an encoder-decoder is no language model."""
    halved = known.is_encoder_decoder and auto_class == "AutoModelForCausalLM"
    if halved or not has_model_for(auto_class, known):
        raise UserError(
            f"{name} is a {known.model_type}, and such a model does not {_TASKS[auto_class]}; name one of "
            "another kind with --model"
        )


@torch.no_grad()
def _refuse_seeing_ahead(model: PreTrainedModel, name: str) -> None:
    """An encoder in a language model's place sees the tokens it is to predict: its perplexity would be
    worth nothing. Whether a model does is seen from two texts that differ in their last token."""
    training = model.training
    ids = torch.tensor([[2, 3, 4, 5], [2, 3, 4, 3]])
    before = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1]
    model.train(training)
    if not torch.allclose(before[0], before[1], rtol=1e-5, atol=1e-6):
        raise UserError(
            f"{name} sees the tokens that follow, so it cannot learn to predict them: a language model "
            "must be causal, such as GPT-2, Llama or a gpt- size"
        )


def _dropout(known: Any, config: RunConfig) -> dict[str, float]:
    """One rate for every dropout a pretrained architecture has."""
    if config.model.attention_dropout is not None:
        raise UserError(
            "model.attention_dropout is for the reference GPT; model.dropout sets all of a model's"
        )
    if config.model.dropout is None:
        return {}
    # The families call them hidden_dropout_prob, resid_pdrop, seq_classif_dropout and more; `None` is a rate
    # that follows another.
    found = {
        key: config.model.dropout
        for key, value in known.to_dict().items()
        if ("dropout" in key or key.endswith("pdrop"))
        and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    }
    if not found:
        raise UserError(f"model.dropout: {known.model_type} has no dropout to set")
    return found


def _check_fit(model: PreTrainedModel, store: Store, config: RunConfig) -> None:
    """The tokenizer's ids exist in the embedding, and the longest text has positions."""
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
