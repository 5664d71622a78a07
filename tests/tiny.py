"""A tiny random model of every architecture in the table, and what to feed it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import oelm

VOCAB = 60
# A small vocabulary is not one these configurations' special tokens fit into; that is no news here.
logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
logging.getLogger("transformers.generation.configuration_utils").setLevel(logging.ERROR)

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _bert(name: str, **fields: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**SIZES, **TOKENS, num_labels=3, **fields)
        return getattr(transformers, f"{name}ForSequenceClassification")(config)

    return build


def _llama(name: str, **fields: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**SIZES, **TOKENS, num_key_value_heads=2, **fields)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _distilbert() -> PreTrainedModel:
    config = transformers.DistilBertConfig(
        dim=32, n_layers=3, n_heads=4, hidden_dim=48, vocab_size=VOCAB, num_labels=3, pad_token_id=0
    )
    return transformers.DistilBertForSequenceClassification(config)


def _modernbert() -> PreTrainedModel:
    config = transformers.ModernBertConfig(**SIZES, **TOKENS, cls_token_id=3, sep_token_id=4, num_labels=3)
    return transformers.ModernBertForSequenceClassification(config)


def _gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=VOCAB, **TOKENS
    )
    return transformers.GPT2LMHeadModel(config)


def _gpt_neox() -> PreTrainedModel:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, **TOKENS))


def _t5(**fields: Any) -> PreTrainedModel:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        **fields,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> PreTrainedModel:
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=8,  # not the encoder's number: the table must look it up per stack
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **TOKENS,
    )
    return transformers.BartForConditionalGeneration(config)


def _reference() -> PreTrainedModel:
    return oelm.OelmGPTForCausalLM(
        oelm.OelmGPTConfig(
            d_model=32, num_layers=3, num_heads=4, vocab_size=VOCAB, max_position_embeddings=64
        )
    )


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "oelm-gpt": _reference,
    "bert": _bert("Bert"),
    "bert-decoder": lambda: transformers.BertLMHeadModel(
        transformers.BertConfig(**SIZES, **TOKENS, is_decoder=True, add_cross_attention=True)
    ),
    "roberta": _bert("Roberta"),
    "xlm-roberta": _bert("XLMRoberta"),
    "camembert": _bert("Camembert"),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "t5": _t5,
    "t5-gated": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bart": _bart,
    "llama": _llama("Llama"),
    "mistral": _llama("Mistral"),
    "qwen2": _llama("Qwen2"),
    "qwen3": _llama("Qwen3", head_dim=16),  # not hidden_size / heads
}


def build(name: str) -> PreTrainedModel:
    """A random model; its weights depend on its name alone, and no dropout disturbs comparisons."""
    torch.manual_seed(sum(name.encode()))
    model = BUILDERS[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()


def inputs(model: PreTrainedModel, rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """A batch with labels the model's own loss accepts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "SequenceClassification" in type(model).__name__:
        return batch | {"labels": torch.randint(0, 3, (rows,), generator=generator)}
    return batch | {"labels": ids}


def logits(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def disturb(model: PreTrainedModel) -> None:
    """Move what is learned beside frozen projections away from its start, where it changes nothing."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".learned_" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data += 0.3 * noise.to(parameter.dtype)
