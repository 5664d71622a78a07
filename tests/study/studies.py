"""Small real studies of the command line, and what two equal ones must share."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.made import sentence, write_csv
from tests.training.runs import TIMES

RECIPE = [
    "--text", "body", "--label", "topic", "--tokenizer", "train:300", "--max-length", "32",
    "--batch-size", "8",
    "--set", "training.log_every=1", "--set", "training.save_every=4", "--set", "training.eval_every=6",
]  # fmt: skip
MATRIX = ["--methods", "baseline,oelm", "--lrs", "1e-3,3e-3", "--steps", "12", "--set", "study.widen=0",
          "--set", "study.choose_seeds=1"]  # fmt: skip


def make_file(folder: Path) -> Path:
    """Texts whose class is told by their words."""
    rng = random.Random(0)
    rows = []
    for i in range(240):
        mark = ("dull", "great")[i % 2]
        rows.append([f"{sentence(rng, 2, 8)} {mark} {sentence(rng, 2, 8)} {i}", ("no", "yes")[i % 2]])
    return write_csv(folder / "made.csv", ["body", "topic"], rows)


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "OELM_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}


HASTY = """
from oelm.cli.main import main
from oelm.study import scheduler
scheduler.PAUSES, scheduler.DISK_PAUSES = (0.5,) * 3, (0.5,) * 5
main()
"""


def start(
    data: Path,
    out: Path,
    *more: str,
    hasty: bool = False,
    cwd: Path | None = None,
    source: Path | None = None,
) -> "subprocess.Popen[str]":
    """The command line in a process of its own; `hasty`: it waits less before it tries a run again; `source`:
    the folder that its package lies in."""
    words = ["study", "--data", str(data), *RECIPE, *MATRIX, *more, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, *(["-c", HASTY] if hasty else ["-m", "oelm"]), *words],
        env=environment(data.parent / "cache") | ({"PYTHONPATH": str(source)} if source else {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
    )  # fmt: skip


def run(data: Path, out: Path, *more: str, cwd: Path | None = None) -> tuple[int, str]:
    process = start(data, out, *more, cwd=cwd)
    text, _ = process.communicate(timeout=900)
    return process.returncode, text


def records(out: Path) -> dict[str, dict[str, Any]]:
    """Every run of a study, times and memory aside: equal for equal studies."""
    found = {}
    for path in sorted((out / "runs").rglob("config.toml")):
        folder = path.parent
        results = json.loads((folder / "results.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        record: dict[str, Any] = {
            "files": sorted(p.name for p in folder.iterdir()),
            "config": path.read_text(),
            "results": {k: v for k, v in results.items() if k not in TIMES},
            "metrics": [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines],
            "audit": json.loads((folder / "freeze_audit.json").read_text()),
        }
        if (folder / "predictions.npz").exists():
            with np.load(folder / "predictions.npz") as arrays:
                record["predictions"] = {name: array.tobytes() for name, array in arrays.items()}
        if (folder / "model").exists():
            record["model"] = (folder / "model" / "model.safetensors").read_bytes()
        found[str(folder.relative_to(out))] = record
    return found


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def wait_for_progress(process: "subprocess.Popen[str]", out: Path, extra: float) -> bool:
    """Until this process has made steps of its own; False where it ended before."""

    def size() -> int:
        """Bytes of all logs; a run's folder may vanish while it is looked at."""
        with contextlib.suppress(FileNotFoundError):
            return sum(p.stat().st_size for p in out.rglob("metrics.jsonl"))
        return -1

    before, began = size(), time.time()
    while process.poll() is None:
        fresh = False
        with contextlib.suppress(FileNotFoundError):
            fresh = any(p.stat().st_mtime > began for p in out.rglob("metrics.jsonl"))
        if fresh and size() != before:
            time.sleep(extra)
            return process.poll() is None
        time.sleep(0.02)
    return False
