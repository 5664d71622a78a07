"""The reference GPT's forward pass, faster: the same sums as models/gpt.py, without padding.

- Texts may be packed: one row of texts end to end, each attending to itself (`packing`).
- A classifier that pools the last token computes the last block for that token alone (`rows`).
- q, k and v are one product; where our kernels can run, attention and "add, then LayerNorm" are one kernel
  each, for which a block leaves its last sum to the next one (`residual`).

While installed it replaces the modules' own `forward`; their parameters, state dict and hooks are unchanged.

Shapes in comments: B texts, T positions, C = d_model, H heads, D = C / H.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from oelm.data.assemble import Packing
from oelm.models import lm_loss
from oelm.models.fused import packed_linear, split_linear
from oelm.models.gpt import (
    OelmGPTForSequenceClassification,
    OelmGPTModel,
    OelmGPTPreTrainedModel,
    last_positions,
)
from oelm.models.gpt_block import Block, SelfAttention, masked_attention
from oelm.speed import operations
from oelm.speed.capabilities import runs
from oelm.speed.value_only import packed_value_only, value_only_attention
from oelm.training.parallel import DTYPES


class FastForward:
    """The fast forward pass of one model. `kernels`: attention and norms by our own kernels."""

    def __init__(self, model: OelmGPTPreTrainedModel, kernels: bool) -> None:
        self.model, self.kernels = model, kernels
        self.joint: dict[int, Tensor] = {}  # weights of q, k and v in one, by the id of their attention

    def install(self) -> None:
        forwards: dict[type, Callable[..., Any]] = {
            OelmGPTForSequenceClassification: self._classifier,
            OelmGPTModel: self._model,
            Block: self._block,
        }
        for module in self.model.modules():
            for kind, forward in forwards.items():
                if isinstance(module, kind):  # FSDP makes a subclass of it
                    module.forward = partial(forward, module)
        lm_loss.kernel_for = operations.cross_entropy_for

    def remove(self) -> None:
        for module in self.model.modules():
            vars(module).pop("forward", None)
        lm_loss.kernel_for = lm_loss.no_kernel

    def _classifier(
        self,
        model: OelmGPTForSequenceClassification,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> Any:
        if input_ids is None or kwargs.get("output_hidden_states"):
            return type(model).forward(model, input_ids, attention_mask, labels, **kwargs)
        rows = None
        if model.config.pooling == "last":
            if packing is not None:
                rows = (packing.bounds[1:].long() - 1).clamp(min=0)
            else:
                first = torch.arange(len(input_ids), device=input_ids.device) * input_ids.shape[1]
                mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
                rows = first + last_positions(mask)
        elif packing is None:
            return type(model).forward(model, input_ids, attention_mask, labels, **kwargs)
        out = model.transformer(input_ids, attention_mask, packing=packing, rows=rows, **kwargs)
        x = out.last_hidden_state
        pooled = x.flatten(0, 1) if rows is not None else operations.mean_packed(x[0], packing.bounds.long())  # type: ignore[union-attr]
        return model.classified(pooled, labels, None)

    def _model(
        self,
        model: OelmGPTModel,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        rows: Tensor | None = None,
        **other: Any,
    ) -> BaseModelOutputWithPast:
        """With `packing` the input is one row of packed texts, with positions counted from 0 in each. With
        `rows`, a position for every text counted through all of them, the last block and what follows are
        computed for these alone: `last_hidden_state` is (B, 1, C), or (1, texts, C) of packed texts."""
        cached = other.get("use_cache") or other.get("past_key_values") is not None
        if input_ids is None or cached or other.get("output_hidden_states"):
            return OelmGPTModel.forward(model, input_ids, attention_mask, position_ids, **other)
        wte, plain = model.wte, type(model.wte) is nn.Embedding
        x = operations.look_up(wte.weight, input_ids) if plain else wte(input_ids)  # (B, T, C)
        mask, causal = None, False
        if packing is not None:
            model.check_positions(packing.longest)
        else:
            position_ids, mask, causal = model.positions_and_mask(x, attention_mask, position_ids, 0)
        assert position_ids is not None
        rotation, residual = model.rotation(position_ids, len(x)), None
        if rotation is None:
            residual = operations.look_up(model.wpe.weight, position_ids)
        if model.dropout.p and model.training:
            x, residual = model.dropout(_sum(x, residual)), None
        for block in model.h:
            wanted = rows if block is model.h[-1] else None
            x, residual = block(x, mask, causal, rotation, None, residual, packing, wanted)
        hidden: Any = self._norm(model.ln_f, x, residual)[1]
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _norm(
        self, norm: nn.LayerNorm, x: Tensor, residual: Tensor | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + residual, LayerNorm of that sum); of the sum only `rows`, if given."""
        if self.kernels and residual is not None and residual.shape == x.shape and operations.run_here(x):
            return operations.add_norm(x, residual, norm, rows)
        x = _sum(x, residual)
        return x if rows is None else operations.pick_rows(x, rows), norm(x)

    def _block(
        self,
        block: Block,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        rotation: Tensor | None,
        cache: Any,
        *fast: Any,
    ) -> Any:
        """(x, residual that is not added yet); with `rows` (B,) of these rows only, (B, 1, C). Called without
        residual, packing and rows, it is the block's own forward."""
        if not fast:
            return Block.forward(block, x, mask, causal, rotation, cache)
        residual, packing, rows = fast
        x, y = self._norm(block.ln_1, x, residual, rows)
        queries = None if rows is None else block.ln_1(x)
        y = self._attention(block.attn, y, mask, causal, rotation, packing, rows, queries)
        x, y = self._norm(block.ln_2, x, block.dropout(y))
        y = block.dropout(block.mlp(y))
        return (x, y) if self.kernels else (x + y, None)

    def _attention(
        self,
        attn: SelfAttention,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        rotation: Tensor | None,
        packing: Packing | None,
        rows: Tensor | None,
        queries: Tensor | None,
    ) -> Tensor:
        """With `rows` (B,), numbered through all texts, the result is of these only, from `queries`."""
        dropout = attn.attention_dropout if attn.training else 0.0
        heads, joint = attn.num_heads, self.joint.get(id(attn))
        plain = mask is None and rotation is None and rows is None and not dropout and not attn.value_only
        if self.kernels and plain and operations.run_here(x):
            qkv = packed_linear(x, (attn.q_proj, attn.k_proj, attn.v_proj), heads, joint=joint)
            y = operations.joint_attention(qkv.unflatten(-1, (3, heads, -1)), causal, packing)
            return attn.o_proj(y.flatten(2))
        parts = _project(attn, x, queries, joint)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)  # (B, T, H, D)
        if rotation is not None:
            q = operations.rotate(q, _rotation_at(rotation, rows))
            k = operations.rotate(k, rotation)
        if packing is not None:  # one row of packed texts
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (T, H, D)
            if attn.value_only and rows is None:
                y = packed_value_only(q, k, v, packing)
            else:  # with one query per text there is little to save
                q, k = (q.detach(), k.detach()) if attn.value_only else (q, k)
                y = operations.packed_attention(q, k, v, packing, one_query=rows is not None)
            return attn.o_proj(y.view(1, len(y), -1))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if attn.value_only:
            q, k = q.detach(), k.detach()
            if mask is None and rows is None and not dropout:
                y = value_only_attention(q, k, v, causal)
                return attn.o_proj(y.transpose(1, 2).flatten(2))
        if mask is not None and rows is not None:
            mask = mask.flatten(0, 2).index_select(0, rows)[:, None, None]  # (B, 1, 1, S)
        y = masked_attention(q, k, v, mask, causal, dropout)
        return attn.o_proj(y.transpose(1, 2).flatten(2))


@contextlib.contextmanager
def fast_forward(model: Any, precision: str) -> Iterator[bool]:
    """A context in which a model that is not trained computes by the fast paths; its value is whether the
    model takes packed texts."""
    if not isinstance(model, OelmGPTPreTrainedModel):
        yield False
        return
    device, sizes = model.device, (model.config.d_model, model.config.num_heads)
    dtype = DTYPES.get(precision, torch.float32)
    forward = FastForward(model, operations.have_kernels(device, dtype, *sizes))
    forward.install()
    try:
        yield runs("packed", device) and isinstance(model, OelmGPTForSequenceClassification)
    finally:
        forward.remove()


def _project(
    attn: SelfAttention, x: Tensor, queries: Tensor | None, joint: Tensor | None
) -> tuple[Tensor, ...]:
    """q, k and v, (B, T, C) each; q of `queries` only, if given."""
    if queries is None:  # three parameters, one product: see models/fused.py
        every = (attn.q_proj, attn.k_proj, attn.v_proj)
        return split_linear(x, every, joint=joint, constant=2 * attn.value_only)
    kv = None if joint is None else joint[attn.q_proj.out_features :]
    parts, constant = (attn.k_proj, attn.v_proj), int(attn.value_only)
    return attn.q_proj(queries), *split_linear(x, parts, joint=kv, constant=constant)


def _rotation_at(rotation: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return rotation
    angles = rotation.flatten(1, 2).index_select(1, rows)
    return angles.view(2, rotation.shape[1], -1, 1, rotation.shape[-1])


def _sum(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else x + residual
