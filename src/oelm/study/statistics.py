"""Statistics of paired scores: intervals, Holm's correction, bootstrap estimates, learning-rate robustness.

The design is paired: with one seed two methods see the same data in the same order and share their initial
values, so the difference within a seed is tested. Random procedures start from one fixed seed: the same
numbers give the same result. Values that do not vary have no interval (`None`), as equal values in a few runs
do not prove certainty. What decides a comparison is in `oelm.study.two_way` and `oelm.study.decide`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from oelm.errors import UserError

Array = np.ndarray

SEED = 0
CONFIDENCE = 0.95
ROUNDING = 1e-12  # smaller differences of scores are rounding
LARGER_LR = 3.0  # what is lost at this multiple of the best learning rate


def finite(name: str, values: Any) -> Array:
    """The values in float64, (N,); UserError if there are none or one is not a finite number."""
    array = np.asarray(values, dtype=np.float64)
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if array.ndim != 1 or not array.size or bad:
        raise UserError(f"{name}: {bad} of {array.size} values are not finite (shape {array.shape})")
    return array


def constant(values: Array) -> bool:
    """Whether the values differ by no more than rounding."""
    return bool(np.ptp(values) <= max(1e-9 * np.abs(values).max(), ROUNDING))


def widened_level(n: int, groups: int = 1) -> float:
    """The level at which a bootstrap of a mean of n values (in each group) covers 95 %.

    A bootstrap divides by n instead of n - 1 and uses normal instead of t quantiles: at n = 20 its 95 %
    interval covers 93 %, at n = 5 in each of 5 groups 91 %. This level makes it as wide as a t interval for
    normal values (Hesterberg 2015, "What Teachers Should Know About the Bootstrap").
    """
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, groups * (n - 1))
    return float(1 - 2 * stats.norm.sf(math.sqrt(n / (n - 1)) * quantile))


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; `sd` is None for one value, `low` and `high` without an interval."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


def interval(values: Any) -> Interval:
    """The mean of one arm over its seeds with its t interval."""
    ordered = np.sort(finite("values", values))
    n, mean = len(ordered), math.fsum(ordered) / len(ordered)
    if n == 1:
        return Interval(n, mean, None, None, None)
    if constant(ordered):
        return Interval(n, mean, 0.0, None, None)
    low, high = stats.ttest_1samp(ordered, 0.0).confidence_interval(CONFIDENCE)
    return Interval(n, mean, float(ordered.std(ddof=1)), float(low), float(high))


def holm(p_values: Sequence[float | None], missing: int = 0) -> list[float | None]:
    """Holm-adjusted p values of one family, in the order given. None, a comparison that could not be tested,
    stays None and counts as p = 1, as do `missing` further ones, so that they do not lower the others' p."""
    family = np.array([1.0 if p is None else p for p in p_values] + [1.0] * missing)
    # statsmodels has this too, but collects garbage at each call: half a second with torch loaded.
    order = np.argsort(family)
    adjusted = np.empty(len(family))
    steps = np.maximum.accumulate(family[order] * np.arange(len(family), 0, -1))
    adjusted[order] = np.minimum(steps, 1.0)
    return [None if p is None else float(a) for p, a in zip(p_values, adjusted, strict=False)]


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval; `low` and `high` are None if runs are too few or all equal."""

    value: float
    low: float | None
    high: float | None


def interquartile_mean(tasks: Sequence[Any], resamples: int = 2000) -> Estimate:
    """The mean of the middle half of all runs of all tasks (Agarwal et al. 2021); one row of runs per task.
    Scores must be on one scale. The interval is a percentile bootstrap that draws runs within each task,
    `widened_level` for few runs."""
    rows = [finite("scores", row) for row in tasks]
    rng = np.random.default_rng(SEED)
    drawn = [row[rng.integers(len(row), size=(resamples, len(row)))] for row in rows]
    value = stats.trim_mean(np.concatenate(rows), 0.25)
    bootstrapped = stats.trim_mean(np.concatenate(drawn, axis=1), 0.25, axis=1)
    return _estimate(value, bootstrapped, [len(row) for row in rows])


def probability_of_improvement(
    scores_x: Sequence[Any], scores_y: Sequence[Any], resamples: int = 2000
) -> Estimate:
    """How likely a run of X scores above a run of Y on the same task, averaged over tasks; ties are half.

    One row of runs per task; the numbers of runs may differ. The interval, `widened_level` for few runs,
    draws runs within each task, those of X apart from those of Y (as Agarwal et al. 2021 do).
    """
    tasks = [(finite("scores", x), finite("scores", y)) for x, y in zip(scores_x, scores_y, strict=True)]
    rng = np.random.default_rng(SEED)
    values, drawn = [], []
    for x, y in tasks:
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
        pick_x = rng.integers(len(x), size=(resamples, len(x), 1))
        pick_y = rng.integers(len(y), size=(resamples, 1, len(y)))
        values.append(wins.mean())
        drawn.append(wins[pick_x, pick_y].mean(axis=(1, 2)))
    return _estimate(np.mean(values), np.mean(drawn, axis=0), [min(len(x), len(y)) for x, y in tasks])


def _estimate(value: Any, bootstrapped: Array, sizes: Sequence[int]) -> Estimate:
    # A task with one run would count as if its score were known exactly.
    if min(sizes) < 2 or constant(bootstrapped):
        return Estimate(float(value), None, None)
    level = widened_level(min(sizes), len(sizes))
    low, high = np.quantile(bootstrapped, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(value), float(low), float(high))


def expected_best(validation_scores: Any, larger_is_better: bool = True) -> Array:
    """The expected best validation score after 1, 2, ..., n trials, drawn with replacement from the n that
    were made (Dodge et al. 2019)."""
    scores = np.sort(finite("validation scores", validation_scores))
    if not larger_is_better:
        scores = scores[::-1]
    # The best of k draws is at most the i-th from below with probability (i / n)^k.
    count = np.arange(len(scores) + 1)
    return np.diff((count / len(scores)) ** count[1:, None], axis=1) @ scores


def area_under_curve(steps: Any, values: Any) -> float:
    """The mean height of a learning curve: its area by trapezoids over the range of its steps."""
    x, y = finite("steps", steps), finite("values", values)
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


@dataclass(frozen=True)
class Robustness:
    """The best learning rate of a grid, the range around it that is nearly as good, and how much worse 3
    times the best one is (`lost`). Where `lost` is None, `lost_unknown` is the reason: outside_grid or
    run_failed."""

    best_rate: float
    best_score: float
    low: float
    high: float
    ratio: float
    lost: float | None
    lost_unknown: str | None


def lr_robustness(
    lrs: Sequence[float],
    scores: Sequence[float | None],
    larger_is_better: bool = True,
    tolerance: float = 0.01,
) -> Robustness:
    """How much the learning rate matters, from the mean validation score of each one of a rising grid.

    `low` to `high` are the grid points around the best (of equals, the smallest) without a gap whose scores
    are within `tolerance` of it, on the metric's scale. `lost` is how much worse 3 times the best learning
    rate is, interpolated between grid points on a log scale. A learning rate with a failed run has the score
    None: it ends the range, and nothing is interpolated from it.
    """
    grid = finite("learning rates", lrs)
    better = 1.0 if larger_is_better else -1.0
    signed_scores = np.array([-math.inf if score is None else better * score for score in scores])
    best = int(signed_scores.argmax())
    near = signed_scores >= signed_scores[best] - tolerance - ROUNDING
    first = last = best
    while first > 0 and near[first - 1]:
        first -= 1
    while last + 1 < len(grid) and near[last + 1]:
        last += 1
    low, high = float(grid[first]), float(grid[last])
    lost, unknown = _loss_at_larger_lr(grid, signed_scores, best)
    return Robustness(
        float(grid[best]), float(better * signed_scores[best]), low, high, high / low, lost, unknown
    )


def _loss_at_larger_lr(grid: Array, signed_scores: Array, best: int) -> tuple[float | None, str | None]:
    larger = grid[best] * LARGER_LR
    same = np.flatnonzero(np.isclose(grid, larger, rtol=1e-6, atol=0))  # 3 * 3e-4 is not quite 9e-4
    if same.size:
        neighbours = same[:1]
    elif grid[0] < larger < grid[-1]:
        above = int(np.searchsorted(grid, larger))
        neighbours = np.array([above - 1, above])
    else:
        return None, "outside_grid"
    if not np.isfinite(signed_scores[neighbours]).all():
        return None, "run_failed"
    score = np.interp(math.log(larger), np.log(grid[neighbours]), signed_scores[neighbours])
    return float(signed_scores[best] - score), None
