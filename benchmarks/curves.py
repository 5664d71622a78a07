"""Do the fast paths learn the same? Runs with and without them, many seeds, one question.

    python benchmarks/curves.py --data sst2 [--model gpt-medium-512] [--steps 600] [--seeds 16] [--json FILE]

`oelm train` three times for every seed: with `training.fast=false`, with the fast paths, and with blocks
compiled as well, which short runs otherwise are not. The same seed gives the same start and the same batches.
At first the arms differ by rounding alone; training then magnifies it, as it would any other, until runs are
as far apart as those of two seeds. So two things are reported: how far apart the training losses of the first
steps are, beside two seeds of one arm, and whether the arms end at the same validation loss on average: the
mean difference to the plain arm, seed by seed, with its 95 % interval, beside the deviation between seeds.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from oelm.atomic import write_json
from oelm.training.folder import environment

ARMS = ("plain", "fast", "compiled")
EVALUATIONS = 6
FIRST = 50  # steps in which arms differ by little more than rounding

Curve = dict[str, Any]


def train(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> Curve:
    from oelm.cli import app
    from oelm.training import fast

    torch._dynamo.reset()  # a process takes several runs
    fast.COMPILE_FROM = 0 if arm == "compiled" else 10**15
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
    shutil.rmtree(run)
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


def final_loss(curve: Curve) -> float:
    return float(curve["validation_loss"][max(curve["validation_loss"])])


def apart(pairs: list[tuple[Curve, Curve]]) -> float:
    """The mean difference of two runs' training losses in the first steps."""
    return statistics.mean(
        abs(value - b["training_loss"][step])
        for a, b in pairs
        for step, value in a["training_loss"].items()
        if step <= FIRST
    )


def mean_difference(a: list[float], b: list[float]) -> dict[str, Any]:
    """a - b, pair by pair, with the 95 % interval of the mean."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return {"mean": statistics.mean(differences), "interval": [float(low), float(high)]}


def compared(curves: list[Curve], arms: list[str]) -> dict[str, Any]:
    """The arms, on the seeds that all of them have."""
    of = {(curve["arm"], curve["seed"]): curve for curve in curves}
    seeds = sorted({seed for _, seed in of if all((arm, seed) in of for arm in arms)})
    others = list(itertools.combinations([of["plain", seed] for seed in seeds], 2))
    found: dict[str, Any] = {"seeds": seeds, "first_steps_of_two_plain_seeds": apart(others), "arms": {}}
    measures: dict[str, Callable[[Curve], float]]
    measures = {"validation_loss": final_loss, "test_accuracy": lambda curve: float(curve["test_accuracy"])}
    for arm in arms:
        mine = [of[arm, seed] for seed in seeds]
        found["arms"][arm] = entry = {}
        for name, measure in measures.items():
            values = [measure(curve) for curve in mine]
            entry[name] = {"mean": statistics.mean(values), "deviation": statistics.stdev(values)}
            if arm != "plain":
                plain = [measure(of["plain", seed]) for seed in seeds]
                entry[name]["less_plain"] = mean_difference(values, plain)
        if arm != "plain":
            entry["first_steps_from_plain"] = apart([(of[arm, seed], of["plain", seed]) for seed in seeds])
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{len(found['seeds'])} seeds")
    between = found["first_steps_of_two_plain_seeds"]
    print(f"training loss, first {FIRST} steps: two plain seeds {between:.4f} apart")
    for arm, entry in found["arms"].items():
        if arm != "plain":
            print(f"  {arm} and plain, the same seed: {entry['first_steps_from_plain']:.4f}")
    for name in ("validation_loss", "test_accuracy"):
        print(f"{name.replace('_', ' ')} at the end")
        for arm, entry in found["arms"].items():
            values = entry[name]
            line = f"  {arm:9} {values['mean']:.4f}, deviation between seeds {values['deviation']:.4f}"
            if less := values.get("less_plain"):
                low, high = less["interval"]
                line += f"; less plain {less['mean']:+.4f} ({low:+.4f} to {high:+.4f})"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="what `oelm data prepare` made of a dataset")
    parser.add_argument("--model", default="gpt-medium-512")
    parser.add_argument("--method", default="oelm")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, help="plain must be among them")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("curves.json"))
    options = parser.parse_args()
    if "plain" not in options.arms:
        parser.error("--arms: the others are compared with plain, which must be among them")
    asked = {name: value for name, value in vars(options).items() if name not in ("data", "json", "arms")}
    command = ["python benchmarks/curves.py --data", options.data.name, "--arms", *options.arms]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {
        "what": "training with and without the fast paths, the same seeds",
        "command": " ".join(command + [f"--{name} {value}" for name, value in asked.items()]),
        "environment": environment(device, 1),
    }
    # Every run would otherwise take all cores for what little it does there, and wait for the others.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    curves: list[Curve] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        wanted = list(itertools.product(range(1, options.seeds + 1), reversed(options.arms)))
        jobs = [pool.submit(train, arm, seed, options, Path(folder)) for seed, arm in wanted]
        try:
            for job in as_completed(jobs):
                curves.append(job.result())
                curves.sort(key=lambda curve: (curve["seed"], ARMS.index(curve["arm"])))
                write_json(options.json, record | {"runs": curves})  # nothing is lost if it is stopped
                print(f"{len(curves)} of {len(jobs)} runs", file=sys.stderr)
        except BaseException:
            for worker in active_children():  # or they would train to the end first
                worker.kill()
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}: ...{log.read_text()[-1500:]}", file=sys.stderr)
            raise
    found = compared(curves, options.arms)
    write_json(options.json, record | {"compared": found, "runs": curves})
    show(found)


if __name__ == "__main__":
    main()
