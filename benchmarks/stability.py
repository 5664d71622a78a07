"""Whole runs of one method at several learning rates and seeds: does one fail, or leave the fast path?

    python benchmarks/stability.py --store prepared/imdb --seeds 1-8 --lrs 3e-4,1e-3 --jobs 6 \
        --json benchmarks/h200-stability.json

One seed is run once more with the fall-back forbidden: it must end, and with the same bits. A row for every
run: how it ended, whether it fell back, how far the fast path was from the plain one, its results, and a
digest of its predictions.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from oelm.config import MethodConfig, ModelConfig, RunConfig, TaskConfig, TrainingConfig
    from oelm.data import open_store
    from oelm.training.loop import train

    training = TrainingConfig(
        lr=job["lr"], seed=job["seed"], warmup=500, save_every=0, keep=1, fallback=job["fallback"],
        **({"steps": job["steps"]} if job["steps"] else {"epochs": 3}),
    )  # fmt: skip
    config = RunConfig(
        task=TaskConfig(data=job["store"]), model=ModelConfig(name=job["model"]),
        method=MethodConfig(name=job["method"]), training=training,
    )  # fmt: skip
    out = Path(job["out"])
    found = {key: job[key] for key in ("method", "lr", "seed", "fallback")}
    try:
        results = train(config, open_store(job["store"]), out, show=False)
    except Exception as error:
        return found | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    with np.load(out / "predictions.npz") as arrays:
        digest = hashlib.sha256(arrays["scores"].tobytes()).hexdigest()[:16]
    environment = json.loads((out / "environment.json").read_text())
    return found | {
        "status": results["status"],
        "steps": results["steps"],
        "plain_from": results["arithmetic"]["plain_from"],
        "watch": results["watch"],
        "best_step": results["best"]["step"],
        "validation": results["best"]["metrics"]["accuracy"],
        "test": results["test"]["metrics"]["accuracy"],
        "train_time_s": results["train_time_s"],
        "watch_time_s": results["watch_time_s"],
        "scores_sha256": digest,
        "arithmetic": results["arithmetic"],
        "environment": {
            k: environment[k] for k in ("commit", "packages", "cuda", "gpu", "cpu") if k in environment
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", required=True, help="a prepared classification dataset")
    parser.add_argument("--model", default="gpt-medium-512")
    parser.add_argument("--method", default="baseline")
    parser.add_argument("--seeds", default="1-8", help="first-last")
    parser.add_argument("--lrs", default="3e-4,1e-3")
    parser.add_argument("--again", type=int, default=7, help="the seed that is run again without fall-back")
    parser.add_argument("--steps", type=int, help="instead of 3 epochs")
    parser.add_argument("--jobs", type=int, default=6, help="runs side by side")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    cells = list(
        itertools.product(map(float, asked.lrs.split(",")), range(int(first), int(last or first) + 1))
    )
    jobs = [(lr, seed, True) for lr, seed in cells] + [(lr, s, False) for lr, s in cells if s == asked.again]
    os.environ.setdefault("OMP_NUM_THREADS", "2")

    from oelm.data import open_store
    from oelm.data.trivial_baselines import trivial_baselines

    trivial_baselines(open_store(asked.store))  # once: every run finds it in the cache
    with tempfile.TemporaryDirectory() as folder:
        described = [
            {
                "store": asked.store, "model": asked.model, "method": asked.method, "steps": asked.steps,
                "lr": lr, "seed": seed, "fallback": fallback, "out": f"{folder}/{n}",
            }
            for n, (lr, seed, fallback) in enumerate(jobs)
        ]  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
            rows = []
            for row in pool.imap_unordered(run, described):
                print(json.dumps({k: v for k, v in row.items() if k != "environment"}), flush=True)
                rows.append(row)
    rows.sort(key=lambda row: (row["lr"], row["seed"], not row["fallback"]))
    report(rows, asked.json)


def markdown(record: dict[str, Any]) -> str:
    """The record's table."""
    columns = (
        "lr",
        "seed",
        "fall-back",
        "status",
        "plain from",
        "loss deviation",
        "norm deviation",
        "test",
        "digest",
    )
    lines = [
        f"`{record['command']}`: whole runs, 3 epochs each. *Plain from* is the step from which a run took",
        "the plain path. Deviations are the largest of loss and gradient norm between the fast path and the",
        "plain one. *Test* is the accuracy in %. Equal digests are equal predictions, bit for bit.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in record["runs"]:
        start = f"| {row['lr']:g} | {row['seed']} | {'allowed' if row['fallback'] else 'forbidden'} "
        if row["status"] != "completed":
            lines.append(f"{start}| {row['status']}: {row['reason']} | | | | | |")
            continue
        apart = row["watch"]["largest_deviation"]
        lines.append(
            f"{start}| {row['status']} | {row['plain_from'] or 'never'} | {apart['loss']:.2g} | "
            f"{apart['grad_norm']:.2g} | {100 * row['test']:.2f} | `{row['scores_sha256']}` |"
        )
    return "\n".join(lines) + "\n"


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    environments = {json.dumps(row.pop("environment", None), sort_keys=True) for row in rows}
    if path:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "environments": [json.loads(text) for text in sorted(environments) if text != "null"],
            "runs": rows,
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(record))
    titles = ("lr", "seed", "fall-back", "status", "plain from", "checks", "loss, norm deviation", "test")
    print("{:>8} {:>4} {:>9} {:>10} {:>10} {:>6} {:>20} {:>8}".format(*titles))
    for row in rows:
        start = f"{row['lr']:8g} {row['seed']:4} {row['fallback']!s:>9} {row['status']:>10}"
        if row["status"] != "completed":
            print(start, row["reason"][:120])
            continue
        apart = row["watch"]["largest_deviation"]
        print(
            f"{start} {row['plain_from']!s:>10} {row['watch']['checks']:6} {apart.get('loss', 0):9.2g}, "
            f"{apart.get('grad_norm', 0):9.2g} {row['test']:8.4f} {row['scores_sha256']}"
        )


if __name__ == "__main__":
    main()
