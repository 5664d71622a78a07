"""How far a comparison can be trusted: functions from scores to small frozen records of numbers.

The design is paired: with one seed two methods see the same data in the same order and share their initial
values, so the difference within a seed is tested. Random procedures start from one fixed seed: the same
numbers give the same result. Values that do not vary have no interval (`None`), as no variation in a few runs
is no proof of certainty. Intervals over the items of a test set are in `oelm.study.items`.
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
RESAMPLES = 9999  # with the observed value 10,000, so that p values are round numbers
BOOTSTRAP = "BCa bootstrap"
BOOTSTRAP_FROM = 20  # pairs; fewer tell a bootstrap too little about the tails
ROUNDING = 1e-12  # smaller differences of scores are rounding
LARGER_LR = 3.0  # what is lost at this multiple of the best learning rate


def finite(name: str, values: Any, dimensions: Sequence[int] = (1,)) -> Array:
    """The values in float64; UserError if there are none, or if one is missing or not a finite number."""
    array = np.asarray(values, dtype=np.float64)
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if array.ndim not in dimensions or not array.size or bad:
        raise UserError(f"{name}: {bad} of {array.size} values are not finite (shape {array.shape})")
    return array


def constant(values: Array) -> bool:
    """Whether the values differ by no more than rounding."""
    return bool(np.ptp(values) <= max(1e-9 * np.abs(values).max(), ROUNDING))


def widened(n: int, groups: int = 1) -> float:
    """The level at which a bootstrap of a mean of n values (in each group) covers 95 %.

    A bootstrap divides by n for n - 1 and has no notion of t: at n = 20 its 95 % interval covers 93 %, at
    n = 5 in each of 5 groups 91 %. This level makes it as wide as a t interval for normal values
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap").
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


@dataclass(frozen=True)
class Paired(Interval):
    """A mean difference with its interval and the two-sided p of "no difference"; how both were computed."""

    p: float | None
    test: str
    interval: str


def interval(values: Any) -> Interval:
    """The mean of one arm over its seeds with its t interval."""
    ordered = np.sort(finite("values", values))
    n, mean = len(ordered), math.fsum(ordered) / len(ordered)
    if n == 1:
        return Interval(n, mean, None, None, None)
    if constant(ordered):
        return Interval(n, mean, 0.0, None, None)
    low, high, _ = _by_t(ordered)
    return Interval(n, mean, float(ordered.std(ddof=1)), low, high)


def paired(differences: Any) -> Paired:
    """The mean of paired differences, tested against 0.

    Below 20 pairs: t test and t interval. From 20: sign-flip permutation test and BCa bootstrap interval,
    `widened`. One pair gives a mean only. Differences that are all 0 give p = 1 and the interval [0, 0];
    all the same but not 0, they give neither p nor interval, because a t test would claim p = 0. The test,
    not the interval, decides: a bootstrap of differences of one sign never reaches 0.
    """
    given = finite("differences", differences)
    n, mean = len(given), math.fsum(given) / len(given)
    if n == 1:
        return Paired(n, mean, None, None, None, None, "none: one pair", "none: one pair")
    if constant(given):
        name = "none: all differences are the same"
        if abs(mean) <= ROUNDING:
            return Paired(n, 0.0, 0.0, 0.0, 0.0, 1.0, name, name)
        return Paired(n, mean, 0.0, None, None, None, name, name)
    # Sorted and with a positive mean: the order of pairs or arms then does not change the random draws.
    sign = -1.0 if mean < 0 else 1.0
    ordered = np.sort(sign * given)
    small = n < BOOTSTRAP_FROM
    low, high, p = (_by_t if small else _by_resampling)(ordered)
    low, high = sorted((sign * low, sign * high))
    names = ("paired t", "t") if small else ("sign-flip permutation", BOOTSTRAP)
    return Paired(n, mean, float(ordered.std(ddof=1)), low, high, p, *names)


def _by_t(differences: Array) -> tuple[float, float, float]:
    result = stats.ttest_1samp(differences, 0.0)
    low, high = result.confidence_interval(CONFIDENCE)
    return float(low), float(high), float(result.pvalue)


def _by_resampling(differences: Array) -> tuple[float, float, float]:
    # `random_state`, and not its newer name `rng`, is known to every scipy this package allows.
    low, high = stats.bootstrap(
        (differences,), np.mean, n_resamples=RESAMPLES, confidence_level=widened(len(differences)),
        method="BCa", random_state=np.random.default_rng(SEED),
    ).confidence_interval  # fmt: skip
    p = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples",  # of one sample: each value may change its sign
        vectorized=True, n_resamples=RESAMPLES, random_state=np.random.default_rng(SEED),
    ).pvalue  # fmt: skip
    return float(low), float(high), float(p)


@dataclass(frozen=True)
class Equivalence:
    """Whether a mean difference is within the margin; `low` and `high` are its 90 % interval."""

    n: int
    mean: float
    margin: float
    low: float | None
    high: float | None
    p: float | None
    equivalent: bool


def equivalence(differences: Any, margin: float) -> Equivalence:
    """Two one-sided paired t tests at 5 %: equivalent if and only if the 90 % interval is inside the margin.
    One pair, or differences that are all the same (even 0), cannot be tested: `p` is None, not equivalent."""
    ordered = np.sort(finite("differences", differences))
    n, mean = len(ordered), math.fsum(ordered) / len(ordered)
    if constant(ordered):
        return Equivalence(n, mean, margin, None, None, None, False)
    error = ordered.std(ddof=1) / math.sqrt(n)
    half = float(stats.t.ppf(0.95, n - 1) * error)
    # The larger of the two p values belongs to the nearer margin.
    p = float(stats.t.sf((margin - abs(mean)) / error, n - 1))
    return Equivalence(n, mean, margin, mean - half, mean + half, p, p < 0.05)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-adjusted p values of one family, in the order given. None, a comparison that could not be tested,
    stays None and is not counted; pass 1 to count it."""
    tested = [p for p in p_values if p is not None]
    # statsmodels has this too, but collects garbage at each call: half a second with torch loaded.
    order = np.argsort(tested)
    steps = np.sort(tested) * np.arange(len(tested), 0, -1)
    adjusted = np.empty(len(tested))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    left = iter(adjusted.tolist())
    return [None if p is None else next(left) for p in p_values]


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval; `low` and `high` are None if runs are too few or all equal."""

    value: float
    low: float | None
    high: float | None


def interquartile_mean(tasks: Sequence[Any], resamples: int = 2000) -> Estimate:
    """The mean of the middle half of all runs of all tasks (Agarwal et al. 2021); one row of runs per task.
    Scores must be on one scale. The interval is a percentile bootstrap that draws runs within each task,
    `widened` for few runs."""
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

    One row of runs per task; the numbers of runs may differ. The interval, `widened` for few runs, draws
    runs within each task, those of X apart from those of Y (as Agarwal et al. 2021 do).
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
    level = widened(min(sizes), len(sizes))
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
    """The best learning rate of a grid, the range around it that is nearly as good, and what 3 times the
    best one loses: `lost`, None if it is not known, and then `lost_unknown` says why: outside_grid or
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
    good = np.array([-math.inf if score is None else better * score for score in scores])
    best = int(good.argmax())
    near = good >= good[best] - tolerance - ROUNDING
    first = last = best
    while first > 0 and near[first - 1]:
        first -= 1
    while last + 1 < len(grid) and near[last + 1]:
        last += 1
    low, high = float(grid[first]), float(grid[last])
    lost, unknown = _lost(grid, good, best)
    return Robustness(float(grid[best]), float(better * good[best]), low, high, high / low, lost, unknown)


def _lost(grid: Array, good: Array, best: int) -> tuple[float | None, str | None]:
    larger = grid[best] * LARGER_LR
    same = np.flatnonzero(np.isclose(grid, larger, rtol=1e-6, atol=0))  # 3 * 3e-4 is not quite 9e-4
    if same.size:
        neighbours = same[:1]
    elif grid[0] < larger < grid[-1]:
        above = int(np.searchsorted(grid, larger))
        neighbours = np.array([above - 1, above])
    else:
        return None, "outside_grid"
    if not np.isfinite(good[neighbours]).all():
        return None, "run_failed"
    there = np.interp(math.log(larger), np.log(grid[neighbours]), good[neighbours])
    return float(good[best] - there), None
