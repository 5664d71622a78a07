"""How training went: histories, last phase, overfitting, time, parameters and efficiency of an arm's runs."""

import contextlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from oelm.errors import UserError
from oelm.study.catalogue import Experiment, differences, get_experiment, shared_figures
from oelm.study.record_checks import is_number
from oelm.study.records import Record, mean_of
from oelm.study.result_types import Group

STEPS = (1_000, 10_000, 50_000)  # steps at which arms are compared, besides the last one
RISE = 0.02  # of the validation loss above its lowest: less is called slight

Row = dict[str, Any]


@dataclass(frozen=True)
class ArmHistory:
    """Runs of one arm at one learning rate, one for each seed. Every number is a mean over them."""

    method: str
    lr: float
    records: tuple[Record, ...]

    @cached_property
    def history(self) -> list[Row]:
        """The evaluations that all runs made: step, metrics, and the improvement of the loss."""
        points = [{"step": p["step"], **p["metrics"]} for record in self.records for p in record.curve]
        return with_improvement(_means(points, len(self.records)))

    @property
    def split(self) -> str:
        return next((str(point["split"]) for record in self.records for point in record.curve), "validation")

    @property
    def at_steps(self) -> list[Row]:
        """The newest evaluation at each of STEPS that was reached (`at`), and the last one."""
        steps = [row["step"] for row in self.history]
        if not steps:
            return []
        reached = [step for step in STEPS if steps[0] <= step < steps[-1]]
        return [{"at": at, **self.history[bisect_right(steps, at) - 1]} for at in [*reached, steps[-1]]]

    @property
    def last_phase(self) -> list[Row]:
        """The last points of the training log: step, loss of the batch, learning rate."""
        return _means((point for record in self.records for point in record.last_points), len(self.records))

    @property
    def fit(self) -> Row:
        """Training and validation loss, and whether the validation loss rose after its lowest point."""
        rows = [row for row in self.history if "loss" in row]
        training = fmean(losses) if (losses := [point["loss"] for point in self.last_phase]) else None
        if not rows:
            return {"training_loss": training, "overfitting": "unknown"}
        best, last = min(rows, key=lambda row: (row["loss"], -row["step"])), rows[-1]
        rise = last["loss"] / best["loss"] - 1 if best["loss"] > 0 else 0.0
        facts: Row = {"training_loss": training, "validation_loss": last["loss"]}
        if training is not None and "perplexity" in last:
            facts |= {"training_perplexity": _exp(training), "validation_perplexity": last["perplexity"]}
        learned = training is None or training < last["loss"]
        word = "none" if rise <= 0 else "slight" if rise < RISE else "clear" if learned else "unstable"
        facts |= {"best_step": best["step"], "last_step": last["step"], "rise": rise}
        return facts | {"overfitting": word if len(rows) > 1 else "unknown"}

    @property
    def time(self) -> Row:
        """Seconds: the total, training, validation, and a step. `every_step`: each step was timed; in
        older records the median is one of means over the steps between two lines of the log."""
        timing = [record.timing for record in self.records]
        names = {"total_s": "total_time_s", "training_s": "train_time_s", "validation_s": "eval_time_s"}
        times: Row = {name: mean_of(self.records, key) for name, key in names.items()}
        for key, average in (("mean_s", fmean), ("median_s", median)):
            known: list[float] = [stats[key] for stats in timing if is_number(stats.get(key))]
            times[f"step_{key}"] = average(known) if known else None
        return times | {"every_step": all(stats.get("every_step") is True for stats in timing)}

    @property
    def parameters(self) -> Row:
        counts: Row = dict(self.records[0].results.get("parameters") or {})
        return counts | {"frozen_share": counts["frozen"] / counts["total"]} if counts else {}

    @property
    def efficiency(self) -> Row:
        """The best perplexity per trained parameter, and per hour of the run, as the reports have it."""
        values = [value for record in self.records if (value := record.best) is not None]
        if self.records[0].metric != "perplexity" or not values:
            return {}
        ratios: Row = {"perplexity": fmean(values)}
        over = {"per_parameter": self.parameters["trainable"], "per_hour": (self.time["total_s"] or 0) / 3600}
        return ratios | {name: ratios["perplexity"] / amount for name, amount in over.items() if amount}

    @cached_property
    def experiment(self) -> Experiment | None:
        """The published experiment whose config the runs were made from, perhaps with changes."""
        ids = {record.results.get("experiment") for record in self.records}
        with contextlib.suppress(UserError):
            return get_experiment(str(ids.pop())) if len(ids) == 1 and None not in ids else None
        return None

    @cached_property
    def published(self) -> Row:
        """The published figures: `beside` (name -> published and here), `history` (step -> metrics, on the
        same split), `time`, `parameters`, `efficiency`, `last_training_loss`, each only where it was
        published; and `differs_in`, the keys in which the runs differ from the recipe."""
        if self.experiment is None:
            return {}
        published = self.experiment.published
        history: dict[int, Row] = defaultdict(dict)
        for name in ("loss", self.records[0].metric):
            points = published.get("history" if name == "loss" else f"{name}_history", ())
            for step, value in points if published.get("split") == self.split else ():
                history[step][name] = value
        times = {"total_s": published.get("time_s"), "validation_s": published.get("validation_time_s")}
        times["step_mean_s"] = published.get("mean_seconds_per_step", published.get("seconds_per_step"))
        times["step_median_s"] = published.get("median_seconds_per_step")
        names = {"perplexity": "perplexity", "per_parameter": "perplexity_per_parameter"}
        names["per_hour"] = "perplexity_per_hour"
        counts, pairs = published.get("parameters", {}), defaultdict(list)
        rows = (row for r in self.records for row in shared_figures(self.experiment, r.results))
        for name, value, here in rows:
            pairs[name, value].append(here)
        figures: Row = {
            "experiment": self.experiment.id,
            "beside": {n: {"published": p, "here": fmean(values)} for (n, p), values in pairs.items()},
            "history": dict(history),
            "time": {name: seconds for name, seconds in times.items() if seconds is not None},
            "parameters": counts | ({"frozen_share": counts["frozen"] / counts["total"]} if counts else {}),
            "efficiency": {name: published[key] for name, key in names.items() if key in published},
            "last_training_loss": published.get("last_training_loss"),
        }
        record = self.records[0]
        differing = differences(self.experiment, record.config, record.results)
        return {name: value for name, value in figures.items() if value} | {"differs_in": differing}

    def to_plain(self) -> Row:
        names = ("method", "lr", "split", "history", "at_steps", "last_phase", "fit", "time", "parameters")
        values = {name: getattr(self, name) for name in (*names, "efficiency", "published")}
        return values | {"seeds": [record.seed for record in self.records]}


def arm_histories(group: Group) -> list[ArmHistory]:
    """The measured runs of every arm (its trials, if nothing is measured yet), by learning rate."""
    several = []
    for arm in group.arms.values():
        runs = arm.records or tuple(record for record in arm.trials if record.completed)
        for lr in sorted({record.lr for record in runs}):
            several.append(ArmHistory(arm.method, lr, tuple(record for record in runs if record.lr == lr)))
    return several


def with_improvement(rows: Sequence[Row]) -> list[Row]:
    """The rows with `improvement`: the share by which the loss fell since the previous row."""
    improved = [dict(row) for row in rows]
    for before, row in pairwise(improved):
        if before.get("loss") and "loss" in row:
            row["improvement"] = 1 - row["loss"] / before["loss"]
    return improved


def _means(points: Iterable[Row], runs: int) -> list[Row]:
    """The mean of every number at each step for which all runs have a point."""
    by_step: dict[int, list[Row]] = defaultdict(list)
    for point in points:
        by_step[point["step"]].append(point)
    rows = []
    for step, several in sorted(by_step.items()):
        if len(several) == runs:
            names = [name for name in several[0] if all(is_number(point.get(name)) for point in several)]
            rows.append({name: fmean(point[name] for point in several) for name in names} | {"step": step})
    return rows


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
