"""How long a user waits: `oelm train` beside a plain script with Hugging Face's Trainer, command to result.

    python benchmarks/time_to_result.py --data prepared/imdb --json benchmarks/h200-time.json
    python benchmarks/time_to_result.py --data prepared/imdb --jobs 1,4,8,16 --leave-out train,trainer
    python benchmarks/time_to_result.py --data prepared/imdb --jobs auto --leave-out train,trainer \
      --lrs 3e-5,1e-4,3e-4,1e-3,3e-3 --runs 20      # a fair study: 30 trials, 10 measured runs of each method

Both train the same size on the same prepared token arrays for the same epochs, choose the best epoch on
validation and test it once (benchmarks/plain_trainer.py), each as a process of its own, timed from its start
until its results.json is written; one that takes longer than `--most` is stopped, and the record says so.
`cold`: no compiled kernel (an empty TRITON_CACHE_DIR) and no trivial baselines are there yet; `warm`: those
of the cold run are. Rounds of warm runs and of the Trainer's take turns. `--jobs`: a study, once for each
number of runs side by side (auto: the study's own choice); with `--out` its folder is kept.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "scikit-learn", "triton")


def timed(
    command: list[str], log: Path, env: dict[str, str], most: float | None = None
) -> tuple[float, float]:
    """Run a command: the time it started at, and the seconds until it ended. Its output goes to a file.
    subprocess.TimeoutExpired after `most` seconds."""
    began = time.time()
    with log.open("w") as file:
        options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": most}
        ended = subprocess.run(command, env=os.environ | env, **options)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return began, time.time() - began


def phases(began: float, marks: dict[str, float]) -> dict[str, float]:
    """Seconds of each part, of the times at which each was done."""
    times = [began, *marks.values()]
    return {name: round(b - a, 2) for name, (a, b) in zip(marks, itertools.pairwise(times), strict=True)}


def our_run(folder: Path, began: float) -> dict[str, Any]:
    """The parts of a run of ours, by its own records and the times at which they were written."""
    results = json.loads((folder / "results.json").read_text())
    written = {path.name: path.stat().st_mtime for path in folder.iterdir()}
    ready = written["environment.json"]
    steps, evaluations = results["train_time_s"], results["eval_time_s"]
    test = json.loads((folder / "timing_stats.json").read_text())["test_time_s"]
    marks = {
        "imports, data, model": written["config.toml"],
        "model on its device": ready,
        "steps": ready + steps,
        "evaluations": ready + steps + evaluations,
        "best state": written["freeze_audit.json"] - test,
        "test": written["freeze_audit.json"],
        "trivial baselines, waited for": written["predictions.npz"],
        "saving": written["results.json"],
    }
    found = {"seconds": round(written["results.json"] - began, 2), "phases": phases(began, marks)}
    return found | {"steps": results["steps"], "test_accuracy": results["test"]["metrics"]["accuracy"]}


def trainer_run(folder: Path, began: float) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text())
    last = (folder / "results.json").stat().st_mtime
    found = {"seconds": round(last - began, 2), "phases": phases(began, results["done"])}
    return found | {"steps": results["steps"], "test_accuracy": results["test_accuracy"]}


def run_arms(asked: argparse.Namespace, work: Path, record: dict[str, Any]) -> None:
    from oelm.models.gpt_sizes import SIZES

    layers, width, heads, _ = SIZES[asked.size]
    data, env = work / "data", {"TRITON_CACHE_DIR": str(work / "triton")}
    epochs = ["--epochs", str(asked.epochs), "--set", "training.eval_every=0"]  # as the Trainer's script
    oelm = [sys.executable, "-m", "oelm", "train", "--data", str(data), "--model", asked.size]
    trainer = [sys.executable, str(ROOT / "benchmarks" / "plain_trainer.py"), str(data)]
    size = [f"--layers={layers}", f"--width={width}", f"--heads={heads}"]
    arms: dict[str, tuple[list[str], Callable[[Path, float], dict[str, Any]]]] = {
        "cold": ([*oelm, *epochs, "--out", "OUT"], our_run),
        "warm": ([*oelm, *epochs, "--out", "OUT"], our_run),
        "trainer": ([*trainer, "OUT", *size, *epochs[:2]], trainer_run),
    }
    left_out = {"cold", "warm"} if "train" in asked.leave_out else set()
    peers = asked.rounds if asked.trainer_rounds is None else asked.trainer_rounds
    rounds = ["cold"]
    for number in range(max(asked.rounds, peers)):
        rounds += ["warm"] * (number < asked.rounds) + ["trainer"] * (number < peers)
    for number, arm in enumerate(rounds):
        if arm in left_out or arm in asked.leave_out:
            continue
        out = work / f"{number}-{arm}"
        command, read = arms[arm]
        command = [str(out) if word == "OUT" else word for word in command]
        words = [word.replace(str(work), "WORK").replace(sys.executable, "python") for word in command]
        words = [word.replace(f"{ROOT}/", "") for word in words]
        row: dict[str, Any] = {"arm": arm, "command": " ".join(words)}
        try:
            began, _ = timed(command, work / f"{number}.log", env, asked.most)
            row |= read(out, began)
        except subprocess.TimeoutExpired:
            row |= {"seconds": asked.most, "phases": {}, "stopped": True}
        record["runs"].append(row)
        print(f"{arm}: {row['seconds']} s {row['phases']}", flush=True)
        save(asked, record)


def run_studies(asked: argparse.Namespace, work: Path, record: dict[str, Any]) -> None:
    data, env = work / "data", {"TRITON_CACHE_DIR": str(work / "triton")}
    seeds = asked.runs // len(asked.methods.split(","))
    for jobs in asked.jobs:
        out = (asked.out or work) / f"study-{jobs}"
        command = [sys.executable, "-m", "oelm", "study", "--data", str(data), "--model", asked.size]
        command += ["--methods", asked.methods, "--lrs", asked.lrs, "--seeds", str(seeds)]
        # Exactly so many runs, whatever the results: no near-ties, no wider grid. An evaluation an epoch.
        keys = ["study.measure=best", "study.widen=0", "training.eval_every=0", "training.batch_size=16"]
        keys += [] if jobs == "auto" else [f"study.jobs={jobs}"]
        command += ["--epochs", str(asked.epochs), *(word for key in keys for word in ("--set", key))]
        _, seconds = timed([*command, "--out", str(out)], work / f"study-{jobs}.log", env)
        made = len([*out.glob("runs/*/*/*/results.json")])
        row = {
            "jobs": jobs,
            "methods": asked.methods,
            "lrs": asked.lrs,
            "runs": made,
            "seconds": round(seconds, 1),
            "per_run_s": round(seconds / made, 2),
        }
        record["studies"].append(row)
        print(row, flush=True)
        save(asked, record)


def save(asked: argparse.Namespace, record: dict[str, Any]) -> None:
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


def about() -> dict[str, Any]:
    """Hardware, versions and commit, as a run's environment.json has them."""
    import torch

    from oelm.training.folder import environment
    from oelm.training.parallel import process_state

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found = environment(process_state().device, 1)
    keys = ("oelm", "numerics", "commit", "cpu", "gpu", "cuda")
    about = {key: found[key] for key in keys if key in found}
    return about | {
        "python": platform.python_version(),
        "packages": versions,
        "cpus": torch.get_num_threads(),
    }


def table(record: dict[str, Any]) -> str:
    rows = ["", "| | runs | command to result, s | of it |", "|---|---|---|---|"]
    seconds: dict[str, list[float]] = {}
    for run in record["runs"]:
        seconds.setdefault(run["arm"], []).append(run["seconds"])
    stopped = {run["arm"] for run in record["runs"] if run.get("stopped")}
    for arm, taken in seconds.items():
        of_arm = [run["phases"] for run in record["runs"] if run["arm"] == arm and run["phases"]] or [{}]
        middle = {name: statistics.median(one[name] for one in of_arm) for name in of_arm[0]}
        parts = ", ".join(f"{name} {value:.1f}" for name, value in middle.items())
        more = "more than " if arm in stopped else ""
        rows.append(f"| {arm} | {len(taken)} | {more}{statistics.median(taken):.1f} | {parts} |")
    if {"trainer", "warm"} <= seconds.keys():
        ratio = statistics.median(seconds["trainer"]) / statistics.median(seconds["warm"])
        more = "more than " if "trainer" in stopped else ""
        rows.append(f"\nThe Trainer takes {more}{ratio:.1f} times as long as `oelm train` does warm.")
    if record["studies"]:
        rows += ["", "| side by side | runs | study, s | s a run |", "|---|---|---|---|"]
        rows += ["| {jobs} | {runs} | {seconds} | {per_run_s} |".format(**row) for row in record["studies"]]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a prepared classification dataset")
    parser.add_argument("--size", default="gpt-medium-512")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of a warm run and a Trainer's")
    parser.add_argument("--trainer-rounds", type=int, help="of the Trainer's, where they are others")
    parser.add_argument("--most", type=float, help="seconds after which a command is stopped")
    parser.add_argument("--leave-out", default="", help="of train, trainer, cold, warm; by commas")
    parser.add_argument("--jobs", default="", help="runs side by side of a study, by commas; default: none")
    parser.add_argument("--runs", type=int, default=16, help="measured runs of a study")
    parser.add_argument("--methods", default="baseline,oelm", help="of a study")
    parser.add_argument("--lrs", default="3e-4", help="of a study; of several, three trials each come first")
    parser.add_argument("--out", type=Path, help="keep the studies in this folder")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.jobs = [word if word == "auto" else int(word) for word in asked.jobs.split(",") if word]
    asked.leave_out = set(asked.leave_out.split(","))
    command = " ".join(["python benchmarks/time_to_result.py", *sys.argv[1:]]).replace(
        f"{asked.data}", "DATA"
    )
    record: dict[str, Any] = {"command": command, "about": about(), "runs": [], "studies": []}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # A copy: without the trivial baselines that an earlier run has left beside the data.
        shutil.copytree(asked.data, work / "data", ignore=shutil.ignore_patterns("references.json"))
        run_arms(asked, work, record)
        run_studies(asked, work, record)
    save(asked, record)
    print(table(record))


if __name__ == "__main__":
    main()
