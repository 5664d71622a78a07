"""The reference GPT as the reports create it, and its conversion to a plain GPT-2."""

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
    **dict.fromkeys((("normal", True), ("random", True)), "oelm-random"),
    **dict.fromkeys((("normal", False), ("random", False)), "baseline"),
}


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
    """The reports' classifier: bidirectional, last-token pooling, dropout 0.1, also on attention weights.

    `method` (any preset or Method) overrides `freeze_qk` and `init_method`; other keywords are fields
    of `OelmGPTConfig`.
    """
    if num_classes < 1:
        raise UserError(f"num_classes must be at least 1, not {num_classes}")
    method = method or _REPORTED.get((init_method, bool(freeze_qk)))
    if method is None:
        raise UserError(f"init_method must be 'orthogonal' or 'normal', not {init_method!r}")
    sizes = {"num_labels": num_classes, "d_model": d_model, "num_layers": num_layers, "num_heads": num_heads}
    rates: dict[str, Any] = {"dropout": dropout, "attention_dropout": dropout, "init_seed": seed}
    model = OelmGPTForSequenceClassification(OelmGPTConfig(**(sizes | rates | config)))
    convert(model, method, seed=seed)
    return model


def to_gpt2(model: OelmGPTForCausalLM) -> PreTrainedModel:
    """The same language model as a plain GPT-2 with equal logits: its attention biases are zero.

    Positions must be learned: GPT-2 has no rotary ones. The copy is an ordinary, trainable model.
    """
    if not isinstance(model, OelmGPTForCausalLM) or model.config.positions != "learned":
        raise UserError("only a causal reference GPT with learned positions is a GPT-2")
    config = model.config
    same = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    target = GPT2LMHeadModel(GPT2Config(
        n_positions=config.max_position_embeddings, n_embd=config.d_model, n_layer=config.num_layers,
        n_head=config.num_heads, n_inner=config.d_ff, activation_function="gelu", resid_pdrop=config.dropout,
        embd_pdrop=config.dropout, attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.layer_norm_eps, **{name: getattr(config, name) for name in same},
    ))  # fmt: skip
    nn.Module.to(target, model.dtype)
    result = target.load_state_dict(_gpt2_state(model), strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result
    return target.eval()


def _gpt2_state(model: OelmGPTForCausalLM) -> dict[str, Tensor]:
    names = (("attn.o_proj", "attn.c_proj"), ("mlp.fc_in", "mlp.c_fc"), ("mlp.fc_out", "mlp.c_proj"))
    state = {}
    for name, value in model.state_dict().items():
        for reference_name, gpt2_name in names:
            name = name.replace(reference_name, gpt2_name)
        # GPT-2 stores the matrices of its layers transposed.
        state[name] = value.t().contiguous() if ".h." in name and value.dim() == 2 else value
    for i in range(model.config.num_layers):
        at = f"transformer.h.{i}.attn"
        qkv = torch.cat([state.pop(f"{at}.{part}_proj.weight") for part in "qkv"], 1)
        state[f"{at}.c_attn.weight"], state[f"{at}.c_attn.bias"] = qkv, qkv.new_zeros(qkv.shape[1])
        state[f"{at}.c_proj.bias"] = qkv.new_zeros(model.config.d_model)
    return state
