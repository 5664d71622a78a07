"""The deciding interval: how a difference would vary with other seeds and other test items together.

Differences form a table of S seeds x I items, where an item is a cluster of test items that belong together
(a premise with its hypotheses, a document with its windows). Seeds and items are both drawn from many, so
both add to the variance of the mean. It is estimated from the mean squares of a two-way layout, and its
degrees of freedom are Satterthwaite's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from oelm.errors import UserError
from oelm.study.statistics import Interval, interval

Array = np.ndarray


@dataclass(frozen=True)
class Overall:
    """A mean difference with its interval over seeds and items; without variation there is no interval.

    `seed_variance` is the part of the variance that is divided by the number of seeds (a seed's own effect
    and its noise on these items); `item_variance` remains with any number of seeds.
    """

    seeds: int
    items: int
    mean: float
    error: float | None  # standard error
    df: float | None
    seed_variance: float
    item_variance: float
    level: float
    low: float | None
    high: float | None
    p: float | None  # of "no difference", two-sided

    @property
    def share_items(self) -> float | None:
        """The share of the variance that more seeds cannot remove."""
        total = self.item_variance + self.seed_variance / self.seeds
        return self.item_variance / total if total > 0 else None

    def margin_p(self, margin: float) -> float | None:
        """Of "the difference is not within the margin": the larger of two one-sided tests (TOST)."""
        if self.error is None or self.df is None:
            return None
        return float(stats.t.sf((margin - abs(self.mean)) / self.error, self.df))

    def half_width(self, seeds: float = math.inf) -> float:
        """The approximate half-width of the interval with so many seeds on the same items."""
        by_seed, by_item = self.seed_variance / seeds, self.item_variance
        total = by_seed**2 / max(1.0, seeds - 1) + by_item**2 / (self.items - 1)
        df = (by_seed + by_item) ** 2 / total if total else 1.0
        return float(stats.t.ppf((1 + self.level) / 2, df) * math.sqrt(by_seed + by_item))


def by_items(differences: Array, sizes: Any = None) -> Interval:
    """The mean difference with an interval over the items alone, as if the seeds were fixed."""
    table = _weighted(differences, sizes)
    return interval(table.mean(axis=0))


def _weighted(table: Array, sizes: Any) -> Array:
    """A table whose plain mean, and the variance of that mean, are those of the mean weighted by size.

    Sizes are random as the items are: an item moves the mean by its size times its distance from the mean.
    """
    weights = np.ones(table.shape[1]) if sizes is None else np.asarray(sizes, dtype=np.float64)
    weights = weights / weights.mean()
    mean = (table * weights).mean()
    return mean + weights * (table - mean)


def overall(differences: Any, sizes: Any = None, level: float = 0.95) -> Overall:
    """The mean of a table of differences (seeds, items), each item weighted by its size.

    With mean squares MS of seeds, items and the rest, the variance of the mean is
    (max(MS_seeds, MS_rest) + MS_items - MS_rest) / (S I).
    """
    table = np.asarray(differences, dtype=np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise UserError("differences must be a table of finite numbers, seeds x items")
    seeds, items = table.shape
    table = _weighted(table, sizes)
    mean = float(table.mean())
    by_seed, by_item = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_seed[:, None] - by_item + mean
    no_interval = Overall(seeds, items, mean, None, None, 0.0, 0.0, level, None, None, None)
    if seeds < 2 or items < 2:
        return no_interval
    ms_seed = items * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
    ms_item = seeds * float(((by_item - mean) ** 2).sum()) / (items - 1)
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (items - 1))
    if ms_seed < ms_rest:  # the seeds' own effect is estimated as 0
        variance, df = ms_item / (seeds * items), float(items - 1)
    else:
        variance = (ms_seed + ms_item - ms_rest) / (seeds * items)
        parts = (ms_seed**2, seeds - 1), (ms_item**2, items - 1), (ms_rest**2, (seeds - 1) * (items - 1))
        total = sum(square / degrees for square, degrees in parts)
        df = (ms_seed + ms_item - ms_rest) ** 2 / total if total else 1.0
    if variance <= max(1e-9 * abs(mean), 1e-12) ** 2:
        return replace(no_interval, low=0.0, high=0.0, p=1.0) if abs(mean) < 1e-12 else no_interval
    error = math.sqrt(variance)
    half = float(stats.t.ppf((1 + level) / 2, df)) * error
    item_variance = max(0.0, ms_item - ms_rest) / (seeds * items)
    return Overall(
        seeds, items, mean, error, df, max(ms_seed, ms_rest) / items, item_variance, level,
        mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, df)),
    )  # fmt: skip


def envelope_half_width(tables: Sequence[Overall], seeds: float = math.inf) -> float:
    """The approximate half-width of the range that covers the intervals of all tables with so many seeds."""
    widths = [(one.mean, one.half_width(seeds)) for one in tables]
    return (max(mean + wide for mean, wide in widths) - min(mean - wide for mean, wide in widths)) / 2


def seeds_needed(tables: Sequence[Overall], half_width: float) -> int | None:
    """The fewest seeds, up to 1,000, with which `envelope_half_width` is at most `half_width`; None if no
    such number is enough."""
    if envelope_half_width(tables) > half_width:
        return None
    return next((n for n in range(2, 1001) if envelope_half_width(tables, n) <= half_width), None)


def half_width_of_answers(disagree: float, seeds: int, items: int, level: float) -> tuple[float, float]:
    """The half-width of the interval of a difference in accuracy, in points, when only the share of test
    items on which two runs disagree is known: at best (other items for each seed) and at worst (always the
    same items)."""
    error = 100 * math.sqrt(disagree / items)
    wide = float(stats.t.ppf((1 + level) / 2, items - 1)) * error
    return wide / math.sqrt(seeds), wide


def seeds_for_noise(noise: float, seeds: int, half_width: float, level: float) -> tuple[float, int | None]:
    """The half-width of the interval over so many seeds of runs with this standard deviation, and the fewest
    seeds, below 1,000, that reduce it to `half_width`; None if there is no such number."""

    def width(n: int) -> float:
        return float(stats.t.ppf((1 + level) / 2, n - 1)) * noise * math.sqrt(2 / n)

    return width(max(2, seeds)), next((n for n in range(2, 1000) if width(n) <= half_width), None)
