"""The result types of an analysis: arms, settings, paired comparisons, and what forbids a conclusion."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from oelm.study import statistics
from oelm.study.design import Study
from oelm.study.items import ItemDifference, McNemarSeeds
from oelm.study.matrix import Cell, Matrix
from oelm.study.records import Record
from oelm.system.messages import Notice, notice

FEWEST_SEEDS = 5  # for a claim
LEVEL = 0.05


@dataclass(frozen=True)
class ArmResult:
    """One arm in one setting: its measured runs, and the trials its learning rate was chosen from."""

    method: str
    lr: float | None  # of the measured runs; None if there are none, or several learning rates
    chosen: bool  # whether `lr` was chosen on validation, from a grid all methods share
    records: tuple[Record, ...]  # of the measured runs, in the order of the seeds
    trials: tuple[Record, ...]
    failures: tuple[Record, ...]  # runs without a score
    lr_scores: dict[float, float | None]  # learning rate -> mean validation score; None: a trial failed
    unevaluated: tuple[Cell, ...] = ()  # trials of the grid without a result: missing, or ended by a fault

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

    @property
    def interval(self) -> statistics.Interval | None:
        """The mean test metric with its interval."""
        return statistics.interval(self.values) if self.values else None

    def step_time(self) -> float | None:
        """Median seconds of a step, over the measured runs."""
        times = [value for record in self.records if (value := record.step_time) is not None]
        return median(times) if times else None

    def area(self) -> float | None:
        """The mean area under the measured runs' learning curves, on the metric's scale."""
        curves = [{point["step"]: point["metrics"][r.metric] for point in r.curve} for r in self.records]
        sorted_curves = [sorted(curve.items()) for curve in curves if len(curve) > 1]
        areas = [statistics.area_under_curve(*zip(*curve, strict=True)) for curve in sorted_curves]
        return fmean(areas) if areas else None

    def robustness(self, larger_is_better: bool, tolerance: float) -> statistics.Robustness | None:
        lrs, scores = list(self.lr_scores), list(self.lr_scores.values())
        if len([score for score in scores if score is not None]) < 2:
            return None
        return statistics.lr_robustness(lrs, scores, larger_is_better, tolerance)

    def expected_best(self, larger_is_better: bool) -> list[float]:
        scores = [value for record in self.trials if (value := record.validation) is not None]
        return statistics.expected_best(scores, larger_is_better).tolist() if scores else []


@dataclass(frozen=True)
class Group:
    """One setting (a task, a model, a recipe) and its arms."""

    setting: str
    task: str
    model: str
    metric: str
    precision: str
    kind: str  # "share" (accuracy, F1: points) or "perplexity" (per cent)
    reference_arm: str  # the name of the arm that the others are compared with
    arms: dict[str, ArmResult]
    matrix: Matrix | None  # of a study; None for runs outside of a study

    @property
    def larger_is_better(self) -> bool:
        return self.kind == "share"

    @property
    def tolerance(self) -> float:
        """One point on the metric's own scale (for a perplexity, one per cent of the best)."""
        if self.kind == "share":
            return 0.01
        scores = [s for arm in self.arms.values() for s in arm.lr_scores.values() if s is not None]
        return 0.01 * min(scores, default=1.0)

    @property
    def records(self) -> list[Record]:
        return [record for arm in self.arms.values() for record in (*arm.trials, *arm.records)]

    @property
    def trivial_baselines(self) -> dict[str, dict[str, Any]]:
        """Trivial baselines on the test split that have the setting's metric: name -> metrics."""
        measured = (record for arm in self.arms.values() for record in arm.records)
        baselines = next((record.results.get("references") or {} for record in measured), {})
        tested = {name: splits["test"] for name, splits in baselines.items() if "test" in splits}
        return {name: metrics for name, metrics in tested.items() if self.metric in metrics}

    def behind(self, arm: ArmResult) -> list[str]:
        """The trivial baselines that are better than the arm's mean."""
        if not arm.values:
            return []
        mean, sign = fmean(arm.values), 1 if self.larger_is_better else -1
        scores = {name: metrics[self.metric] for name, metrics in self.trivial_baselines.items()}
        return [name for name, score in scores.items() if sign * score > sign * mean]

    @property
    def tried_lrs(self) -> list[float]:
        return sorted({lr for arm in self.arms.values() for lr in arm.lr_scores})

    def points(self, value: float) -> float:
        """A score on the scale of differences: points, or -100 times the logarithm of a perplexity."""
        return 100 * value if self.kind == "share" else -100 * math.log(value)


@dataclass(frozen=True)
class Comparison:
    """An arm against the reference arm of its setting; `differences` are by seed, positive is better."""

    group: Group
    method: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    paired: statistics.Paired | None
    equivalence: statistics.Equivalence | None
    items: ItemDifference | None  # on the scale of differences
    mcnemar: McNemarSeeds | None
    problems: tuple[str, ...]  # codes of PROBLEMS: why no conclusion may be drawn
    p_holm: float | None = None  # within the family of all comparisons of the study

    @property
    def arm(self) -> ArmResult:
        return self.group.arms[self.method]

    @property
    def reference_arm(self) -> ArmResult:
        return self.group.arms[self.group.reference_arm]

    @property
    def verdict(self) -> str:
        """better, worse, equivalent, open (not decided by the data), or void (see `problems`)."""
        if self.problems or self.paired is None:
            return "void"
        if self.p_holm is not None and self.p_holm < LEVEL:
            return "better" if self.paired.mean > 0 else "worse"
        if self.equivalence is not None and self.equivalence.equivalent:
            return "equivalent"
        return "open"

    @property
    def negligible(self) -> bool:
        """Different, but by less than the margin that was stated not to matter."""
        within = self.equivalence is not None and self.equivalence.equivalent
        return within and self.verdict in ("better", "worse")

    @property
    def disagreement(self) -> str | None:
        """Why the 95 % interval and the verdict disagree about 0; None if they agree.

        "test": from 20 pairs on, interval and p come from different procedures. "family": p is corrected
        for the other comparisons, the interval is not. In both cases p decides.
        """
        paired = self.paired
        if self.verdict == "void" or paired is None or paired.p is None:
            return None
        if paired.low is None or paired.high is None or paired.low == paired.high:
            return None
        excludes_0 = paired.low > 0 or paired.high < 0
        if excludes_0 == (self.verdict in ("better", "worse")):
            return None
        return "family" if excludes_0 and paired.p < LEVEL else "test"


PROBLEMS = (
    "few_seeds", "other_rates", "unequal_trials", "at_chance", "other_arithmetic", "unevaluated", "failed",
    "unfinished", "chosen_on_test",
)  # fmt: skip


def explain_problems(codes: Iterable[str], arms: Mapping[str, ArmResult], pairs: int) -> list[Notice]:
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
    """An arm against the reference arm over several tasks, in points."""

    method: str
    tasks: int
    interquartile_mean: statistics.Estimate  # of the paired differences
    probability_of_improvement: statistics.Estimate


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report."""

    title: str
    study: Study | None
    groups: list[Group]
    comparisons: list[Comparison]
    across: list[Across]
    left_out: int = 0  # records in the folder that do not belong to the study
    copies: int = 0  # of runs that are in the folder twice
    unused: int = 0  # measured runs that the study, as it is now, does not ask for
    damaged: list[Notice] = field(default_factory=list)  # records that cannot be read
    changes: list[dict[str, Any]] = field(default_factory=list)  # made after runs had been tested
    mixtures: dict[str, list[str]] = field(default_factory=dict)  # package, ... -> the values

    @property
    def records(self) -> list[Record]:
        return [record for group in self.groups for record in group.records]
