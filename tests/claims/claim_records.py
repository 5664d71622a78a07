"""Made-up records of runs whose truth is known, for judging claims on."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oelm.claims.data import read_claims
from oelm.claims.speed import Benchmark
from oelm.claims.verdicts import Verdict, judge
from oelm.config import rebuild_config
from oelm.data.catalogue import TASKS
from oelm.study.analysis import analyse_records
from oelm.study.design import Study, make_study
from oelm.study.records import Record, identify
from oelm.study.result_types import Analysis

MEDIUM, BERT, NOWHERE = "gpt-medium-512", "bert-base-uncased", Path("nowhere")
UNRECORDED, ONE_GROUP = Path("without predictions"), Path("of one document")
QK = {MEDIUM: (44_896_768, 3_145_728), BERT: (109_484_547, 14_174_208), "gpt-tiny": (1_510_146, 65_536)}
FROZEN = ("oelm", "oelm-random", "oelm-gaussian", "oelm-global")
WIGGLE = (0.3, -0.4, 0.1, -0.2, 0.2, -0.1, 0.4, -0.3, 0.2, -0.2)  # how seeds differ, in points or per cent
GRID = [3e-5, 1e-4, 3e-4, 1e-3, 3e-3]


class MadeRecord(Record):
    """A record without a folder, all of whose test items have the score of the run: only seeds vary."""

    def predictions(self) -> dict[str, np.ndarray] | None:
        if self.folder == UNRECORDED or self.test is None:
            return None
        ids, score = np.arange(20), np.full(20, self.test)
        shared = {"ids": ids, "groups": ids * (self.folder != ONE_GROUP)}
        if self.metric == "perplexity":
            return {**shared, "scores": np.log(score), "tokens": np.ones(20)}
        return {**shared, self.metric: score}


def run(
    method: str, seed: int, value: float | None, *, task: str = "imdb", model: str = MEDIUM, lr: float = 3e-4,
    validation: float | None = None, folder: Path = NOWHERE, data: str | None = None,
    results: dict[str, Any] | None = None, environment: dict[str, Any] | None = None, **training: Any,
) -> Record:  # fmt: skip
    """A record: measured with this test value, or, without one, a trial of a rate."""
    config = rebuild_config({
        "task": {"data": data} if data else {"name": task}, "model": {"name": model},
        "method": {"name": method},
        "training": {"lr": lr, "seed": seed, "test": value is not None, **training},
    })  # fmt: skip
    lm = task in TASKS and TASKS[task].kind == "lm"
    metric = "perplexity" if lm else "accuracy"
    total, qk = QK.get(Path(model).name, (1000, 100))
    frozen = qk if method in FROZEN else 0
    best = validation if validation is not None else value
    whole = {
        "status": "completed", "task": task, "model": model, "metric": metric, "precision": "fp32",
        "parameters": {"total": total, "trainable": total - frozen, "frozen": frozen},
        "best": {"split": "validation", "metrics": {metric: best}},
        "test": None if value is None else {"metrics": {metric: value}},
        **(results or {}),
    }  # fmt: skip
    return MadeRecord(
        folder, config, whole, environment or {"cpu": "one"}, identify(config, task, "fp32", 1)
    )  # fmt: skip


def pairs(
    gain: float, *, task: str = "imdb", n: int = 5, spread: float = 1.0, method: str = "oelm",
    reference: str = "baseline", base: float | None = None, only: bool = False, **more: Any,
) -> list[Record]:  # fmt: skip
    """n pairs of runs: accuracy better by `gain` points, or perplexity worse by `-gain` per cent."""
    lm = TASKS[task].kind == "lm"
    found = []
    for seed in range(1, n + 1):
        there = (base or (30.0 if lm else 0.8)) * (1 + 0.002 * WIGGLE[(8 - seed) % 8])
        change = gain + spread * WIGGLE[seed - 1]
        here = there * (1 - change / 100) if lm else there + change / 100
        found.append(run(method, seed, here, task=task, **more))
        if not only:
            found.append(run(reference, seed, there, task=task, **more))
    return found


def rates_study(choices: int, grid: list[float] = GRID) -> Study:
    table = {"lrs": grid, "choose_seeds": choices, "widen": 0, "seeds": 5}
    return make_study({"study": table, "task": {"name": "imdb"}, "model": {"name": MEDIUM}})


def trials(
    best: dict[str, dict[int, float]], grid: list[float] = GRID, task: str = "imdb", **more: Any
) -> list[Record]:
    """Trials whose best rate is the given one, for each method and each seed of the choice."""
    return [
        run(method, 1000 + seed, None, lr=lr, task=task, validation=0.8 - 0.01 * (lr != rate), **more)
        for method, seeds in best.items()
        for seed, rate in seeds.items()
        for lr in grid
    ]


def trial_of(record: Record, lr: float, seed: int, best: float) -> Record:
    """A trial of a measured run's arm, best at one learning rate."""
    config = replace(record.config, training=replace(record.config.training, lr=lr, seed=seed, test=False))
    loss = 0.01 * (lr != best)
    score = 0.8 - loss if record.larger_is_better else 30 * (1 + loss)
    results = {k: v for k, v in record.results.items() if k != "at_chance"} | {"status": "completed"}
    results |= {"test": None, "best": {"split": "validation", "metrics": {record.metric: score}}}
    return MadeRecord(
        record.folder, config, results, record.environment, identify(config, record.task, "fp32", 1)
    )


def tuned(records: list[Record], grid: list[float] = GRID, choices: int = 2, **table: Any) -> list[Analysis]:
    """Every setting as a study of its own, whose arms chose the learning rate of their measured runs."""
    settings: dict[str, list[Record]] = {}
    for record in records:
        settings.setdefault(record.identity.setting, []).append(record)
    analyses = []
    for setting in settings.values():
        methods = sorted({r.method for r in setting}, key=lambda m: (m == "oelm", m))
        values = {"lrs": grid, "choose_seeds": choices, "widen": 0, **table}
        values |= {"methods": methods, "seeds": max(r.seed for r in setting)}
        base = {"task": {"name": setting[0].task}, "model": {"name": setting[0].config.model.name}}
        firsts = [next(r for r in setting if r.method == method) for method in methods]
        tried = [
            trial_of(first, lr, 1001 + k, first.lr) for first in firsts for lr in grid for k in range(choices)
        ]
        study = make_study({"study": values, **base}) if len(methods) > 1 else None
        analyses.append(analyse_records([*setting, *tried], study))
    return analyses


def verdicts(analyses: list[Analysis], benchmarks: tuple[Benchmark, ...] = ()) -> dict[str, Verdict]:
    """The verdicts by claim; what every verdict must have is checked on all."""
    found = judge(analyses, benchmarks)
    assert [v.id for v in found] == [f"C{i}" for i in range(1, 11)]
    for v in found:
        assert v.verdict in ("supported", "refuted", "in part", "not decided")
        for english, chinese in ((v.reason, v.reason_zh), (v.why, v.why_zh)):
            assert english and re.search("[一-鿿]", chinese)
            assert not set("{}") & set(english + chinese)
        assert (f"To decide it: {commands()[v.id]} (about " in v.why) == (v.verdict == "not decided")
    return {v.id: v for v in found}


def commands() -> dict[str, str]:
    return {claim.id: claim.advice for claim in read_claims()}


def verdict(id: str, records: list[Record], study: Study | None = None, **more: Any) -> Verdict:
    """The verdict on one claim, on a study of these records or, without one, on tuned settings."""
    analyses = [analyse_records(records, study)] if study else tuned(records)
    return verdicts(analyses, **more)[id]


def benchmark(
    saved: float,
    rounds: int = 8,
    kind: str = "lm",
    size: str = MEDIUM,
    length: int = 512,
    spread: float = 0.3,
) -> Benchmark:
    """A record of `oelm bench` in which oelm saves so many per cent of the baseline's step."""
    rounds_of = {"baseline": [], "oelm": []}
    for number in range(rounds):
        base = 0.02 * (1 + 0.1 * WIGGLE[number % 8])  # a machine that is disturbed disturbs both
        ratio = 1 - (saved + spread * WIGGLE[(number + 3) % 8]) / 100
        for name, seconds in (("baseline", base), ("oelm", base * ratio)):
            rounds_of[name].append({"seconds": 10 * seconds, "steps": 10})
    case = {"work": "freezing", "name": f"T={length}", "kind": kind, "length": length}
    case["arms"] = [{"name": name, "windows": windows} for name, windows in rounds_of.items()]
    if size == BERT:
        case["model"] = {"name": BERT, "architecture": "bert", "layers": 12, "d_model": 768}
    record = {"settings": {"size": size}, "environment": {"cpu": "one"}, "cases": [case]}
    return Benchmark(f"{kind}.json", record)
