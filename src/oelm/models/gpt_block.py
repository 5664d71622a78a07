"""A block of the reference GPT and its parts. The model they make is in gpt.py.

Shapes in comments: B texts, T positions, C = d_model.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from oelm.models.attention import SelfAttention
from oelm.models.gpt_config import OelmGPTConfig
from oelm.speed.gelu import gelu
from oelm.speed.own import add_norm, is_plain, linear_gelu, run_here
from oelm.speed.packed import Packing
from oelm.speed.rows import look_up, look_up_positions, pick_rows


class Embedding(nn.Embedding):
    def forward(self, ids: Tensor, packing: Packing | None = None) -> Tensor:
        """With `packing`, ids are the positions of texts that lie end to end."""
        if packing is not None:
            return look_up_positions(self.weight, ids, packing)
        return look_up(self.weight, ids)


class Norm(nn.LayerNorm):
    own_kernels = False  # training turns them on where they are faster (training/fast.py)

    def forward(  # type: ignore[override]
        self, x: Tensor, late: Tensor | None = None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x with what is still to be added to it, or only these rows of it; and all of it normalised."""
        if self.own_kernels and late is not None and late.shape == x.shape and run_here(x):
            return add_norm(x, late, self, rows)
        x = total(x, late)
        return x if rows is None else pick_rows(x, rows), super().forward(x)


class FeedForward(nn.Module):
    own_kernels = False  # as in Norm

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(config.d_model, config.d_ff)
        self.fc_out = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        own = self.own_kernels and is_plain(self.fc_in) and run_here(x)
        return self.fc_out(linear_gelu(x, self.fc_in) if own else gelu(self.fc_in(x)))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: OelmGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = Norm(config.d_model, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config, layer_idx)
        self.ln_2 = Norm(config.d_model, eps=config.layer_norm_eps)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        late: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        rotation: Tensor | None,
        cache: Cache | None,
        packing: Packing | None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and what is still to be added to it: `late` for the next block.

        Where adding and normalising is one kernel, a block leaves its last sum to the next one.
        With `rows` (B,), counted through all texts, the result is these only: (B, 1, C).
        """
        x, y = self.ln_1(x, late, rows)
        asking = None if rows is None else self.ln_1(x)[1]
        y = self.attn(y, mask, causal, rotation, cache, packing, rows, asking)
        x, y = self.ln_2(x, self.dropout(y))
        y = self.dropout(self.mlp(y))
        fused = self.ln_1.own_kernels or torch.compiler.is_compiling()
        return (x, y) if fused else (x + y, None)


def total(x: Tensor, late: Tensor | None) -> Tensor:
    return x if late is None else x + late
