"""Runs in several processes, as torchrun starts them: their data, configuration and what they logged."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from oelm.data import Choice, Store
from oelm.data.writer import copy_store

HERE = Path(__file__).parent
GOOD, BAD = ["fine", "lovely", "great", "bright"], ["dull", "poor", "weak", "grey"]

# Trained, frozen with a polar factor, unfrozen layer by layer: DDP must wrap the model at every stage.
STAGES = {"freeze_at": 3, "polar": True, "unfreeze_at": [6, 9], "order": "top-down", "warmup": 2}
SCHEDULE = {"method": {"name": "top-1", "freeze_schedule": STAGES}}


def rows(n: int) -> str:
    """Texts of very unequal length whose label is in their words."""
    draw = random.Random(0)
    lines = ["text,label"]
    for i in range(n):
        words = [draw.choice(GOOD if i % 2 else BAD) for _ in range(draw.choice([1, 2, 5, 30]))]
        lines.append(f"{' '.join(words)} {i},{'pos' if i % 2 else 'neg'}")
    return "\n".join(lines)


def make_store(root: Path) -> Store:
    """Such texts, prepared as `root/store`."""
    (root / "texts.csv").write_text(rows(240))
    choice = Choice(str(root / "texts.csv"), tokenizer="train:300", max_length=64)
    return copy_store(choice.store(cache=root / "cache"), root / "store")


def config(**training: Any) -> dict[str, Any]:
    fields = {
        "lr": 1e-3,
        "steps": 12,
        "batch_size": 12,
        "eval_every": 6,
        "save_every": 6,
        "log_every": 1,
        "seed": 1,
    }
    return {
        "task": {"data": "store", "max_length": 64},
        "model": {"name": "gpt-tiny"},
        "method": {"name": "oelm"},
        "training": fields | training,
    }


def launch(processes: int, script: str, *words: Any, fault: str = "", nodes: int = 1) -> None:
    """Run a script of this folder in so many processes on each of so many nodes, all of them this machine. It
    must fail with a `fault`, and only then."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "PYTHONPATH": str(HERE.parents[1] / "src"),
    } | ({"FAULT": fault} if fault else {})
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    place = [["--standalone", "--master-port", "0"]]
    if nodes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
        place = [["--nnodes", str(nodes), "--node-rank", str(n), *address] for n in range(nodes)]
    started = [
        subprocess.Popen(
            [*start, *here, str(HERE / script), *map(str, words)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for here in place
    ]
    try:
        for process in started:
            said = process.communicate(timeout=300)[1]
            assert (process.returncode != 0) == bool(fault), said[:6000]
    finally:
        for process in started:
            process.kill()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]
