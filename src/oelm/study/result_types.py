"""What a comparison consists of: arms, settings, paired differences, and what forbids a conclusion."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from oelm.errors import OUTCOMES
from oelm.study import statistics
from oelm.study.design import Study
from oelm.study.items import ItemDifference, McNemarSeeds
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import Record
from oelm.system.messages import Notice, notice

FEWEST_SEEDS = 5  # for a claim (DESIGN, rule 4)
LEVEL = 0.05


@dataclass(frozen=True)
class Failure:
    """A run that gave no number, and why."""

    method: str
    lr: float
    seed: int
    status: str
    reason: Notice | None
    kind: str | None  # of failure, see `oelm.errors`; None where it has not failed but was interrupted

    @property
    def of_method(self) -> bool:
        """Whether the method is the reason, or may be: an old record does not say. A fault is nobody's."""
        return self.kind in OUTCOMES or self.kind == "unknown"


@dataclass(frozen=True)
class Arm:
    """One method in one setting: the runs it was measured by, and the trials its rate was chosen from."""

    method: str
    lr: float | None  # at which it was measured; None where several were, or nothing
    chosen: bool  # on validation, from a grid all methods share
    records: tuple[Record, ...]  # measured, in the order of the seeds
    trials: tuple[Record, ...]
    failures: tuple[Failure, ...]
    rates: dict[float, float | None]  # mean validation score of every rate tried; None: no score of a run
    unevaluated: tuple[Cell, ...] = ()  # trials of the grid without a result: missing, or a fault

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    @property
    def values(self) -> list[float]:
        """The test metric of each measured run."""
        return [value for record in self.records if (value := record.test) is not None]

    @property
    def at_chance(self) -> list[int]:
        """Seeds whose run cannot be told from the most frequent class on validation."""
        return [record.seed for record in self.records if record.results.get("at_chance")]

    def mean(self, name: str) -> float | None:
        """The mean of a number of results.json over the measured runs."""
        found = [record.results[name] for record in self.records if name in record.results]
        return fmean(found) if found else None

    def test_metric(self, name: str) -> float | None:
        found = [record.results["test"]["metrics"].get(name) for record in self.records]
        known = [value for value in found if value is not None]
        return fmean(known) if known else None

    def step_time(self) -> float | None:
        """Median seconds of a step, over the measured runs."""
        found = [value for record in self.records if (value := record.step_time) is not None]
        return median(found) if found else None

    def area(self) -> float | None:
        """The mean area under the measured runs' learning curves, on the metric's scale."""
        areas = []
        for record in self.records:
            points = [(p["step"], p["metrics"][record.metric]) for p in record.curve]
            if len(points) > 1:
                areas.append(statistics.area_under_curve(*zip(*points, strict=True)))
        return fmean(areas) if areas else None

    def robustness(self, larger_is_better: bool, tolerance: float) -> statistics.Robustness | None:
        if len([score for score in self.rates.values() if score is not None]) < 2:
            return None
        return statistics.rate_robustness(
            list(self.rates), list(self.rates.values()), larger_is_better, tolerance
        )

    def expected_best(self, larger_is_better: bool) -> list[float]:
        scores = [value for record in self.trials if (value := record.validation) is not None]
        return statistics.expected_best(scores, None, larger_is_better).tolist() if scores else []


@dataclass(frozen=True)
class Group:
    """One setting: a task, a model, a recipe; and what every method reached in it."""

    setting: str
    task: str
    model: str
    metric: str
    precision: str
    kind: str  # "share" (accuracy, F1: points) or "perplexity" (per cent)
    reference: str
    arms: dict[str, Arm]
    matrix: Matrix | None  # of a study; None for runs that belong to none

    @property
    def larger_is_better(self) -> bool:
        return self.kind == "share"

    @property
    def tolerance(self) -> float:
        """One point on the metric's own scale (for perplexity: one per cent of the best)."""
        if self.kind == "share":
            return 0.01
        scores = [s for arm in self.arms.values() for s in arm.rates.values() if s is not None]
        return 0.01 * min(scores, default=1.0)

    @property
    def records(self) -> list[Record]:
        return [record for arm in self.arms.values() for record in (*arm.trials, *arm.records)]

    @property
    def references(self) -> dict[str, dict[str, Any]]:
        """Trivial references on the test split: name -> metrics."""
        for arm in self.arms.values():
            for record in arm.records:
                found = record.results.get("references") or {}
                return {name: splits["test"] for name, splits in found.items() if "test" in splits}
        return {}

    def behind(self, arm: Arm) -> list[str]:
        """The trivial references that are better than the arm's mean."""
        if not arm.values:
            return []
        mean, sign = fmean(arm.values), 1 if self.larger_is_better else -1
        return [
            name
            for name, metrics in self.references.items()
            if sign * metrics.get(self.metric, -sign * math.inf) > sign * mean
        ]

    def points(self, value: float) -> float:
        """A value on the scale of differences: points, or 100 times the logarithm of a perplexity."""
        return 100 * value if self.kind == "share" else -100 * math.log(value)


@dataclass(frozen=True)
class Comparison:
    """A method against the reference of its setting; `differences` are by seed, positive is better."""

    group: Group
    method: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    paired: statistics.Paired | None
    equivalence: statistics.Equivalence | None
    items: ItemDifference | None  # on the scale of differences
    mcnemar: McNemarSeeds | None
    problems: tuple[str, ...]  # why nothing may be concluded: codes, see PROBLEMS
    p_holm: float | None = None  # within the family of all comparisons of the study

    @property
    def arm(self) -> Arm:
        return self.group.arms[self.method]

    @property
    def reference(self) -> Arm:
        return self.group.arms[self.group.reference]

    @property
    def verdict(self) -> str:
        """better, worse, equivalent, open (the data decide nothing), or void (see `problems`)."""
        if self.problems or self.paired is None:
            return "void"
        if self.p_holm is not None and self.p_holm < LEVEL:
            return "better" if self.paired.mean > 0 else "worse"
        if self.equivalence is not None and self.equivalence.equivalent:
            return "equivalent"
        return "open"

    @property
    def negligible(self) -> bool:
        """Different, and yet within the margin that was said not to matter."""
        return bool(
            self.verdict in ("better", "worse")
            and self.equivalence is not None
            and self.equivalence.equivalent
        )

    @property
    def disagreement(self) -> str | None:
        """Why the 95 % interval says something else about 0 than the verdict, where it does.

        "test": from 20 pairs on the interval comes from another procedure than p. "family": p is corrected
        for the other comparisons, the interval is not. Either way p decides.
        """
        paired = self.paired
        if self.verdict == "void" or paired is None or paired.p is None:
            return None
        if paired.low is None or paired.high is None or paired.low == paired.high:
            return None
        apart = paired.low > 0 or paired.high < 0
        if apart == (self.verdict in ("better", "worse")):
            return None
        return "family" if apart and paired.p < LEVEL else "test"


PROBLEMS = (
    "few_seeds", "other_rates", "unequal_trials", "at_chance", "other_arithmetic", "unevaluated", "failed",
    "unfinished", "chosen_on_test",
)  # fmt: skip


def explain_problems(codes: Iterable[str], arms: Mapping[str, Arm], pairs: int) -> list[Notice]:
    """Codes of PROBLEMS with their values; `arms` are those compared, by the names to call them."""
    lost = {name: list(arm.at_chance) for name, arm in arms.items() if arm.at_chance}
    values: dict[str, dict[str, Any]] = {
        "few_seeds": {"n": pairs, "fewest": FEWEST_SEEDS},
        "at_chance": {"runs": [notice("study.seeds", method=name, seeds=s) for name, s in lost.items()]},
        "unevaluated": {"methods": list(dict.fromkeys(a.method for a in arms.values() if a.unevaluated))},
    }
    return [notice(f"problem.{code}", **values.get(code, {})) for code in codes]


@dataclass(frozen=True)
class Across:
    """A method against the reference over several tasks, in points."""

    method: str
    tasks: int
    interquartile_mean: statistics.Estimate  # of the paired differences
    probability_of_improvement: statistics.Estimate


@dataclass(frozen=True)
class Analysis:
    """Everything a report says, as numbers."""

    title: str
    study: Study | None
    groups: list[Group]
    comparisons: list[Comparison]
    across: list[Across]
    left_out: int = 0  # records in the folder that do not belong to the study
    copies: int = 0  # of runs that were found before
    unused: int = 0  # measured runs that the matrix, as it is now, does not use
    damaged: list[Notice] = field(default_factory=list)  # records that cannot be read
    changes: list[dict[str, Any]] = field(default_factory=list)  # made after test results were there
    mixtures: dict[str, list[str]] = field(default_factory=dict)  # what differs between the runs

    @property
    def records(self) -> list[Record]:
        return [record for group in self.groups for record in group.records]
