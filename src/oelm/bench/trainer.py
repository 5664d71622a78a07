"""Hugging Face's Trainer as an arm: its own classes, unmodified, in the settings that serve it best.

A window is one call of `Trainer.train` for one epoch: all texts once, in batches of its own choice, timed
from the first step to the last. Model and optimizer go on; what a call sets up is not timed.
"""

import contextlib
import io
import tempfile
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from oelm.bench.load import Load
from oelm.bench.measure import Arm, Held, Window, gradient_bytes, now
from oelm.data import Store
from oelm.models.gpt_config import OelmGPTConfig


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, store: Store) -> None:
        split = store["train"]
        self.rows = [
            split.tokens[split.offsets[i] : split.offsets[i + 1]].tolist() for i in range(len(split))
        ]
        self.labels = split.labels.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.rows[i], "labels": self.labels[i]}


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

    def __init__(
        self, store: Store, config: OelmGPTConfig, batch_size: int, device: torch.device, compiled: bool
    ) -> None:
        gpu = device.type == "cuda"
        self.device, self.load = device, Load.of(store["train"].lengths)
        self.operations = self.load.operations(config, "classification", causal=True)
        self.model: nn.Module = gpt2_classifier(config, store.pad_id)
        self.folder = tempfile.TemporaryDirectory()
        # Compiling, it would switch TF32 on for the whole process, and with it for the original recipe.
        precision: dict[str, Any] = {"tf32": False} if compiled and gpu else {}
        arguments = TrainingArguments(
            output_dir=self.folder.name, per_device_train_batch_size=batch_size, num_train_epochs=1,
            learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0, lr_scheduler_type="constant",
            optim="adamw_torch_fused", bf16=gpu, use_cpu=not gpu,
            torch_compile=compiled, dataloader_pin_memory=gpu, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, logging_nan_inf_filter=False, **precision, **grouped_by_length(),
        )  # fmt: skip
        tokenizer = store.tokenizer()
        if tokenizer.pad_token is None:  # GPT-2's has none; the usual stand-in is the one the store names
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(store.pad_id)
        self.trainer = Trainer(
            model=self.model,
            args=arguments,
            train_dataset=Texts(store),
            data_collator=DataCollatorWithPadding(tokenizer),
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
        self.arm, self.began, self.steps, self.gradients = arm, 0.0, 0, 0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.steps = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.steps == 0:  # its batch is there already, which is in its favour
            self.began = now(self.arm.device)
        self.steps += 1

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        if self.arm.held is None:
            self.gradients = gradient_bytes(optimizer)

    def on_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        if self.arm.held is None:
            self.arm.held = Held.count(self.gradients, optimizer.state.items())

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        seconds, load = now(self.arm.device) - self.began, self.arm.load
        self.arm.timed = Window(seconds, self.steps, load.texts, load.tokens, self.arm.operations)


def grouped_by_length() -> dict[str, Any]:
    """The setting that puts texts of similar length together, as this version of transformers calls it."""
    names = {field.name for field in fields(TrainingArguments)}
    if "train_sampling_strategy" in names:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}
