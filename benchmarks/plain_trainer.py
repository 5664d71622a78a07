"""Train and test a classifier with Hugging Face's Trainer: what a careful user writes without this package.

    python benchmarks/plain_trainer.py PREPARED OUT --layers 6 --width 512 --heads 8

A GPT-2 classifier from scratch on the token arrays of a prepared dataset: bf16 on a GPU, SDPA, fused AdamW,
dynamic padding, texts grouped by length; evaluated on validation after every epoch, the best epoch loaded,
tested once. Only weights are saved, and only the best and the last. OUT/results.json says when each part was
done (time.time()).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("layers", "width", "heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--epochs", type=float, default=3)
    asked = parser.parse_args()

    import numpy as np
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        DataCollatorWithPadding,
        GPT2Config,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    done = {"imports": time.time()}
    set_seed(0)
    gpu = torch.cuda.is_available()
    meta = json.loads((asked.data / "store.json").read_text())
    pad = meta["tokenizer"]["pad_id"]

    def split(name: str) -> list[dict[str, Any]]:
        tokens, offsets, labels = (
            np.load(asked.data / f"{name}.{column}.npy") for column in ("tokens", "offsets", "labels")
        )
        texts = np.split(tokens, offsets[1:-1].astype(np.int64))
        return [
            {"input_ids": text.tolist(), "labels": int(label)}
            for text, label in zip(texts, labels, strict=True)
        ]

    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.data / "tokenizer")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    config = GPT2Config(
        vocab_size=meta["tokenizer"]["vocab_size"], n_positions=max(512, meta["max_length"]),
        n_embd=asked.width, n_layer=asked.layers, n_head=asked.heads, num_labels=len(meta["label_names"]),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, pad_token_id=pad,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(asked.out / "checkpoints"), num_train_epochs=asked.epochs,
        per_device_train_batch_size=16, per_device_eval_batch_size=128,
        learning_rate=3e-4, lr_scheduler_type="cosine", warmup_steps=0.06, weight_decay=0.01,
        max_grad_norm=1.0, optim="adamw_torch_fused", bf16=gpu, use_cpu=not gpu, dataloader_pin_memory=gpu,
        train_sampling_strategy="group_by_length", eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=1, save_only_model=True, load_best_model_at_end=True,
        metric_for_best_model="accuracy", logging_steps=100, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa"),
        args=arguments,
        train_dataset=split("train"),
        eval_dataset=split("validation"),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float((found[0].argmax(-1) == found[1]).mean())},
    )
    test = split("test")
    done["data and model"] = time.time()
    trainer.train()
    done["training with evaluations"] = time.time()
    measured = trainer.evaluate(test, metric_key_prefix="test")
    done["test"] = time.time()
    trainer.save_model(str(asked.out / "model"))
    done["saving"] = time.time()
    results = {"done": done, "steps": trainer.state.global_step, "test_accuracy": measured["test_accuracy"]}
    results["validation"] = [
        row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row
    ]
    (asked.out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
