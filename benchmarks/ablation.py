"""What each fast path is worth: steps with all of them beside steps without one, as ratios of medians.

    python benchmarks/ablation.py --xnli FOLDER --imdb FOLDER --json benchmarks/h200-ablation.json

FOLDER is a prepared dataset (`oelm data prepare ... --out FOLDER`); without one, texts are made. The arms of
a pair take turns in one process. A path that brings less than 5 % everywhere does not earn its lines.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from determinism import bert, synchronize

from oelm.bench.load import made_lengths, made_stream, made_texts, sample_texts
from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
from oelm.data import open_store
from oelm.data.tasks import make_objective
from oelm.models.build import build_model
from oelm.speed import operations, step
from oelm.speed.adamw import RecordableAdamW
from oelm.speed.bf16_copies import Bf16Copies
from oelm.speed.forward import FastForward
from oelm.training.folder import environment
from oelm.training.parallel import deterministic_mode, process_state
from oelm.training.resolve import resolve_run
from oelm.training.step import make_step

Patch = Callable[[], AbstractContextManager[Any]]


class NoCopies(Bf16Copies):
    def __init__(self, *_: Any) -> None:
        self.places, self.pairs, self.trained, self.versions, self.forward = [], [], [], [], None


def gather_nothing(optimizer: RecordableAdamW) -> None:
    optimizer.gathered = False


@contextlib.contextmanager
def plain_part(name: str) -> Iterator[None]:
    """One method of the fast forward pass without our kernels."""
    real = getattr(FastForward, name)

    def plain(self: FastForward, *given: Any) -> Any:
        with mock.patch.object(self, "kernels", False):
            return real(self, *given)

    with mock.patch.object(FastForward, name, plain):
        yield


@contextlib.contextmanager
def whole_last_block() -> Iterator[None]:
    real = FastForward._model

    def whole(self: FastForward, *given: Any, rows: Any = None, **more: Any) -> Any:
        out = real(self, *given, **more)
        if rows is not None:
            out.last_hidden_state = operations.pick_rows(out.last_hidden_state, rows)
        return out

    with mock.patch.object(FastForward, "_model", whole):
        yield


def replaced(where: Any, name: str, by: Any) -> Patch:
    return lambda: mock.patch.object(where, name, by)


PATHS: dict[str, Patch] = {
    "CUDA graphs (with bf16 copies and the AdamW kernel)": replaced(
        step.FastStep, "_why_eager", lambda _: "left out"
    ),
    "packed texts": replaced(step.FastStep, "_why_padded", lambda _: "left out"),
    "bf16 copies": replaced(step, "Bf16Copies", NoCopies),
    "AdamW kernel": replaced(RecordableAdamW, "gather", gather_nothing),
    "row windows": replaced(step, "make_windows", lambda *_: None),
    "rows in use (with row windows)": replaced(step, "set_aside", lambda *_: None),
    "attention kernel": lambda: plain_part("_attention"),
    "norm kernel": lambda: plain_part("_norm"),
    "cross-entropy kernel": replaced(operations, "cross_entropy_for", lambda *_: None),
    "kernel for the embedding's gradient": replaced(operations, "row_sums", None),
    "last block of pooled tokens only": whole_last_block,
    "rotary kernel": replaced(operations, "rotary_triton", None),
}
ROTARY = ["rotary kernel"]
CLASSIFIER = [name for name in PATHS if "cross" not in name and name not in ROTARY]
LANGUAGE = [
    name for name in PATHS
    if "row" not in name and "pack" not in name and "last" not in name and name not in ROTARY
]  # fmt: skip
BERT = [name for name in PATHS if any(part in name for part in ("graphs", "copies", "AdamW", "row"))]


class Arm:
    """Steps of one case, perhaps without one path."""

    def __init__(
        self, store: Any, model: ModelConfig, batch: int, patch: Patch = contextlib.nullcontext
    ) -> None:
        self.patch, self.state, self.taken = patch, process_state(), 0
        config = RunConfig(
            task=TaskConfig(max_length=store.max_length), model=model,
            method=MethodConfig(name="baseline"),
            training=TrainingConfig(steps=10**6, batch_size=batch, warmup=0, schedule="constant", lr=1e-4),
        )  # fmt: skip
        with self.patch(), deterministic_mode(True, self.state.device):
            objective = make_objective(store, store.max_length, 0.0, "none")
            raw, _ = build_model(config, store)
            resolved = resolve_run(config, objective, self.state.device)
            self.step = make_step(resolved, objective, raw, self.state)
            self.step.model.train()
        self.batches = resolved.plan.epoch(0)
        recorded = self.step.paths()["eager"] is None
        self.time(2 * len(self.batches) + 1 if recorded else 5)

    def time(self, steps: int) -> float:
        """Seconds a step."""
        with self.patch(), deterministic_mode(True, self.state.device):
            synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self.step.take(self.taken, self.batches, self.taken % len(self.batches))
                self.taken += 1
            synchronize()
            return (time.perf_counter() - began) / steps

    def close(self) -> None:
        self.step.close()


def compared(full: Arm, other: Arm, rounds: int, window: float) -> dict[str, Any]:
    """Milliseconds a step with all paths and without one, and the ratios of the rounds."""
    arms = (full, other)
    steps = [max(3, min(len(arm.batches), int(window / arm.time(3)))) for arm in arms]
    times: list[list[float]] = [[], []]
    for n in range(rounds):
        for i in (0, 1) if n % 2 else (1, 0):
            arms[i].time(max(1, steps[i] // 3))  # a GPU at its power limit remembers what ran before
            times[i].append(arms[i].time(steps[i]))
    ratios = [b / a for a, b in zip(*times, strict=True)]
    ms = [1e3 * statistics.median(t) for t in times]
    return {"ms": ms[0], "without_ms": ms[1], "ratio": statistics.median(ratios), "ratios": ratios}


def cases(asked: Any, folder: str) -> dict[str, tuple[Any, ModelConfig, int, list[str]]]:
    """name -> dataset, model, batch size, paths"""
    tiny = asked.tiny
    name, size, steps, longest = ("gpt-tiny", "tiny", 4, 64) if tiny else ("gpt-medium-512", "base", 60, 512)
    gpt, rotary = ModelConfig(name=name), ModelConfig(name=name, positions="rotary")
    texts, vocab = 16 * steps, 50257

    def dataset(given: Path | None, kind: str) -> Any:
        if given is not None:
            return sample_texts(open_store(given), texts)
        return made_texts(f"made {kind}", made_lengths(kind, texts, longest), vocab, longest)

    windows = 4 if tiny else 128
    short = made_texts(
        "made pairs", made_lengths("pairs", texts, min(longest, 128)), 30522, min(longest, 128)
    )
    stream = made_stream(windows * longest * 6, vocab, longest)
    return {
        "xnli": (dataset(asked.xnli, "pairs"), gpt, 16, CLASSIFIER),
        "imdb": (dataset(asked.imdb, "reviews"), gpt, 16, CLASSIFIER),
        "language model": (stream, gpt, windows, LANGUAGE),
        "rotary language model": (stream, rotary, windows // 2, ROTARY),
        "BERT-base shape": (short, ModelConfig(name=bert(folder, size)), 16, BERT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--xnli", type=Path, help="a prepared dataset")
    parser.add_argument("--imdb", type=Path, help="a prepared dataset")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window", type=float, default=0.25, help="seconds")
    parser.add_argument("--only", help="one case, such as 'rotary language model'")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse on a CPU")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(process_state().device, 1),
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (store, model, batch, paths) in cases(asked, folder).items():
            if asked.only not in (None, name):
                continue
            full = Arm(store, model, batch)
            rows = record["cases"][name] = {"about": str(full.step), "paths": {}}
            for path in paths:
                other = Arm(store, model, batch, PATHS[path])
                row = rows["paths"][path] = compared(full, other, asked.rounds, asked.window)
                other.close()
                del other
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                print(f"{name:16} {path:52} {row['ms']:8.3f} ms {row['ratio']:7.3f}", flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps(record, indent=1) + "\n")
            full.close()


if __name__ == "__main__":
    main()
