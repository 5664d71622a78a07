"""Does our training learn what Hugging Face's Trainer learns? The same start, batches and recipe, many seeds.

    python benchmarks/oracle.py [--data STORE] [--model gpt-medium-512] [--steps 300] [--seeds 5]
    python benchmarks/oracle.py --tiny          # a rehearsal for a CPU
    python benchmarks/oracle.py --reference plain --data STORE --model FOLDER   # fast against plain

Three arms for every seed: `fast` and `plain` (training.fast = true and false) are `oelm train`; `trainer` is
GPT2LMHeadModel with the weights that ours starts from (`oelm.to_gpt2`), trained by transformers' Trainer with
its own AdamW, clipping, accumulation and autocast. With `--reference plain` only the first two, for any
model and task. Rounding differs, and training magnifies it, so runs of one seed end apart; with dropout the
fast and the plain path also draw other masks. The question is whether they end at the same loss on average:
paired by seed, two one-sided t tests (TOST), with a margin that is a share of the reference's mean loss.
STORE is what `oelm data prepare` made of a corpus; without it a small made-up one is used.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import oelm
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data import Store, open_store
from oelm.data.manifest import FORMAT, seal
from oelm.data.tasks import make_objective
from oelm.data.tokenizer import train_tokenizer
from oelm.models.build import build_model
from oelm.models.gpt_sizes import PRESETS
from oelm.system.files import write_json
from oelm.training.folder import environment
from oelm.training.loop import train
from oelm.training.parallel import process_state
from oelm.training.resolve import resolve_precision

ARMS = ("fast", "plain", "trainer")  # the last is the reference
LAST = 20  # training steps whose mean loss is the final training loss
MEASURES = ("final_training_loss", "validation_loss")
FIRST = 10  # steps in which the arms differ by little more than rounding

Curve = dict[str, Any]


# Our arms ------------------------------------------------------------------------------------------------


def our_run(config: RunConfig, store: Store, out: Path) -> Curve:
    """`oelm train`: what it logs of every step, and the validation loss after the last."""
    train(config, store, out, show=False)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "training_loss": [line["loss"] for line in steps],
        "grad_norm": [line["grad_norm"] for line in steps],
        "validation_loss": [line["metrics"]["loss"] for line in lines if line["kind"] == "eval"][-1],
    }


# Hugging Face's ------------------------------------------------------------------------------------------


class Batches(Dataset[dict[str, Tensor]]):
    """The micro-batches of a run in its order, cut from the stream of tokens here; an item is a whole one."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        training, size = config.training, config.task.max_length
        plan = make_objective(store, size, 0.0, "none").plan(
            "train", training.batch_size, None, training.seed
        )
        self.tokens, self.size = store["train"].tokens, size
        self.shares = [
            batches.share(k, micro, training.accumulate)
            for _, (_, k, batches) in zip(range(training.steps or 0), plan.schedule(), strict=False)
            for micro in range(training.accumulate)
        ]

    def __len__(self) -> int:
        return len(self.shares)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        windows = [self.tokens[w * self.size : (w + 1) * self.size + 1] for w in self.shares[i]]
        tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
        targets = tokens[:, 1:].contiguous()
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": targets, "shift_labels": targets}


class FrozenQueriesAndKeys(TrainerCallback):
    """Keeps the q and k parts of GPT-2's fused matrices as they are, without a line of ours: their gradients
    are set to 0, so that they do not count in the norm either, and what weight decay takes is put back."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        for name, weight in model.named_parameters():
            if name.endswith("c_attn.weight"):  # (in, out): the columns are q, k, v
                qk = weight.detach()[:, : 2 * weight.shape[0]]
                self.kept.append((weight, qk.clone()))
                weight.register_hook(self._without_qk)

    @staticmethod
    def _without_qk(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:, : 2 * grad.shape[0]] = 0
        return grad

    def on_step_end(self, *_: Any, **__: Any) -> None:
        for weight, qk in self.kept:
            with torch.no_grad():
                weight[:, : qk.shape[1]] = qk.to(weight.device)


class WarmedUpFromTheFirstStep(Trainer):
    """transformers warms up from a learning rate of 0, so that its first step changes nothing; ours starts at
    lr / warmup. PyTorch's own schedulers can say that. Without warm-up transformers' own schedule is used."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = int(self.args.warmup_steps)
        if not warmup:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(1, warmup - 1))
            fall = CosineAnnealingLR(optimizer, T_max=num_training_steps - warmup)
            self.lr_scheduler = SequentialLR(optimizer, [rise, fall], milestones=[warmup])
            self._created_lr_scheduler = True
        return self.lr_scheduler


def exported(config: RunConfig, store: Store) -> Any:
    """GPT-2 with the weights that our run starts from. Its attention biases, which ours has not, stay 0."""
    model = oelm.to_gpt2(build_model(config, store)[0])
    for name, parameter in model.named_parameters():
        if name.endswith((".attn.c_attn.bias", ".attn.c_proj.bias")):
            parameter.requires_grad_(False)
    return model


def train_by_trainer(
    model: Any,
    batches: Dataset[Any],
    training: TrainingConfig,
    out: Path,
    device: torch.device,
    callbacks: list[TrainerCallback],
) -> Curve:
    """What transformers' Trainer logs of every step. A batch is an item; `model` stays on the device."""
    assert training.schedule == "cosine" and training.steps is not None
    warmup = training.warmup if training.warmup >= 1 else int(training.warmup * training.steps)
    gpu, precision = device.type == "cuda", resolve_precision(training.precision, device)[0]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=training.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=training.accumulate, train_sampling_strategy="sequential",
        learning_rate=training.lr, weight_decay=training.weight_decay, adam_beta1=training.betas[0],
        adam_beta2=training.betas[1], adam_epsilon=training.eps, max_grad_norm=training.clip,
        lr_scheduler_type="cosine", warmup_steps=int(warmup), optim="adamw_torch", bf16=precision == "bf16",
        use_cpu=not gpu, dataloader_pin_memory=gpu, logging_steps=1, logging_nan_inf_filter=False,
        save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = WarmedUpFromTheFirstStep(
        model=model,
        args=arguments,
        train_dataset=batches,
        data_collator=lambda items: items[0],
        callbacks=callbacks,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every log
        trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "training_loss": [float(line["loss"]) for line in steps],
        "grad_norm": [float(line["grad_norm"]) for line in steps],
    }


def trainer_run(config: RunConfig, store: Store, out: Path, device: torch.device) -> Curve:
    """The same run of a language model as `our_run`, by transformers."""
    model, batches = exported(config, store), Batches(store, config)
    callbacks = [FrozenQueriesAndKeys(model)] if config.method.name == "oelm" else []
    curve = train_by_trainer(model, batches, config.training, out, device, callbacks)
    bf16 = resolve_precision(config.training.precision, device)[0] == "bf16"
    return curve | {"validation_loss": validation_loss(model, store, config.task.max_length, device, bf16)}


@torch.no_grad()
def validation_loss(model: nn.Module, store: Store, size: int, device: torch.device, bf16: bool) -> float:
    """The mean over all tokens but the first, each predicted once from the window it lies in."""
    tokens = torch.from_numpy(store["validation"].tokens.astype(np.int64)).to(device)
    model.to(device).eval()
    targets, total = len(tokens) - 1, 0.0
    whole = targets // size * size
    pieces = [(first, min(first + 16 * size, whole), size) for first in range(0, whole, 16 * size)]
    for first, end, length in [*pieces, (whole, targets, targets - whole)]:
        if end > first:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                logits = model(input_ids=tokens[first:end].view(-1, length)).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[first + 1 : end + 1], reduction="sum")
            total += float(loss)
    return total / targets


# Data that needs nothing -----------------------------------------------------------------------------------


def made_store(folder: Path, tokens: int, vocabulary: int) -> Store:
    """A corpus that can be learned: Zipf's law over made-up words, each with a few that follow it often."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    words = sorted({"".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(3000)})
    rng.shuffle(words)
    weights = [1 / (rank + 2) for rank in range(len(words))]
    follows = {word: rng.choices(words, weights, k=4) for word in words}

    def text(length: int) -> str:
        found, word = [], words[0]
        for fresh in rng.choices(words, weights, k=length):
            word = rng.choice(follows[word]) if rng.random() < 0.6 else fresh
            found.append(word + ("." if rng.random() < 0.08 else ""))
        return " ".join(found)

    texts = {"train": text(tokens), "validation": text(tokens // 16), "test": text(200)}
    tokenizer = train_tokenizer([texts["train"][:2_000_000]], vocabulary)
    tokenizer.save_pretrained(folder / "tokenizer")
    splits = {}
    for split, content in texts.items():
        ids = np.array(tokenizer(content)["input_ids"], dtype=np.uint16)
        np.save(folder / f"{split}.tokens.npy", ids)
        np.save(folder / f"{split}.documents.npy", np.array([1], dtype=np.uint64))
        sizes = {"items": 1, "tokens": len(ids), "bytes": len(content), "truncated": 0, "longest": 0}
        splits[split] = sizes | {"columns": ["documents", "tokens"]}
    names = {"vocab_size": len(tokenizer), "pad_id": tokenizer.pad_token_id, "name": f"train:{vocabulary}"}
    manifest = {"format": FORMAT, "fingerprint": "made-up", "task": "made-up text", "kind": "lm"}
    manifest |= {"metric": "perplexity", "label_names": [], "max_length": 512, "warnings": []}
    manifest |= {"pairs": False, "dropped": {}, "duplicates": {}}
    write_json(folder / "store.json", seal(manifest | {"tokenizer": names, "splits": splits}, folder))
    return open_store(folder)


# The comparison --------------------------------------------------------------------------------------------


def run_config(options: argparse.Namespace, seed: int, fast: bool) -> RunConfig:
    names = ("dropout", "attention_dropout") if options.model in PRESETS else ("dropout",)
    dropout = dict.fromkeys(names, options.dropout)
    return RunConfig(
        task=TaskConfig(max_length=options.window),
        model=ModelConfig(name=options.model, **dropout),
        method=MethodConfig(name=options.method),
        training=TrainingConfig(
            lr=options.lr, steps=options.steps, batch_size=options.batch_size, accumulate=options.accumulate,
            warmup=options.warmup, weight_decay=options.weight_decay, precision=options.precision, fast=fast,
            eval_every=options.steps, save_every=0, log_every=1, test=False, seed=seed,
        ),
    )  # fmt: skip


def one_run(arm: str, seed: int, options: argparse.Namespace, store: Store, device: torch.device) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        config, out = run_config(options, seed, arm == "fast"), Path(folder) / arm
        curve = trainer_run(config, store, out, device) if arm == "trainer" else our_run(config, store, out)
        shutil.rmtree(out, ignore_errors=True)
    curve["final_training_loss"] = statistics.mean(curve["training_loss"][-LAST:])
    return {"arm": arm, "seed": seed, "seconds": round(time.perf_counter() - began, 2)} | curve


def equivalence(differences: list[float], margin: float) -> dict[str, Any]:
    """Two one-sided paired t tests at 5 %: equivalent if the 90 % interval is inside the margin."""
    found = stats.ttest_1samp(differences, 0.0)
    low, high = map(float, found.confidence_interval(0.90))
    mean, error = statistics.mean(differences), (high - low) / 2 / stats.t.ppf(0.95, found.df)
    p = float(stats.t.sf((margin - abs(mean)) / error, found.df))
    ends = {"low": low, "high": high, "p": p, "equivalent": p < 0.05}
    return {"n": len(differences), "mean": mean, "margin": margin, **ends}


def compared(runs: list[Curve], share: float, arms: tuple[str, ...] = ARMS) -> dict[str, Any]:
    """The other arms less the reference, which is the last one, seed by seed."""
    *ours, reference = arms
    of = {(run["arm"], run["seed"]): run for run in runs}
    seeds = sorted({seed for _, seed in of})
    found: dict[str, Any] = {"seeds": seeds, "margin_share": share, "arms": {}}
    for name in MEASURES:
        theirs = [of[reference, seed][name] for seed in seeds]
        margin = share * statistics.mean(theirs)
        for arm in arms:
            values = [of[arm, seed][name] for seed in seeds]
            entry = {"values": values, "mean": statistics.mean(values)}
            if arm != reference:
                differences = [a - b for a, b in zip(values, theirs, strict=True)]
                entry |= {
                    "differences": differences,
                    f"less_{reference}": equivalence(differences, margin),
                }
            found["arms"].setdefault(arm, {})[name] = entry
    for arm in ours:
        first = [
            abs(a / b - 1)
            for seed in seeds
            for a, b in zip(
                of[arm, seed]["training_loss"][:FIRST],
                of[reference, seed]["training_loss"][:FIRST],
                strict=True,
            )
        ]
        found["arms"][arm]["first_steps_relative"] = {"steps": FIRST, "largest": max(first)}
    tests = [found["arms"][arm][name][f"less_{reference}"] for arm in ours for name in MEASURES]
    found["verdict"] = "equivalent" if all(test["equivalent"] for test in tests) else "not shown equivalent"
    return found


def show(found: dict[str, Any], runs: list[Curve], arms: tuple[str, ...] = ARMS) -> None:
    reference = arms[-1]
    print(
        f"\n{len(found['seeds'])} seeds; margin {found['margin_share']:.1%} of the mean loss of {reference}"
    )
    less = f"- {reference}"
    print(f"{'arm':8} {'measure':20} {'mean':>8} {less:>10} {'90 % interval':>22} {'margin':>8} {'p':>9}")
    for name in MEASURES:
        for arm in reversed(arms):
            entry = found["arms"][arm][name]
            line = f"{arm:8} {name:20} {entry['mean']:8.4f}"
            if test := entry.get(f"less_{reference}"):
                low, high, p = (
                    float("nan") if test[key] is None else test[key] for key in ("low", "high", "p")
                )
                line += f" {test['mean']:+10.5f} {low:+11.5f} {high:+10.5f} {test['margin']:8.4f} {p:9.2g}"
                line += "  equivalent" if test["equivalent"] else "  not shown equivalent"
            print(line)
    for arm in arms:
        seconds = statistics.median(run["seconds"] for run in runs if run["arm"] == arm)
        first = found["arms"][arm].get("first_steps_relative")
        line = f"{arm}: {seconds:.1f} s a run"
        if first:
            line += f"; its first {first['steps']} losses differ from those of {reference} by "
            line += f"{first['largest']:.1e} at most"
        print(line)
    print(f"verdict: {found['verdict']}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="what `oelm data prepare` made of a corpus")
    parser.add_argument("--reference", default="trainer", choices=("trainer", "plain"))
    parser.add_argument("--model", default="gpt-medium-512")
    parser.add_argument("--dropout", type=float, help="default: the model's own")
    parser.add_argument("--method", default="baseline", choices=("baseline", "oelm"))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=float, default=0.06)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--margin", type=float, default=0.01, help="as a share of the reference's mean loss")
    parser.add_argument("--tiny", action="store_true", help="gpt-tiny, 40 steps of 4 x 64 tokens, 3 seeds")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("oracle.json"))
    if parser.parse_args().tiny:
        parser.set_defaults(model="gpt-tiny", window=64, batch_size=4, steps=40, seeds=3)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    device = process_state().device
    arms = ARMS[: ARMS.index(options.reference) + 1]
    asked = {name.replace("_", "-"): value for name, value in vars(options).items()}
    asked = {name: value for name, value in asked.items() if name not in ("data", "tiny", "json")}
    words = [f"--{name} {value}" for name, value in asked.items() if value is not None]
    other = "by transformers' Trainer" if options.reference == "trainer" else "by the plain path"
    record = {
        "what": f"training by us and {other}: the same start, batches and recipe",
        "command": " ".join(["python benchmarks/oracle.py", *words]),
        "environment": environment(device, 1),
    }
    runs: list[Curve] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            sizes = (40_000, 400) if options.tiny else (1_500_000, 4096)
            store = made_store(Path(folder), *sizes)
        else:
            store = open_store(options.data)
        record["data"] = {"task": store.task, "fingerprint": store.fingerprint}
        for seed in range(1, options.seeds + 1):
            for arm in arms:
                runs.append(one_run(arm, seed, options, store, device))
                last = runs[-1]
                print(
                    f"seed {seed}, {arm}: {last['final_training_loss']:.5f}, validation "
                    f"{last['validation_loss']:.5f}, {last['seconds']} s",
                    file=sys.stderr,
                )
                write_json(options.json, record | {"runs": runs})  # nothing is lost if it is stopped
    found = compared(runs, options.margin, arms)
    write_json(options.json, record | {"compared": found, "runs": runs})
    show(found, runs, arms)


if __name__ == "__main__":
    main()
