"""The reference GPT: language model, classifiers and question answering, as Hugging Face models.

Pre-LayerNorm, GELU, attention projections without bias, feed-forward with bias, learned or rotary
positions, the language-model head tied to the embedding. Language models attend causally; all
others attend in both directions.

How every tensor starts, each from a generator keyed by (config.init_seed, its own name), so that two
models that differ in one tensor share all the others bit for bit:

    token and position embeddings, all projections, task heads   N(0, 0.02^2)
    LayerNorm weights 1, all biases 0
    q_proj and k_proj                                            as the method in config.oelm says, if any

Shapes in comments: B texts, T positions, C = d_model.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from oelm.convert import apply_method, refreeze
from oelm.errors import UserError
from oelm.method import Method
from oelm.models.gpt_block import Block, attention_mask_of, rotation_of
from oelm.models.gpt_config import OelmGPTConfig
from oelm.models.initial_values import drawing_in_threads, initial_value
from oelm.models.lm_loss import causal_lm_loss, shifted
from oelm.models.pretrained import check_files
from oelm.system.private_transformers import is_default_causal_lm_loss, is_loaded


class OelmGPTPreTrainedModel(PreTrainedModel):
    config_class = OelmGPTConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        path = next((name for name, other in self.named_modules() if other is module), "")
        path = path.removeprefix(self.base_model_prefix + ".")
        for suffix, parameter in module.named_parameters(recurse=False):
            if is_loaded(parameter):
                continue
            if isinstance(module, nn.LayerNorm):
                parameter.fill_(1.0 if suffix == "weight" else 0.0)
            elif suffix == "bias":
                parameter.zero_()
            else:
                name, shape = f"{path}.{suffix}", tuple(parameter.shape)
                drawn = initial_value(self.config.init_seed, name, shape, self.config.num_heads)
                parameter.copy_(torch.from_numpy(drawn).float())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        if pretrained_model_name_or_path is not None:
            check_files(str(pretrained_model_name_or_path), **kwargs)
        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config.oelm:
            refreeze(model)  # transformers makes every loaded parameter trainable
        return loaded


class OelmGPTModel(OelmGPTPreTrainedModel):
    _input_embed_layer = "wte"

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.causal = True
        named = () if self.wte.weight.is_meta else self.named_parameters()
        weights = [
            (config.init_seed, name, tuple(p.shape), config.num_heads) for name, p in named if p.dim() > 1
        ]
        with drawing_in_threads(weights, torch.get_num_threads()):
            self.post_init()
        # A model built from a config with a method is converted by it. `from_pretrained` builds it on the
        # meta device, where there is nothing to convert yet, and refreezes it after loading.
        if config.oelm and not self.wte.weight.is_meta:
            record = config.oelm
            apply_method(self, Method.from_dict(record["method"]), record["seed"], record["init"])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("a model is given either input_ids or inputs_embeds")
        x = inputs_embeds if input_ids is None else self.wte(input_ids)  # (B, T, C)
        assert x is not None
        if getattr(past_key_values, "is_compileable", False):
            raise UserError("a static cache is not supported; leave cache_implementation at its default")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids, mask, causal = self.positions_and_mask(x, attention_mask, position_ids, cached)
        rotation = self.rotation(position_ids, len(x))
        if rotation is None:
            x = x + self.wpe(position_ids)
        x = self.dropout(x)
        hidden: list[Any] = []
        for block in self.h:
            if output_hidden_states:
                hidden.append(x)
            x = block(x, mask, causal, rotation, past_key_values)
        x = self.ln_f(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )

    def positions_and_mask(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cached: int
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Position ids (B, T), an attention mask (B, 1, T, S) or None, and whether attention must be causal
        in addition."""
        length, device = x.shape[1], x.device
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UserError(f"attention_mask must be (texts, positions), not {tuple(attention_mask.shape)}")
        if attention_mask is not None and device.type == "cpu" and attention_mask.all():
            attention_mask = None  # attention without a mask is faster; on a GPU the check would synchronise
        total = length + cached
        self.check_positions(total)
        valid = torch.ones(1, total, device=device) if attention_mask is None else attention_mask
        if position_ids is None:
            # Padding is not counted, so that a text gives the same result on whichever side it is padded.
            position_ids = (valid.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        if attention_mask is not None or (self.causal and 1 < length < total):
            return position_ids, attention_mask_of(valid, length, self.causal), False
        return position_ids, None, self.causal and length > 1

    def check_positions(self, longest: int) -> None:
        if self.config.positions == "learned" and longest > self.config.max_position_embeddings:
            raise UserError(f"{longest} positions, but this model has {self.config.max_position_embeddings}")

    def rotation(self, position_ids: Tensor, texts: int) -> Tensor | None:
        """The angles of rotary positions; None if positions are learned."""
        if self.config.positions == "learned":
            return None
        head_dim = self.config.d_model // self.config.num_heads
        return rotation_of(position_ids.expand(texts, -1), head_dim, self.config.rope_theta)


class OelmGPTForCausalLM(OelmGPTPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.transformer = OelmGPTModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Labels are the input ids, shifted here; `shift_labels` are shifted already. -100 is ignored.

        In training with labels the loss is computed in chunks and `logits` is None, as they would be by far
        the largest tensor. `skip_logits` overrides this choice. Only the loss in chunks supports
        `label_smoothing` and the `reduction`s "sum" and "none" (every position's loss, without gradient).
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        out = self.transformer(input_ids, attention_mask, use_cache=use_cache, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = out.last_hidden_state[:, keep, :]
        targets = shifted(labels) if labels is not None and shift_labels is None else shift_labels
        # The loss in chunks replaces neither another head (an adapter's, a sharded one) nor the user's own
        # loss.
        replaceable = type(self.lm_head) is nn.Linear and is_default_causal_lm_loss(self.loss_function)
        if skip_logits is None:
            skip_logits = self.training and targets is not None and replaceable
        logits, loss = None, None
        if skip_logits:
            if targets is None or not replaceable:
                raise UserError("skip_logits needs labels, and the model's own lm_head and loss_function")
            options = (num_items_in_batch, label_smoothing, reduction)
            loss = causal_lm_loss(hidden, self.lm_head.weight, targets, *options)
        else:
            if label_smoothing or reduction != "mean":
                raise UserError("label_smoothing and reduction need skip_logits=True")
            logits = self.lm_head(hidden)
            if targets is not None:
                args = {"labels": labels, "shift_labels": shift_labels, "vocab_size": self.config.vocab_size}
                loss = self.loss_function(logits=logits, num_items_in_batch=num_items_in_batch, **args)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )


def label_loss(logits: Tensor, labels: Tensor | None) -> Any:
    """The mean over labels other than -100, in float32: the cross-entropy or, for real numbers, the squared
    error. None without labels."""
    if labels is not None and labels.is_floating_point():
        return F.mse_loss(logits.float().squeeze(-1), labels.float())
    return None if labels is None else F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class _Bidirectional(OelmGPTPreTrainedModel):
    """The base of models that read a whole text: attention in both directions, dropout, a linear head."""

    accepts_loss_kwargs = False  # Hugging Face's Trainer must divide by its accumulation steps itself

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config)
        self.transformer = OelmGPTModel(config)
        self.transformer.causal = False
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.d_model, int(config.num_labels or 0))
        self.post_init()


class OelmGPTForSequenceClassification(_Bidirectional):
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        out = self.transformer(input_ids, attention_mask, **kwargs)
        x = out.last_hidden_state
        valid = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask
        if self.config.pooling == "last":
            pooled = x[torch.arange(len(x), device=x.device), last_positions(valid)]
        else:
            weight = valid.float()[..., None]
            pooled = ((x * weight).sum(1) / weight.sum(1).clamp(min=1)).to(x.dtype)
        return self.classified(pooled, labels, out.hidden_states)

    def classified(self, pooled: Tensor, labels: Tensor | None, hidden: Any) -> SequenceClassifierOutput:
        """The output for pooled texts (B, C)."""
        logits = self.classifier(self.dropout(pooled))
        return SequenceClassifierOutput(loss=label_loss(logits, labels), logits=logits, hidden_states=hidden)


def last_positions(valid: Tensor) -> Tensor:
    """The index of the last valid token of every text, (B,); 0 for a text without one."""
    return (valid.long() * torch.arange(valid.shape[1], device=valid.device)).argmax(1)


class OelmGPTForTokenClassification(_Bidirectional):
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """-100 among the labels is ignored."""
        out = self.transformer(input_ids, attention_mask, **kwargs)
        logits = self.classifier(self.dropout(out.last_hidden_state))
        return TokenClassifierOutput(
            loss=label_loss(logits, labels), logits=logits, hidden_states=out.hidden_states
        )


class OelmGPTForQuestionAnswering(_Bidirectional):
    """Two scores per token: the answer starts here, the answer ends here."""

    def __init__(self, config: OelmGPTConfig) -> None:
        config.num_labels = 2
        super().__init__(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        out = self.transformer(input_ids, attention_mask, **kwargs)
        start, end = self.classifier(self.dropout(out.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            # An answer outside this window of its document is ignored.
            positions = [
                p.where((p >= 0) & (p < start.shape[1]), -100) for p in (start_positions, end_positions)
            ]
            loss = (label_loss(start, positions[0]) + label_loss(end, positions[1])) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states
        )


transformers.AutoConfig.register(OelmGPTConfig.model_type, OelmGPTConfig)
transformers.AutoModel.register(OelmGPTConfig, OelmGPTModel)
transformers.AutoModelForCausalLM.register(OelmGPTConfig, OelmGPTForCausalLM)
transformers.AutoModelForSequenceClassification.register(OelmGPTConfig, OelmGPTForSequenceClassification)
transformers.AutoModelForTokenClassification.register(OelmGPTConfig, OelmGPTForTokenClassification)
transformers.AutoModelForQuestionAnswering.register(OelmGPTConfig, OelmGPTForQuestionAnswering)
