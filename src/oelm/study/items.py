"""Two methods on the same test items: how much another choice of test items could change.

Scores are one number per item (1 for right and 0 for wrong, or any real number), in one row per seed. The
seeds are fixed and the items are thought of as drawn: an interval here says how the result would vary with
another test set and the same trained models. Variation between seeds is in `statistics.paired`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from oelm.errors import UserError
from oelm.study.statistics import ROUNDING, SEED, Array, constant, finite, widened

FEW_VALUES = 1_000  # distinct scores; with more, drawing items is faster than drawing counts
EXACT_BELOW = 25  # items on which the two differ; from here on chi-square is close enough


@dataclass(frozen=True)
class ItemDifference:
    """The mean difference over items; `low` and `high` are None without an interval."""

    seeds: int
    items: int
    mean: float
    low: float | None
    high: float | None


def item_bootstrap(scores_a: Any, scores_b: Any, resamples: int = 2000) -> ItemDifference:
    """The mean of A - B with its percentile bootstrap interval over items, `widened` for few items.

    Arrays are (seeds, items), or (items,) for one seed. An item is drawn for both arms and all seeds at
    once, because it is equally hard for all. Arms that agree on every item give [0, 0]; one item, or the
    same difference other than 0 on all, gives no interval.
    """
    a, b = _pair(scores_a, scores_b)
    per_item = (a - b).mean(axis=0)
    seeds, items = a.shape
    mean = float(per_item.mean())
    if items == 1:
        return ItemDifference(seeds, items, mean, None, None)
    if constant(per_item):
        edge = 0.0 if abs(mean) <= ROUNDING else None
        return ItemDifference(seeds, items, mean, edge, edge)
    rng = np.random.default_rng(SEED)
    values, first, counts = np.unique(per_item, return_index=True, return_counts=True)
    if len(values) < FEW_VALUES:  # right or wrong: only how often each value is drawn matters
        order = np.argsort(first)  # in order of appearance: swapping the arms then mirrors the interval
        means = rng.multinomial(items, counts[order] / items, size=resamples) @ values[order] / items
    else:  # in parts of some megabytes: all at once would take gigabytes, one at a time is slow
        rows = max(1, 2**20 // items)
        sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
        parts = [per_item[rng.integers(items, size=(size, items))].mean(axis=1) for size in sizes]
        means = np.concatenate(parts)
    level = widened(items)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return ItemDifference(seeds, items, mean, float(low), float(high))


@dataclass(frozen=True)
class McNemar:
    """Items that only A has right (`b`) and only B has right (`c`), and the two-sided p of "equally many"."""

    b: int
    c: int
    p: float


@dataclass(frozen=True)
class McNemarSeeds:
    """McNemar's test of each seed, and one p for all of them."""

    seeds: tuple[McNemar, ...]
    p: float


def mcnemar(correct_a: Any, correct_b: Any) -> McNemar:
    """McNemar's test of one seed: exact where fewer than 25 items differ, else corrected chi-square."""
    a, b = _pair(correct_a, correct_b)
    only_a, only_b = int(np.count_nonzero(a > b)), int(np.count_nonzero(b > a))
    differ = only_a + only_b
    if differ == 0:
        return McNemar(0, 0, 1.0)
    if differ < EXACT_BELOW:
        return McNemar(only_a, only_b, float(stats.binomtest(only_a, differ).pvalue))
    # The correction moves the difference towards 0 and not past it.
    distance = max(abs(only_a - only_b) - 1, 0)
    return McNemar(only_a, only_b, float(stats.chi2.sf(distance**2 / differ, 1)))


def mcnemar_seeds(correct_a: Any, correct_b: Any) -> McNemarSeeds:
    """McNemar's test for each seed of (seeds, items), and Rüger's p for all: a majority must agree.

    Seeds share their items, so their p values depend on each other and may not be pooled. The k-th smallest
    of n p values times n / k is a p value whatever the dependence; k is the smallest majority.
    """
    a, b = _pair(correct_a, correct_b)
    tests = tuple(mcnemar(*rows) for rows in zip(a, b, strict=True))
    majority = len(tests) // 2 + 1
    p = sorted(test.p for test in tests)[majority - 1] * len(tests) / majority
    return McNemarSeeds(tests, min(1.0, p))


def _pair(scores_a: Any, scores_b: Any) -> tuple[Array, Array]:
    a = np.atleast_2d(finite("scores of A", scores_a, (1, 2)))
    b = np.atleast_2d(finite("scores of B", scores_b, (1, 2)))
    if a.shape != b.shape:
        raise UserError(f"scores of A are {a.shape} (seeds, items), of B {b.shape}; give the same of both")
    return a, b
