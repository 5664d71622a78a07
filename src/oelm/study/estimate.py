"""Estimate how long a study takes, by timing some real training steps and a part of an evaluation.

`python -m oelm.study.estimate` is the process that measures. As many are started as the study trains runs
side by side, each in the environment of a worker. They measure at the same time, as runs slow one another
down.
"""

import hashlib
import heapq
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from oelm.config import rebuild_config
from oelm.data import open_store
from oelm.models.build import build_model
from oelm.study.folder import Setting
from oelm.system.files import cache_dir, read_object, write_json
from oelm.system.plugins import load_plugins
from oelm.system.terminal import reserve_stdout
from oelm.training.evaluate import evaluate
from oelm.training.parallel import deterministic_mode, process_state
from oelm.training.resolve import ResolvedRun, objective_of, resolve_run
from oelm.training.step import make_step

WARM, TIMED = 2.0, 3.0  # seconds of warm-up steps, which allocate memory and record graphs; of timed steps
CACHED = 86_400.0  # seconds for which a measurement is used again
TIMEOUT = 600.0  # seconds for all processes to measure


@dataclass(frozen=True)
class Pace:
    """Seconds for each part of a run, with other runs beside it."""

    start: float  # starting a process: imports
    setup: float  # loading a run's data, building its model
    warming: float  # extra time of the first steps
    step: float
    evaluation: float  # of the split that choices are made on
    test: float

    def run(self, steps: int, evaluations: int, tested: bool) -> float:
        """Seconds of a run in a process that has started. Restoring, checking and writing the best weights at
        the end takes about as long as the setup, which therefore counts twice."""
        beside = 2 * self.setup + self.warming
        return beside + steps * self.step + evaluations * self.evaluation + tested * self.test


def evaluations(run: ResolvedRun) -> int:
    """How often a run is evaluated: every `eval_every` steps or every epoch, and at its end."""
    return -(-run.total_steps // (run.eval_every or len(run.plan.epoch(0))))


def makespan(phases: list[list[tuple[int, float]]], places: int) -> float:
    """Seconds until all runs are done, each started as soon as one of the `places` is free. `phases`: for
    every task a list of (runs, seconds of one run); a phase starts when the one before has ended."""
    free = [0.0] * places
    waiting = [(0.0, task, 0) for task, of_task in enumerate(phases) if of_task]
    end = 0.0
    while waiting:
        due, task, phase = heapq.heappop(waiting)
        runs, seconds = phases[task][phase]
        ends = due
        for _ in range(runs):
            ended = max(heapq.heappop(free), due) + seconds
            heapq.heappush(free, ended)
            ends = max(ends, ended)
        end = max(end, ends)
        if phase + 1 < len(phases[task]):
            heapq.heappush(waiting, (ends, task, phase + 1))
    return end


def measure_pace(setting: Setting, environments: list[dict[str, str]]) -> Pace | None:
    """Time a run of this setting here, with one process in each of these environments; None if a process
    fails or takes too long. A measurement is cached for a day."""
    config = setting.run_config(setting.any_cell)
    job = json.dumps({"config": config.to_dict(), "store": str(setting.store.folder)})
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY")
    relevant = [
        [name in env and (name.endswith("DIRECTORY") or env[name]) for name in names] for env in environments
    ]
    key = hashlib.sha256(json.dumps([setting.key, sys.version, job, relevant]).encode()).hexdigest()
    cached = cache_dir() / "timings" / f"{key[:32]}.json"
    with suppress(Exception):  # a cache file that cannot be read is measured again
        if time.time() - cached.stat().st_mtime < CACHED:
            return Pace(**read_object(cached))
    try:
        pace = _measure_together(job, environments)
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, asdict(pace))
    return pace


def _measure_together(job: str, environments: list[dict[str, str]]) -> Pace:
    began, pipe = time.monotonic(), subprocess.PIPE
    command = [sys.executable, "-m", "oelm.study.estimate"]
    processes = [
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env, text=True,
            start_new_session=True,  # as workers have: Linux divides busy cores among sessions
        )
        for env in environments
    ]  # fmt: skip
    timeout = threading.Timer(TIMEOUT, _kill, [processes])
    timeout.start()
    try:
        _send_line(processes, job)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # "ready": its model is built
        start = time.monotonic() - began
        _send_line(processes, "go")
        paces = [json.loads(process.communicate()[0]) for process in processes]
    finally:
        timeout.cancel()
        _kill(processes)
        for process in processes:
            with process:  # close its pipes
                pass
    pace = {name: fmean(pace[name] for pace in paces) for name in paces[0]}
    return Pace(start=max(0.0, start - pace["setup"]), **pace)


def _kill(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        process.kill()


def _send_line(processes: "list[subprocess.Popen[str]]", line: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


class _TimedEnough(Exception):
    """Raised to end an evaluation early: the part that was timed gives the time of all of it."""


def _evaluation(step: Any, objective: Any, split: str, wait: Callable[[], float]) -> float:
    """Seconds of an evaluation. A long one is extrapolated from its first batches, as all have the same
    size."""
    began, seconds = wait(), 0.0

    def extrapolate(done: int, total: int) -> None:
        nonlocal seconds
        if done > 0 and (taken := wait() - began) > TIMED:
            seconds = taken * total / done
            raise _TimedEnough

    step.sync()
    with suppress(_TimedEnough):
        evaluate(step.model, objective, split, step.autocast, step.layout, extrapolate)
    return seconds or wait() - began


def main() -> None:
    """Measure one job from standard input: build the model, answer "ready", wait for "go", time the steps."""
    job, answers = json.loads(sys.stdin.readline()), reserve_stdout()
    state = process_state()
    started = time.monotonic()
    config, store = rebuild_config(job["config"]), open_store(job["store"])
    load_plugins(config.plugins)
    objective = objective_of(config, store)
    run = resolve_run(config, objective, state.device)
    with deterministic_mode(config.training.deterministic, state.device):
        step = make_step(run, objective, build_model(run.config, store)[0], state)
        setup = time.monotonic() - started
        print("ready", file=answers, flush=True)
        sys.stdin.readline()

        def wait() -> float:
            if state.device.type == "cuda":
                torch.cuda.synchronize()
            return time.monotonic()

        def steps(first: int, seconds: float) -> tuple[int, float]:
            """Take training steps for so many seconds; returns the next step's number and seconds per
            token."""
            began, tokens, number = wait(), 0, first
            for _, k, batches in run.plan.schedule(first):
                if number - first >= 2 and time.monotonic() - began > seconds:
                    break
                tokens += step.take(number, batches, k)[2]
                number += 1
            return number, (wait() - began) / tokens

        step.model.train()
        warm_began = wait()
        warm, _ = steps(0, WARM)
        warm_s = wait() - warm_began
        _, per_token = steps(warm, TIMED)
        pace = {"setup": setup, "step": per_token * run.plan.mean_tokens}
        pace["warming"] = max(0.0, warm_s - warm * pace["step"])
        split = "test" if config.training.choose_on == "test" else "validation"
        pace["evaluation"] = _evaluation(step, objective, split, wait)
    sizes = {name: float(objective.plan(name, 1, None, None).lengths.sum()) for name in (split, "test")}
    pace["test"] = pace["evaluation"] * sizes["test"] / sizes[split]
    print(json.dumps(pace), file=answers, flush=True)


if __name__ == "__main__":
    main()
