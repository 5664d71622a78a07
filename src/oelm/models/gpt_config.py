"""The reference GPT's configuration, for a named size or any other."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from oelm.errors import UserError
from oelm.models.gpt_sizes import PRESETS, SIZES


@strict  # as in transformers' own configs: a value of another type is refused
class OelmGPTConfig(PreTrainedConfig):
    """`oelm` is the record of the method a model was converted with, `init_seed` the seed of its weights."""

    model_type = "oelm-gpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
    }

    vocab_size: int = 50257
    max_position_embeddings: int = 512
    d_model: int = 512
    num_layers: int = 6
    num_heads: int = 8
    d_ff: int = 0  # 0: 4 * d_model
    positions: str = "learned"  # or "rotary"
    rope_theta: float | int = 10000.0
    dropout: float | int = 0.0  # embeddings, residual branches, task head
    attention_dropout: float | int = 0.0
    layer_norm_eps: float | int = 1e-5
    pooling: str = "last"  # the last valid token goes to the classifier; or "mean"
    init_seed: int = 0
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    oelm: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # first: it resolves transformers' names for these fields
        self.d_ff = self.d_ff or 4 * self.d_model
        if min(self.d_model, self.num_heads, self.num_layers, self.vocab_size) < 1:
            raise UserError("d_model, num_heads, num_layers and vocab_size must be positive")
        if self.d_model % self.num_heads:
            raise UserError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        for name, known in (("positions", ("learned", "rotary")), ("pooling", ("last", "mean"))):
            if getattr(self, name) not in known:
                raise UserError(f"{name} must be '{known[0]}' or '{known[1]}', not {getattr(self, name)!r}")
        if self.positions == "rotary" and self.d_model // self.num_heads % 2:
            raise UserError(f"rotary positions need an even head size, not {self.d_model // self.num_heads}")


def gpt_config(preset: str, **overrides: Any) -> OelmGPTConfig:
    """The configuration of a named size; keyword arguments override its fields."""
    if preset not in SIZES:
        raise UserError(f"unknown model {preset!r}; known sizes: {', '.join(PRESETS)}")
    names = ("num_layers", "d_model", "num_heads", "max_position_embeddings")
    return OelmGPTConfig(**dict(zip(names, SIZES[preset], strict=True)) | overrides)
