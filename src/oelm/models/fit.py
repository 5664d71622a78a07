"""The settings that must match between a model and its tokenizer: padding, positions, segments."""

from typing import Any

from oelm.data.tokenizer import Encoder, pad_id
from oelm.errors import UserError
from oelm.models.families import FAMILIES


def agree_on_padding(model: Any, tokenizer: Any) -> None:
    """Set the padding token of a classifier that reads a text's last token, or refuse the tokenizer.

    GPT-2, Llama and similar models read the last token that is not `config.pad_token_id`; with a wrong id
    they would read the padding. T5 and BART read the last `config.eos_token_id`. All others recognise padding
    by its mask, and their config is left unchanged, as RoBERTa counts positions from that id.
    """
    if "SequenceClassification" not in type(model).__name__:
        return
    if model.config.is_encoder_decoder:
        end = model.config.eos_token_id
        if end not in Encoder(tokenizer, 1 << 30).single[1] or end == pad_id(tokenizer):
            raise UserError(
                f"{model.config.model_type} classifies by the token that ends a text, {end} in its "
                "config.json, and its tokenizer does not end texts with it, or pads with it too: use the "
                "model's own tokenizer"
            )
    elif hasattr(model, "score"):  # transformers' name of a head on the last token
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise UserError(
                f"{model.config.model_type} classifies by a text's last token, and its tokenizer has neither "
                "a padding nor an end-of-text token to tell it by: set pad_token in tokenizer_config.json"
            )
        model.config.pad_token_id = pad_id(tokenizer)


def positions_of(config: Any) -> int | None:
    """The maximum number of tokens in a text; None if positions are relative and there is no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    kind = FAMILIES[config.model_type].positions if config.model_type in FAMILIES else "absolute"
    if not positions or kind == "relative":
        return None
    return int(positions - (config.pad_token_id + 1 if kind == "after padding" else 0))


def takes_segments(model: Any) -> bool:
    """Whether the model distinguishes the texts of a pair by `token_type_ids`. A segment embedding with one
    row cannot, and GPT-2, which has none, would look the ids up in its token embedding."""
    return int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
