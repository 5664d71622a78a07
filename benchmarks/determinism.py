"""What the same bits cost: steps with training.deterministic and without, interleaved, as ratios of medians.

    python benchmarks/determinism.py --json benchmarks/h200-determinism.json

Also: the embedding's gradient by our kernel beside PyTorch's unordered index_add_, and whether steps repeated
from the start have the same bits.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oelm.bench.load import made_lengths, made_stream, made_texts
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.speed.kernels.rows_triton import row_sums
from oelm.training.folder import environment
from oelm.training.parallel import deterministic_mode, process_state
from oelm.training.resolve import resolve_run
from oelm.training.step import make_step


def bert(folder: str, size: str) -> str:
    """A BERT of random weights in a folder."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"base": {}, "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}}[size]
    config = BertConfig(vocab_size=30522, intermediate_size=4 * shape.get("hidden_size", 768), **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def cases(tiny: bool, folder: str) -> dict[str, tuple[Any, str, int, dict[str, Any]]]:
    """name -> store, model, batch size, training"""
    gpt, size, texts = ("gpt-tiny", "tiny", 160) if tiny else ("gpt-medium-512", "base", 1600)
    longest = 64 if tiny else 512
    pairs = made_texts("pairs", made_lengths("pairs", texts, longest), 30522, longest)
    reviews = made_texts("reviews", made_lengths("reviews", texts, longest), 30522, longest)
    stream = made_stream(64 * longest * (2 if tiny else 20), 30522, longest)
    small = made_texts(
        "short pairs", made_lengths("pairs", texts, min(longest, 128)), 30522, min(longest, 128)
    )
    return {
        "classifier, 16 pairs": (pairs, gpt, 16, {}),
        "classifier, 16 reviews": (reviews, gpt, 16, {}),
        "language model, 64 x 512": (stream, gpt, 64, {}),
        "BERT-base shape, 16 pairs": (small, bert(folder, size), 16, {}),
        "classifier, 16 reviews, plain": (reviews, gpt, 16, {"fast": False}),
    }


class Steps:
    """A step and its batches, with or without deterministic operations."""

    def __init__(self, store: Any, model: str, batch: int, training: dict[str, Any], wanted: bool) -> None:
        self.wanted, self.state, self.taken = wanted, process_state(), 0
        config = RunConfig(
            task=TaskConfig(max_length=store.max_length), model=ModelConfig(name=model),
            method=MethodConfig(name="baseline"),
            training=TrainingConfig(steps=1000, batch_size=batch, warmup=0, schedule="constant", **training),
        )  # fmt: skip
        with self.mode():
            objective = make_objective(store, store.max_length, 0.0, "none")
            raw, _ = build_model(config, store)
            resolved = resolve_run(config, objective, self.state.device)
            self.step = make_step(resolved, objective, raw, self.state)
            self.step.model.train()
        self.batches = resolved.plan.epoch(0)

    def mode(self) -> contextlib.AbstractContextManager[None]:
        return deterministic_mode(self.wanted, self.state.device)

    def window(self, steps: int) -> tuple[float, list[float]]:
        """Seconds a step, and the losses."""
        with self.mode():
            synchronize()
            began, losses = time.perf_counter(), []
            for _ in range(steps):
                found = self.step.take(self.taken, self.batches, self.taken % len(self.batches))
                losses.append(found[0])
                self.taken += 1
            synchronize()
            return (time.perf_counter() - began) / steps, torch.stack(losses).tolist()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(case: tuple[Any, str, int, dict[str, Any]], rounds: int, steps: int) -> dict[str, Any]:
    arms = [Steps(*case, wanted) for wanted in (True, False)]
    epoch = len(arms[0].batches)
    first = [arm.window(2 * epoch)[1] for arm in arms]  # shapes are met and recorded
    times: list[list[float]] = [[], []]
    for n in range(rounds):
        for arm in (0, 1) if n % 2 else (1, 0):
            times[arm].append(arms[arm].window(steps)[0])
    again = Steps(*case, True).window(2 * epoch)[1]
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return {
        "ms": [1e3 * statistics.median(t) for t in times],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "steps_repeated": len(again),
        "same_bits": again == first[0],
    }


def gradient_of_rows(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Microseconds of the embedding's gradient, ours and index_add_'s, as a recorded step would take them."""
    found = []
    for tokens, words in [(608, 13000), (4734, 13000), (8192, 13000), (32768, 50257)][: 1 if tiny else 4]:
        ids = torch.multinomial(1 / torch.arange(2, words + 2).float(), tokens, replacement=True).to(device)
        grad = torch.randn(tokens, 512, device=device)
        calls = {
            "ours": lambda: row_sums(grad, ids, words),  # noqa: B023
            "index_add": lambda: grad.new_zeros(words, 512).index_add_(0, ids, grad),  # noqa: B023
        }
        times = {name: recorded_us(call) for name, call in calls.items()}
        found.append({"tokens": tokens, "words": words} | times)
    return found


def recorded_us(call: Callable[[], Any], times: int = 20) -> float:
    """Of one call in a CUDA graph of many: without the time that launching takes."""
    call()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    taken = []
    for _ in range(11):
        synchronize()
        began = time.perf_counter()
        graph.replay()
        synchronize()
        taken.append((time.perf_counter() - began) / times)
    return 1e6 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100, help="of a window")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse on a CPU")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = process_state().device
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device, 1),
    }
    found["gradient_of_rows_us"] = gradient_of_rows(device, asked.tiny) if device.type == "cuda" else []
    found["cases"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(asked.tiny, folder).items():
            steps = asked.steps if "language" not in name else max(1, asked.steps // 5)
            found["cases"][name] = measure(case, asked.rounds, steps)
            print(name, json.dumps(found["cases"][name]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["gradient_of_rows_us"]:
        print(f"{row['tokens']:6} tokens: ours {row['ours']:7.1f} us, index_add_ {row['index_add']:7.1f} us")
    print(f"{'':32} {'same bits':>10} {'any':>8} {'ratio':>7}  repeated with the same bits")
    for name, row in found["cases"].items():
        print(
            f"{name:32} {row['ms'][0]:7.2f} ms {row['ms'][1]:5.2f} ms {row['ratio']:7.3f}  {row['same_bits']}"
        )


if __name__ == "__main__":
    main()
