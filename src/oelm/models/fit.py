"""What a model and its tokenizer must agree on: padding, positions, segments."""

from typing import Any

from oelm.data.tokenizer import Encoder, pad_id
from oelm.errors import UserError

COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")


def agree_on_padding(model: Any, tokenizer: Any) -> None:
    """Tell a classifier that reads a text's last token which token is padding, or refuse the tokenizer.

    GPT-2, Llama and their like find the last that is not `config.pad_token_id`; with another id there they
    would read the padding. T5 and BART find the last `config.eos_token_id`. All others know padding by its
    mask, and keep their config: RoBERTa counts positions from that id.
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
    elif hasattr(model, "score"):  # what transformers calls a head on the last token
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise UserError(
                f"{model.config.model_type} classifies by a text's last token, and its tokenizer has neither "
                "a padding nor an end-of-text token to tell it by: set pad_token in tokenizer_config.json"
            )
        model.config.pad_token_id = pad_id(tokenizer)


def positions_of(config: Any) -> int | None:
    """How long a text may be; None where positions are relative and there is no end."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not positions or config.model_type == "t5":
        return None
    if config.model_type in COUNT_FROM_PADDING:
        positions -= config.pad_token_id + 1  # they count positions from behind the padding's
    return int(positions)


def takes_segments(model: Any) -> bool:
    """Whether the second text of a pair may be marked. A table of one segment has no row for it, and GPT-2,
    which has no table, would look its mark up among the words."""
    return int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
