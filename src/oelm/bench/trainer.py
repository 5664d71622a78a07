"""Hugging Face's Trainer as an arm: its own classes, unmodified, in the settings that serve it best.

A window is one call of `Trainer.train` for one epoch: all texts once, in batches of its own choice, timed
from the first step to the last. Model and optimizer go on; what a call sets up is not timed.
"""

import contextlib
import io
import tempfile
from typing import Any

import numpy as np
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from oelm.bench.load import Case, Load, padding_tokenizer
from oelm.bench.measure import Arm, Window, held_bytes, now
from oelm.models.gpt_config import OelmGPTConfig


def gpt2_config(config: OelmGPTConfig, **more: Any) -> GPT2Config:
    """GPT-2 of the same size and without dropout; its attention has biases, which ours has not."""
    return GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.max_position_embeddings, n_embd=config.d_model,
        n_layer=config.num_layers, n_head=config.num_heads, n_inner=config.d_ff, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip


def gpt2_classifier(config: OelmGPTConfig, pad_id: int) -> Any:
    return AutoModelForSequenceClassification.from_config(
        gpt2_config(config, num_labels=config.num_labels, pad_token_id=pad_id), attn_implementation="sdpa"
    )


class HuggingFaceTrainer(Arm):
    """Without loader workers and without cuDNN's attention: on an H200 both made it slower. cuDNN plans anew
    for every length it meets, and batches grouped by length meet many."""

    cudnn_attention = False

    def __init__(self, case: Case, compiled: bool) -> None:
        split, pad_id, gpu = case.store["train"], case.store.pad_id, case.device.type == "cuda"
        self.device, self.load = case.device, Load.of(split.lengths)
        self.operations = self.load.operations(case.config, "classification", causal=True)
        self.model: nn.Module = gpt2_classifier(case.config, pad_id)
        self.folder = tempfile.TemporaryDirectory()
        # Compiling, it would switch TF32 on for the whole process, and with it for the original recipe.
        precision: dict[str, Any] = {"tf32": False} if compiled and gpu else {}
        arguments = TrainingArguments(
            output_dir=self.folder.name, per_device_train_batch_size=case.batch_size, num_train_epochs=1,
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
            f"GPT2ForSequenceClassification, Trainer, {'bf16' if gpu else 'fp32'}, SDPA, fused AdamW, "
            f"dynamic padding grouped by length, {'compiled' if compiled else 'eager'}"
        )

    def settle(self) -> None:
        self.window()

    def window(self) -> Window:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a summary of every call
            self.trainer.train()
        assert self.timed is not None
        return self.timed

    def close(self) -> None:
        self.folder.cleanup()


class _Clock(TrainerCallback):
    """Times each epoch from its first step to its last, and counts once what is held."""

    def __init__(self, arm: HuggingFaceTrainer) -> None:
        self.arm, self.began, self.steps = arm, 0.0, 0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.steps = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.steps == 0:  # its batch is there already, which is in its favour
            self.began = now(self.arm.device)
        self.steps += 1

    def on_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        if self.arm.held is None:
            self.arm.held = held_bytes(optimizer)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        seconds, load = now(self.arm.device) - self.began, self.arm.load
        self.arm.timed = Window(seconds, self.steps, load.texts, load.tokens, self.arm.operations)
