"""Classifiers of other families on packed texts: their own modules, with attention text by text.

This uses transformers' attention registry. While installed, the model's attention is `attend`, which handles
each text separately, and its body returns one row per text, the token that the classifier reads, at the
position where the classifier expects it. Called without `packing`, the model computes as usual.

Shapes in comments: N tokens of all texts, B texts, H heads, D head dimension, C hidden size.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import SequenceClassifierOutput

from oelm.data.assemble import Packing
from oelm.models.families import FAMILIES
from oelm.speed import operations
from oelm.system.private_transformers import attention_name, sdpa_functions

# `config.model_type` -> the token of a text that the classifier reads.
READS = {
    "bert": "first", "roberta": "first", "xlm-roberta": "first", "camembert": "first",
    "distilbert": "first", "modernbert": "first", "gpt2": "last",
}  # fmt: skip
NAME = "oelm_packed"
SDPA, SDPA_MASK = sdpa_functions()


class Packed(NamedTuple):
    """The arguments of packed attention, for every layer."""

    packing: Packing
    seed: Tensor | None  # of dropout, on the device
    numbers: dict[int, int]  # id of a module of the body -> its number, so that layers have different dropout


def why_not(model: Any, device: torch.device, dtype: torch.dtype, max_length: int) -> str | None:
    """Why the texts of this model are padded; None if they can be packed."""
    config = model.config
    if config.model_type not in READS or "SequenceClassification" not in type(model).__name__:
        return f"{config.model_type} is not packed here"
    if attention_name(model) != "sdpa":
        return f"its attention is {attention_name(model)}"
    if not operations.have_attention(device, dtype, config.hidden_size // config.num_attention_heads):
        return "our kernel for packed attention is not for this device"
    longest = operations.LONGEST_DROPPED
    if max_length > longest:
        return f"texts may have more than {longest:,} tokens"
    from oelm.speed.trial import why_no_heads

    return why_no_heads(device)


class PackedForward:
    """Lets one classifier read packed texts."""

    kernels = True  # of our own, for attention

    def __init__(self, model: Any) -> None:
        self.model, self.body = model, model.base_model
        kind = model.config.model_type
        after_padding = FAMILIES[kind].positions == "after padding"
        self.first_position = model.config.pad_token_id + 1 if after_padding else 0
        self.numbers = {id(module): number for number, module in enumerate(self.body.modules())}
        self.reads = READS[kind]
        if getattr(model.config, "classifier_pooling", None) == "mean":
            self.reads = "mean"

    def install(self) -> None:
        self.model.set_attn_implementation(NAME)
        self.body.forward = partial(self._read, self.body)
        if self.reads == "last":
            self.model.forward = partial(self._classify_last, self.model)

    def remove(self) -> None:
        self.model.set_attn_implementation("sdpa")
        for module in (self.model, self.body):
            vars(module).pop("forward", None)

    def _read(self, body: Any, *ids: Tensor, packing: Packing | None = None, **inputs: Any) -> Any:
        """The body's output; for packed texts (B, 1, C), the token of each text that the classifier reads."""
        if packing is None:
            return type(body).forward(body, *ids, **inputs)
        inputs["position_ids"] = inputs["position_ids"] + self.first_position
        # transformers uses a mask of four dimensions unchanged.
        inputs["attention_mask"] = inputs["position_ids"].new_zeros(1, 1, 1, 1)
        seed = None
        if body.training:
            seed = torch.randint(1 << 62, (1,), device=packing.bounds.device)
        out = type(body).forward(body, *ids, packed=Packed(packing, seed, self.numbers), **inputs)
        tokens, bounds = out.last_hidden_state[0], packing.bounds.long()  # (N, C), (B + 1,)
        if self.reads == "mean":
            read = operations.mean_packed(tokens, bounds)
        else:
            rows = bounds[:-1] if self.reads == "first" else bounds[1:] - 1
            read = operations.look_up(tokens, rows.clamp(0, len(tokens) - 1))  # texts may be empty
        out.last_hidden_state = read[:, None]
        if getattr(body, "pooler", None) is not None:
            out.pooler_output = body.pooler(out.last_hidden_state)
        return out

    def _classify_last(self, model: Any, *ids: Tensor, packing: Packing | None = None, **inputs: Any) -> Any:
        """The model's forward for packed texts; the model's own would search for the last token."""
        if packing is None:
            return type(model).forward(model, *ids, **inputs)
        out = model.base_model(*ids, packing=packing, use_cache=False, **inputs)
        return SequenceClassifierOutput(logits=model.score(out.last_hidden_state)[:, 0])


def attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, H, N, D) tensors as transformers calls it, (1, N, H, D). Without `packed` it is
    SDPA."""
    if packed is None:
        return SDPA(module, q, k, v, mask, dropout=dropout, scaling=scaling, **rest)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    # The window of transformers includes the token itself.
    window = 0 if sliding_window is None else sliding_window - 1
    if window >= packed.packing.longest:
        window = 0
    seed = None
    if dropout and packed.seed is not None:  # the kernel adds the head's number
        seed = packed.seed + packed.numbers[id(module)] * 65_536
    y = operations.heads_attention(q, k, v, packed.packing, seed, module.is_causal, scale, dropout, window)
    return y.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, SDPA_MASK)
