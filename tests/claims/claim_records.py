"""Made-up records of runs whose truth is known, for judging claims on."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from oelm.claims.verdicts import Verdict, judge
from oelm.config import rebuild_config
from oelm.data.catalogue import TASKS
from oelm.study.analysis import analyse_records
from oelm.study.design import Study, make_study
from oelm.study.records import Record, identify

MEDIUM, BERT, NOWHERE = "gpt-medium-512", "bert-base-uncased", Path("nowhere")
UNRECORDED = Path("without predictions")
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
        if self.metric == "perplexity":
            return {"ids": ids, "scores": np.log(score), "tokens": np.ones(20)}
        return {"ids": ids, self.metric: score}


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


def verdict(id: str, records: list[Record], study: Study | None = None) -> Verdict:
    """The verdict on one claim; what every verdict must have is checked on all."""
    found = judge(analyse_records(records, study))
    assert [v.id for v in found] == [f"C{i}" for i in range(1, 11)]
    for v in found:
        assert v.verdict in ("supported", "refuted", "not decided")
        assert v.reason and re.search("[一-鿿]", v.reason_zh)
        assert not set("{}") & set(v.reason + v.reason_zh)
    return found[int(id[1:]) - 1]
