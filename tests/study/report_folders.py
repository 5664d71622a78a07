"""Folders of records to report on: a real run's record, copied with other methods, tasks, rates and seeds."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from oelm.config import read_toml, to_toml
from oelm.study.records import find_records
from oelm.system.files import write_json, write_text

REAL = next((Path(__file__).parents[2] / "results/imdb-one-rate/runs/imdb/oelm").glob("measured-*-s1-*"))
LRS = (1e-4, 3e-4, 1e-3, 3e-3)


def copy_run(
    folder: Path, method: str, task: str, lr: float, seed: int, score: float, *, test: bool = True,
    metric: str = "accuracy", items: int = 0, results: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """The real run's record under another name, with this score on validation and test."""
    folder.mkdir(parents=True)
    config = read_toml(REAL / "config.toml")
    config["task"] = {"name": task, "max_length": 512, "tokenizer": "gpt2"}
    config["method"] = {"name": method}
    config["training"] |= {"lr": lr, "seed": seed, "test": test}
    write_text(folder / "config.toml", to_toml(config))
    for name in ("timing_stats.json", "freeze_audit.json"):
        (folder / name).write_bytes((REAL / name).read_bytes())
    environment = json.loads((REAL / "environment.json").read_text())
    write_json(folder / "environment.json", environment | {"data": f"data of {task}", "numerics": 1})
    if items and metric == "accuracy":
        score = round(score * items) / items
    metrics = {metric: score, "loss": 0.5}
    if metric == "perplexity":
        metrics["bits_per_byte"] = float(np.log2(score) * 0.24)
    record = json.loads((REAL / "results.json").read_text()) | {
        "task": task, "method": method, "lr": lr, "seed": seed, "metric": metric,
        "best": {"step": 30, "epoch": 3.0, "split": "validation", "metrics": metrics},
        "test": {"split": "test", "step": 30, "metrics": metrics} if test else None,
    }  # fmt: skip
    if metric == "perplexity":
        unigram = {"perplexity": 40.0, "bits_per_byte": float(np.log2(40) * 0.24)}
        record["references"] = {"unigram": {"validation": unigram, "test": unigram}}
    write_json(folder / "results.json", record | (results or {}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n")
            if step % 10 == 0:
                here = score * (1 + (30 - step) / 100 * (1 if metric == "perplexity" else -1))
                line = {"kind": "eval", "step": step, "epoch": step / 10, "split": "validation"}
                file.write(json.dumps(line | {"metrics": metrics | {metric: here}}) + "\n")
    if test and not items:  # every item has the run's score: only seeds vary
        scores = np.full(20, score)
        by_item = (
            {"scores": np.log(scores), "tokens": np.ones(20)} if metric == "perplexity" else {metric: scores}
        )
        np.savez(folder / "predictions.npz", ids=np.arange(20), **by_item)
    if items and test:
        rng = np.random.default_rng([crc32(method.encode()), seed])
        labels = np.random.default_rng(0).integers(2, size=items)  # the same in all runs
        right = rng.permutation(items) < round(score * items)
        np.savez(
            folder / "predictions.npz", ids=np.arange(items), labels=labels,
            predictions=np.where(right, labels, 1 - labels),
        )  # fmt: skip


def score_of(method: str, task: str, lr: float, seed: int, metric: str) -> float:
    """A plausible score: rates matter, methods differ by a little, seeds by less."""
    noise = np.random.default_rng([len(method), len(task), seed, round(lr * 1e6)]).normal()
    gain = 0.6 if method == "oelm" else 0.0
    points = 85 + gain - 4 * abs(np.log10(lr / 3e-4)) + 0.3 * noise
    return float(points / 100) if metric == "accuracy" else float(30 * (1 + (85 - points) / 50))


def make_study(
    out: Path, methods: Sequence[str] = ("baseline", "oelm"), tasks: Sequence[str] = ("imdb",),
    lrs: Sequence[float] = LRS, seeds: int = 5, metric: str = "accuracy", items: int = 0, title: str = "",
) -> Path:  # fmt: skip
    """A whole study's folder, every method best at 3e-4."""
    values = {
        "title": title,
        "study": {
            "tasks": list(tasks),
            "methods": list(methods),
            "lrs": list(lrs),
            "seeds": seeds,
            "choose_seeds": 1,
        },
        "model": {"name": "gpt-medium-512"},
    }
    write_toml = to_toml(values)
    for place, (task, method) in enumerate(product(tasks, methods)):
        runs = [(lr, 1001, False) for lr in lrs] + [(3e-4, seed, True) for seed in range(1, seeds + 1)]
        for lr, seed, test in runs:
            score = score_of(method, task, lr, seed, metric)
            folder = out / "runs" / str(place) / f"{'measured' if test else 'choice'}-lr{lr:g}-s{seed}"
            copy_run(folder, method, task, lr, seed, score, test=test, metric=metric, items=items)
    write_text(out / "study.toml", write_toml)
    settle(out)
    return out


def settle(out: Path) -> None:
    """Let every record in the folder belong to its study."""
    made = sorted({record.identity.setting for record in find_records(out / "runs")})
    write_json(out / "study.json", {"made": made, "imported": []})
