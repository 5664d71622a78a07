"""The other peers: the original recipe, and two usual ways of training a language model.

Hugging Face's classes are used as they are. The two models written here stand for ways of working, not for a
library: `OriginalClassifier` for the reports' own recipe, and `CompactGPT` for nanoGPT's style.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from oelm.bench.load import Load
from oelm.bench.measure import TrainingArm
from oelm.bench.trainer import gpt2_config
from oelm.data import Store
from oelm.data.assemble import Batch
from oelm.data.tasks import make_objective
from oelm.models.gpt_config import OelmGPTConfig
from oelm.training.parallel import autocast_of
from oelm.training.resolve import resolve_precision

DROPOUT = 0.1  # the original recipe's
PADDED_TO = 64  # nanoGPT's vocabulary is a multiple of this


class OriginalClassifier(nn.Module):
    """The reference architecture written plainly: explicit attention with a mask, dropout everywhere."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        d = config.d_model
        self.tokens = nn.Embedding(config.vocab_size, d)
        self.positions = nn.Embedding(config.max_position_embeddings, d)
        self.blocks = nn.ModuleList([_OriginalBlock(config) for _ in range(config.num_layers)])
        self.norm, self.classifier = nn.LayerNorm(d), nn.Linear(d, int(config.num_labels or 0))
        self.dropout = nn.Dropout(DROPOUT)
        _start(self)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x, mask)
        last = x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]
        return self.classifier(self.dropout(self.norm(last)))


class _OriginalBlock(nn.Module):
    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wide, self.narrow = nn.Linear(d, config.d_ff), nn.Linear(config.d_ff, d)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        attended = self.dropout(scores.softmax(-1)) @ v
        x = x + self.dropout(self.o(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm_2(x)))))


class CompactGPT(nn.Module):
    """A language model in nanoGPT's style: SDPA, tied and padded vocabulary, plain cross-entropy."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        d, vocab = config.d_model, -(-config.vocab_size // PADDED_TO) * PADDED_TO
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(config.max_position_embeddings, d)
        self.blocks = nn.ModuleList([_CompactBlock(config) for _ in range(config.num_layers)])
        self.norm = nn.LayerNorm(d)
        _start(self)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class _CompactBlock(nn.Module):
    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.num_heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wide, self.narrow = nn.Linear(d, config.d_ff), nn.Linear(config.d_ff, d)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, T, D)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class Loop(TrainingArm):
    """A plain training loop around a model: forward, backward, clip, step."""

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        config: OelmGPTConfig,
        length: int,
        batch_size: int,
        device: torch.device,
        precision: str,
        **adamw: Any,
    ) -> None:
        self.objective = make_objective(store, length)
        plan = self.objective.plan("train", batch_size, None, 0)
        self.batches, load = plan.epoch(0), Load.of(plan.lengths)
        operations = load.operations(config, store.kind, causal=store.kind == "lm")
        super().__init__(device, len(self.batches), load, operations)
        self.model, self.length = model.to(device).train(), length
        self.autocast = autocast_of(precision, device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, **adamw)

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor: ...

    def step(self, k: int) -> None:
        batch = self.objective.batch("train", self.batches.batch(k)).to(self.device)
        with self.autocast():
            loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Original(Loop):
    """The reports' recipe: fp32, eager, explicit attention, every text padded to the longest allowed."""

    def __init__(
        self, store: Store, config: OelmGPTConfig, length: int, batch_size: int, device: torch.device
    ) -> None:
        super().__init__(store, OriginalClassifier(config), config, length, batch_size, device, "fp32")
        self.about = f"fp32, eager, explicit attention, dropout {DROPOUT}, padded to {length}, AdamW"

    def loss(self, batch: Batch) -> Tensor:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        rest = (0, self.length - ids.shape[1])
        return F.cross_entropy(self.model(F.pad(ids, rest), F.pad(mask, rest)), batch.targets["labels"])


class LanguageLoop(Loop):
    """Hugging Face's GPT-2 ("hf") or nanoGPT's style ("nanogpt"), with fused AdamW, compiled or not."""

    def __init__(
        self,
        store: Store,
        config: OelmGPTConfig,
        length: int,
        batch_size: int,
        device: torch.device,
        style: str,
        compiled: bool,
    ) -> None:
        model, self.style = language_model(config, style), style
        precision, _ = resolve_precision("auto", device)
        super().__init__(store, model, config, length, batch_size, device, precision, fused=True)
        if compiled:
            model.compile()
        name = {"hf": "GPT2LMHeadModel", "nanogpt": "nanoGPT's style"}[style]
        self.about = f"{name}, {precision}, SDPA, fused AdamW, {'compiled' if compiled else 'eager'}"

    def loss(self, batch: Batch) -> Tensor:
        ids, targets = batch.inputs["input_ids"], batch.targets["labels"]
        if self.style == "hf":
            return self.model(input_ids=ids, labels=ids).loss  # shifted inside
        return self.model(ids, targets)


def language_model(config: OelmGPTConfig, style: str) -> Any:
    if style == "hf":
        return AutoModelForCausalLM.from_config(gpt2_config(config), attn_implementation="sdpa")
    return CompactGPT(config)


def _start(model: nn.Module) -> None:
    """The usual start, so that losses are those of a real run."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
