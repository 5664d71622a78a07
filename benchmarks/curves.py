"""Do the fast paths learn the same? Runs with and without them, several seeds, one question.

    python benchmarks/curves.py --data imdb [--model gpt-medium-512] [--steps 600] [--json FILE]

`oelm train` three times for every seed: with `training.fast=false`, with the fast paths, and with blocks
compiled as well, which short runs otherwise are not. The same seed gives the same start and the same batches,
so what is left between the arms is rounding. It is compared with what lies between seeds: of validation
losses at the same step, the mean difference between two arms of one seed, and between two plain seeds.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from oelm.atomic import write_json
from oelm.training.folder import environment

ARMS = ("plain", "fast", "compiled")
EVALUATIONS = 6

Curve = dict[str, Any]


def train(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> Curve:
    from oelm.cli import app
    from oelm.training import fast

    if arm == "compiled":
        fast.COMPILE_FROM = 0
    run = folder / f"{arm}-{seed}"
    settings = {"fast": str(arm != "plain").lower(), "eval_every": options.steps // EVALUATIONS}
    words = ["train", "--data", str(options.data), "--model", options.model, "--method", options.method]
    words += ["--lr", str(options.lr), "--seed", str(seed), "--steps", str(options.steps), "--out", str(run)]
    words += [word for key, value in settings.items() for word in ("--set", f"training.{key}={value}")]
    with open(folder / f"{arm}-{seed}.log", "w") as log:
        sys.stdout = sys.stderr = log
        app(words, standalone_mode=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((run / "results.json").read_text())
    return {
        "arm": arm,
        "seed": seed,
        "paths": results["paths"],
        "training_loss": {line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
        "validation_loss": {
            line["step"]: line["metrics"]["loss"] for line in lines if line["kind"] == "eval"
        },
        "test_accuracy": results["test"]["metrics"]["accuracy"],
    }


def between(pairs: list[tuple[Curve, Curve]]) -> dict[str, float]:
    """Mean differences over pairs of runs: of validation losses at the same step, and of test accuracies."""
    losses = [
        abs(value - b["validation_loss"][step])
        for a, b in pairs
        for step, value in a["validation_loss"].items()
    ]
    accuracies = [abs(a["test_accuracy"] - b["test_accuracy"]) for a, b in pairs]
    return {"validation_loss": statistics.mean(losses), "test_accuracy": statistics.mean(accuracies)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="what `oelm data prepare` made of a dataset")
    parser.add_argument("--model", default="gpt-medium-512")
    parser.add_argument("--method", default="oelm")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=9, help="runs at a time")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("curves.json"))
    options = parser.parse_args()
    seeds, spawn = range(1, options.seeds + 1), get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, spawn, max_tasks_per_child=1) as pool,
    ):
        wanted = itertools.product(reversed(ARMS), seeds)
        jobs = [pool.submit(train, arm, seed, options, Path(folder)) for arm, seed in wanted]
        curves = []
        try:
            for job in as_completed(jobs):
                curves.append(job.result())
                done, arm, seed = len(curves), curves[-1]["arm"], curves[-1]["seed"]
                print(f"{done} of {len(jobs)} runs: {arm}, seed {seed}", file=sys.stderr)
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}: ...{log.read_text()[-1500:]}", file=sys.stderr)
            raise
    curves.sort(key=lambda curve: (ARMS.index(curve["arm"]), curve["seed"]))
    of = {(curve["arm"], curve["seed"]): curve for curve in curves}
    found = {
        f"{arm} and plain, same seed": between([(of[arm, seed], of["plain", seed]) for seed in seeds])
        for arm in ARMS[1:]
    }
    others = [(of["plain", a], of["plain", b]) for a, b in itertools.combinations(seeds, 2)]
    found["plain and plain, another seed"] = between(others)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {
        "what": "validation losses and test accuracies with and without the fast paths",
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device, 1),
        "mean_differences": found,
        "runs": curves,
    }
    write_json(options.json, record)
    for name, values in found.items():
        loss, accuracy = values["validation_loss"], 100 * values["test_accuracy"]
        print(f"{name:32} validation loss {loss:.4f}   test accuracy {accuracy:.2f} points")
    for curve in curves:
        print(f"{curve['arm']:9} seed {curve['seed']}  test accuracy {100 * curve['test_accuracy']:.2f} %")


if __name__ == "__main__":
    main()
