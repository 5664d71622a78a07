"""The arms: our own step, Hugging Face's Trainer, and plain loops around the other peers' models.

Hugging Face's classes are used unchanged. The two models written here represent a recipe, not a library:
`OriginalClassifier` that of the reports, and `CompactGPT` nanoGPT's style.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from oelm.bench.load import Case, Load, padding_tokenizer
from oelm.bench.measure import Arm, TrainingArm, Window, held_bytes, now
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data.assemble import Batch
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.models.gpt_config import OelmGPTConfig
from oelm.training.parallel import autocast_of, process_state
from oelm.training.resolve import resolve_precision, resolve_run
from oelm.training.step import make_step

DROPOUT = 0.1  # the original recipe's
PADDED_TO = 64  # nanoGPT's vocabulary is a multiple of this


class Ours(TrainingArm):
    """One method in our trainer: the step of `oelm train`, built by the same functions."""

    cudnn_attention = False  # as in training: see `PlainStep`

    def __init__(self, case: Case, method: str) -> None:
        state, store = process_state(), case.store
        training = TrainingConfig(
            steps=10**9, batch_size=case.batch_size, warmup=0, schedule="constant", lr=1e-4,
            gradient_checkpointing=case.checkpointing,
        )  # fmt: skip
        config = RunConfig(
            task=TaskConfig(max_length=case.length),
            model=ModelConfig(name=case.size),
            method=MethodConfig(name=method),
            training=training,
        )
        objective = make_objective(store, case.length, 0.0, "none")
        raw, _ = build_model(config, store)
        resolved = resolve_run(config, objective, state.device)
        self.training_step = make_step(resolved, objective, raw, state)
        self.training_step.model.train()
        super().__init__(case, resolved.plan)
        self.model, self.optimizer, self.taken = raw, self.training_step.optimizer, 0
        # A new shape is first computed, then recorded, and replayed from then on.
        self.untimed = 2 if self.training_step.paths()["eager"] is None else 1
        self.about = f"{method}, {self.training_step.precision}; {self.training_step}"

    def step(self, k: int) -> None:
        self.training_step.take(self.taken, self.batches, k)
        self.taken += 1


def gpt2_config(config: OelmGPTConfig, **more: Any) -> GPT2Config:
    """GPT-2 of the same size, without dropout. Its attention has biases; the reference GPT's has none."""
    return GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.max_position_embeddings, n_embd=config.d_model,
        n_layer=config.num_layers, n_head=config.num_heads, n_inner=config.d_ff, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip


class HuggingFaceTrainer(Arm):
    """Hugging Face's own classes, unmodified, with the settings that make them fastest.

    A window is one call of `Trainer.train` for one epoch: all texts once, in batches of its own choice, timed
    from the first step to the last. Model and optimizer are kept between calls; a call's set-up is not timed.
    Loader workers and cuDNN's attention are off, as both made it slower on an H200: cuDNN plans again for
    every new length, and batches grouped by length have many.
    """

    cudnn_attention = False

    def __init__(self, case: Case, compiled: bool) -> None:
        split, pad_id, gpu = case.store["train"], case.store.pad_id, case.device.type == "cuda"
        self.device, self.load = case.device, Load.of(split.lengths)
        gpt = case.model["architecture"] == "gpt"
        self.operations = self.load.operations(case.config, "classification", causal=gpt)
        labels: dict[str, Any] = {"num_labels": case.config.num_labels, "pad_token_id": pad_id}
        if gpt:
            gpt2 = gpt2_config(case.config, **labels)
            self.model = AutoModelForSequenceClassification.from_config(gpt2, attn_implementation="sdpa")
        else:
            self.model = AutoModelForSequenceClassification.from_pretrained(
                case.size, attn_implementation="sdpa", dtype=torch.float32, **labels
            )
        # Compiling would switch TF32 on for the whole process, including the original recipe.
        precision: dict[str, Any] = {"tf32": False} if compiled and gpu else {}
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # nothing is written
            per_device_train_batch_size=case.batch_size, num_train_epochs=1,
            learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0, lr_scheduler_type="constant",
            optim="adamw_torch_fused", bf16=gpu, use_cpu=not gpu,
            torch_compile=compiled, dataloader_pin_memory=gpu, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, logging_nan_inf_filter=False,
            train_sampling_strategy="group_by_length", **precision,
        )  # fmt: skip
        texts = [row.tolist() for row in np.split(split.tokens, split.offsets[1:-1])]
        rows = zip(texts, split.labels.tolist(), strict=True)
        self.trainer = Trainer(
            model=self.model,
            args=arguments,
            train_dataset=[{"input_ids": ids, "labels": label} for ids, label in rows],
            data_collator=DataCollatorWithPadding(padding_tokenizer(pad_id)),
            callbacks=[_Clock(self)],
        )
        self.timed: Window | None = None
        self.about = (
            f"{type(self.model).__name__}, Trainer, {'bf16' if gpu else 'fp32'}, SDPA, fused AdamW, "
            f"dynamic padding grouped by length, {'compiled' if compiled else 'eager'}"
        )

    def warm_up(self) -> None:
        self.window()

    def window(self) -> Window:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a summary of every call
            self.trainer.train()
        assert self.timed is not None
        return self.timed


class _Clock(TrainerCallback):
    """Times each epoch from its first step to its last, and measures once the held bytes."""

    def __init__(self, arm: HuggingFaceTrainer) -> None:
        self.arm, self.began, self.steps = arm, 0.0, 0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.steps = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.steps == 0:  # the first batch is loaded already, which favours this arm
            self.began = now(self.arm.device)
        self.steps += 1

    def on_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        if self.arm.held is None:
            self.arm.held = held_bytes(optimizer)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        seconds, load = now(self.arm.device) - self.began, self.arm.load
        self.arm.timed = Window(seconds, self.steps, load.texts, load.tokens, self.arm.operations)


class PlainGPT(nn.Module):
    """A plain implementation of the reference architecture, without a head."""

    def __init__(self, config: OelmGPTConfig, vocab_size: int, dropout: float) -> None:
        super().__init__()
        d = config.d_model
        self.tokens = nn.Embedding(vocab_size, d)
        self.positions = nn.Embedding(config.max_position_embeddings, d)
        self.blocks = nn.ModuleList([PlainBlock(config, dropout) for _ in range(config.num_layers)])
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(dropout)
        for parameter in self.parameters():  # the usual initialisation, so that losses are realistic
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x, mask)
        return x


class PlainBlock(nn.Module):
    """A block whose attention is causal SDPA or, with a mask, explicit and bidirectional."""

    def __init__(self, config: OelmGPTConfig, dropout: float) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.num_heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wide, self.narrow = nn.Linear(d, config.d_ff), nn.Linear(config.d_ff, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, T, D)
        if mask is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
            attended = self.dropout(scores.softmax(-1)) @ v
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm_2(x)))))


class OriginalClassifier(PlainGPT):
    """Explicit attention with a mask, dropout everywhere."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config, config.vocab_size, DROPOUT)
        self.classifier = nn.Linear(config.d_model, int(config.num_labels or 0))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.hidden(ids, mask)
        last = x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]
        return self.classifier(self.dropout(self.norm(last)))


class CompactGPT(PlainGPT):
    """A language model in nanoGPT's style: SDPA, tied and padded vocabulary, plain cross-entropy."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__(config, -(-config.vocab_size // PADDED_TO) * PADDED_TO, dropout=0.0)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(self.hidden(ids)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Loop(TrainingArm):
    """A plain training loop around a model: forward, backward, clip, step."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        loss: Callable[[Tensor, Batch], Tensor],
        precision: str,
        about: str,
        **adamw: Any,
    ) -> None:
        self.objective = make_objective(case.store, case.length)
        super().__init__(case, self.objective.plan("train", case.batch_size, None, 0))
        self.model, self.loss, self.about = model.to(case.device).train(), loss, f"{about}, {precision}"
        self.autocast = autocast_of(precision, case.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, **adamw)

    def step(self, k: int) -> None:
        batch = self.objective.batch("train", self.batches.batch(k)).to(self.device)
        with self.autocast():
            loss = self.loss(batch.inputs["input_ids"], batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def original(case: Case) -> Loop:
    """The reports' recipe: fp32, eager, explicit attention, every text padded to the longest allowed."""
    model = OriginalClassifier(case.config)

    def loss(ids: Tensor, batch: Batch) -> Tensor:
        rest = (0, case.length - ids.shape[1])
        logits = model(F.pad(ids, rest), F.pad(batch.inputs["attention_mask"], rest))
        return F.cross_entropy(logits, batch.targets["labels"])

    about = f"explicit attention, dropout {DROPOUT}, padded to {case.length}, AdamW, eager"
    return Loop(case, model, loss, "fp32", about)


def language_loop(case: Case, style: str, compiled: bool) -> Loop:
    """Hugging Face's GPT-2 ("hf") or nanoGPT's style ("nanogpt"), with fused AdamW, compiled or not."""
    name = {"hf": "GPT2LMHeadModel", "nanogpt": "nanoGPT's style"}[style]
    if style == "hf":
        model = AutoModelForCausalLM.from_config(gpt2_config(case.config), attn_implementation="sdpa")
    else:
        model = CompactGPT(case.config)

    def loss(ids: Tensor, batch: Batch) -> Tensor:
        if style == "hf":
            return model(input_ids=ids, labels=ids).loss  # shifted inside
        return model(ids, batch.targets["labels"])

    about = f"{name}, SDPA, fused AdamW, {'compiled' if compiled else 'eager'}"
    loop = Loop(case, model, loss, resolve_precision("auto", case.device)[0], about, fused=True)
    if compiled:
        model.compile()
    return loop
