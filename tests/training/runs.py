"""Tiny real runs of the command line, in processes forked from one that has imported everything.

Starting Python with torch takes seconds, so a fork server imports once and every run is a fork of it. What
runs in the fork is `oelm.cli.main.main`, unpatched: a test may watch it, signal it, limit it and kill it.
"""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np

from oelm.config import merge, to_toml
from oelm.data import load_file, prepare
from tests.data.made import sentence, write_csv

PRELOAD = [
    "oelm.cli.main", "oelm.training.loop", "oelm.inference.trained", "oelm.data", "pydantic",
    "scipy.sparse.linalg",
    "sklearn.feature_extraction.text", "sklearn.linear_model", "transformers.models.auto.tokenization_auto",
]  # fmt: skip
TIMES = (
    "ended", "train_time_s", "eval_time_s", "watch_time_s", "total_time_s", "texts_per_s",
    "peak_memory_bytes", "reports",
)  # fmt: skip

# Dropout draws random numbers, accumulation splits batches, and saves fall on steps without an evaluation.
RUN: dict[str, Any] = {
    "task": {"max_length": 32, "tokenizer": "train:300"},
    "model": {"name": "gpt-tiny", "dropout": 0.1},
    "method": {"name": "oelm"},
    "training": {
        "lr": 2e-3, "steps": 30, "batch_size": 8, "accumulate": 2, "warmup": 3, "log_every": 1,
        "eval_every": 5, "save_every": 3, "keep": 2, "seed": 1,
    },
}  # fmt: skip


def make_store(folder: Path, shuffled: bool = False) -> Path:
    """A prepared store of texts whose class is told by their words, or, shuffled, by nothing."""
    rng = random.Random(0)
    rows = []
    for i in range(400):
        label = ("no", "yes")[i % 2]
        mark = ("dull", "great")[(rng.random() < 0.5) if shuffled else i % 2]
        rows.append([f"{sentence(rng, 2, 8)} {mark} {sentence(rng, 2, 8)} {i}", label])
    path = write_csv(folder / "made.csv", ["text", "label"], rows)
    return prepare(load_file(path), tokenizer="train:300", max_length=32, cache=folder / "cache").folder


@dataclass
class Ended:
    """How a process ended: its exit code (minus the signal that killed it) and what it printed."""

    code: int
    text: str

    @property
    def message(self) -> str:
        """The last line, which is what a user reads."""
        return self.text.strip().splitlines()[-1]


class Running:
    """A run in its own process."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process, self.log = process, log
        self.pid: int = process.pid

    def wait_for(self, what: Callable[[], bool], limit: float = 60) -> None:
        """Until something is so, or the process has ended."""
        end = time.monotonic() + limit
        while not what() and self.process.is_alive():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.001)

    def send(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, number)

    def end(self) -> Ended:
        self.process.join(120)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"hangs: {self.log.read_text()}")
        return Ended(self.process.exitcode, self.log.read_text())


@dataclass(frozen=True)
class Strike:
    """A signal that a process gets at its n-th file operation on a path or below a function of ours, or at
    the n-th call of a function.

    Python reports these operations to audit hooks, and calls to profilers: nothing of ours is patched, and
    any moment between two of them can be chosen, which no clock could do.
    """

    number: int
    below: str = ""  # a function's qualified name
    path: str = ""  # a part of the path
    n: int = 1
    call: str = ""  # a function's qualified name

    def install(self) -> None:
        left = self.n

        def hook(event: str, details: tuple[Any, ...]) -> None:
            nonlocal left
            if event != "open" and not event.startswith(("os.re", "os.rm", "os.mk", "shutil.")):
                return
            if self.path not in str(details[0]) or not self._is_below(sys._getframe()):
                return
            left -= 1
            if left == 0:
                os.kill(os.getpid(), self.number)

        def profiler(frame: Any, event: str, _: Any) -> None:
            nonlocal left
            if event == "call" and frame.f_code.co_qualname == self.call:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), self.number)

        if self.call:
            sys.setprofile(profiler)
        else:
            sys.addaudithook(hook)

    def _is_below(self, frame: Any) -> bool:
        while frame is not None and self.below:
            if frame.f_code.co_qualname == self.below:
                return True
            frame = frame.f_back
        return not self.below


class Machine:
    """Starts runs of one store, and the fork server they come from."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.count = 0
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(PRELOAD)
        before = dict(os.environ)
        # One thread: a pool of them would not survive a fork, and other tests want the other core.
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def config(self, **training: Any) -> Path:
        values = merge(json.loads(json.dumps(RUN)), {"training": training})
        values["training"] = {key: value for key, value in values["training"].items() if value is not None}
        self.count += 1
        path = self.folder / f"{self.count}.toml"
        path.write_text(to_toml(values))
        return path

    def start(
        self, config: Path, out: Path, *more: str, store: Path | None = None, strike: Strike | None = None,
        threads: int = 1,
    ) -> Running:  # fmt: skip
        words = ["train", "--config", str(config), "--data", str(store or self.store), "--out", str(out)]
        self.count += 1
        log = self.folder / f"{self.count}.log"
        log.touch()
        process = self._forks.Process(target=_child, args=([*words, *more], str(log), strike, threads))
        process.start()
        return Running(process, log)

    def run(self, config: Path, out: Path, *more: str, **options: Any) -> Ended:
        return self.start(config, out, *more, **options).end()

    def finish(self, config: Path, out: Path) -> None:
        """Start a killed run again, unless its last breath was its results."""
        if not is_finished(out):
            ended = self.run(config, out)
            assert ended.code == 0, ended.text


def _child(words: list[str], log: str, strike: Strike | None, threads: int) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(handle, stream)
    import torch

    from oelm.cli.main import main

    torch.set_num_threads(threads)
    if strike is not None:
        strike.install()
    sys.argv = ["oelm", *words]
    main()


def outcome(folder: Path, checkpoints: bool = True) -> dict[str, Any]:
    """All that a finished run says and holds, times and memory aside: equal for equal runs."""
    assert not (half := list(folder.rglob(".*"))), f"left behind: {half}"
    results = json.loads((folder / "results.json").read_text())
    assert results["status"] == "completed"
    found: dict[str, Any] = {"results": _untimed(results)}
    found["metrics"] = [
        _untimed(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    path = folder / "checkpoints/index.json"
    index = json.loads(path.read_text()) if checkpoints and path.exists() else {}
    for name in index:
        checkpoint = folder / "checkpoints" / index[name]
        found[name] = {
            file: _digest(checkpoint / file) for file in ("model.safetensors", "optimizer.safetensors")
        }
        found[name]["state"] = _untimed(json.loads((checkpoint / "state.json").read_text()))
    found["index"] = index
    found["model"] = {p.name: _digest(p) for p in (folder / "model").iterdir()}
    with np.load(folder / "predictions.npz") as arrays:
        found["predictions"] = {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}
    found["audit"] = json.loads((folder / "freeze_audit.json").read_text())
    return found


def is_finished(folder: Path) -> bool:
    path = folder / "results.json"
    return path.exists() and json.loads(path.read_text())["status"] == "completed"


def kept(folder: Path) -> list[str]:
    """The checkpoints on disk."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())


def _untimed(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in TIMES}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
