"""Around the reference GPT: the reports' own call, and the way out to a vanilla GPT-2."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from oelm.convert import convert
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.gpt import OelmGPTForCausalLM, OelmGPTForSequenceClassification
from oelm.models.gpt_config import OelmGPTConfig

# The reports' two switches, init_method and freeze_qk, as presets.
_REPORTED = {
    ("orthogonal", True): "oelm",
    ("orthogonal", False): "oelm-trainable",
    ("normal", True): "oelm-random",
    ("normal", False): "baseline",
}


def _method(init_method: str, freeze_qk: bool, method: str | Method | None) -> str | Method:
    if method is not None:
        return method
    kind = {"random": "normal"}.get(init_method, init_method)
    if (kind, bool(freeze_qk)) not in _REPORTED:
        raise UserError(f"init_method must be 'orthogonal' or 'normal', not {init_method!r}")
    return _REPORTED[kind, bool(freeze_qk)]


def create_oelm_classifier(
    num_classes: int,
    d_model: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    freeze_qk: bool = True,
    init_method: str = "orthogonal",
    *,
    method: str | Method | None = None,
    seed: int = 0,
    dropout: float = 0.1,
    **config: Any,
) -> OelmGPTForSequenceClassification:
    """The reports' classifier: bidirectional, last valid token, dropout 0.1 on attention weights too.

    `method` (any preset or Method) overrides `freeze_qk` and `init_method`; other keywords are fields
    of `OelmGPTConfig`.
    """
    if num_classes < 1:
        raise UserError(f"num_classes must be at least 1, not {num_classes}")
    fields = {
        "num_labels": num_classes,
        "d_model": d_model,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "dropout": dropout,
        "attention_dropout": dropout,
        "init_seed": seed,
    }
    model = OelmGPTForSequenceClassification(OelmGPTConfig(**(fields | config)))
    convert(model, _method(init_method, freeze_qk, method), seed=seed)
    return model


def to_gpt2(model: OelmGPTForCausalLM) -> PreTrainedModel:
    """The same language model as a vanilla GPT-2 with equal logits: its attention biases are zero.

    Learned positions only: GPT-2 knows no rotary ones. The copy is an ordinary, trainable model.
    """
    if not isinstance(model, OelmGPTForCausalLM) or model.config.positions != "learned":
        raise UserError("only a causal reference GPT with learned positions is a GPT-2")
    config = model.config
    target = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_position_embeddings,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.d_ff,
            activation_function="gelu",
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.attention_dropout,
            layer_norm_epsilon=config.layer_norm_eps,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    nn.Module.to(target, model.dtype)
    result = target.load_state_dict(_gpt2_state(model), strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
    return target.eval()


def _gpt2_state(model: OelmGPTForCausalLM) -> dict[str, Tensor]:
    source = model.state_dict()
    state = {
        key: source[key]
        for key in source
        if key.startswith(("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"))
        or ".ln_" in key
    }
    for i in range(model.config.num_layers):
        at = f"transformer.h.{i}"
        qkv = torch.cat([source[f"{at}.attn.{part}_proj.weight"] for part in "qkv"])
        state[f"{at}.attn.c_attn.weight"] = qkv.t().contiguous()
        state[f"{at}.attn.c_attn.bias"] = qkv.new_zeros(qkv.shape[0])
        state[f"{at}.attn.c_proj.weight"] = source[f"{at}.attn.o_proj.weight"].t().contiguous()
        state[f"{at}.attn.c_proj.bias"] = qkv.new_zeros(model.config.d_model)
        for ours, theirs in (("fc_in", "c_fc"), ("fc_out", "c_proj")):
            state[f"{at}.mlp.{theirs}.weight"] = source[f"{at}.mlp.{ours}.weight"].t().contiguous()
            state[f"{at}.mlp.{theirs}.bias"] = source[f"{at}.mlp.{ours}.bias"]
    return state
