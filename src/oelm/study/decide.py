"""The rules by which a study decides: near-tied learning rates, several looks, collapsed runs, verdicts.

Pure functions of numbers. `benchmarks/verdicts.py` simulates the whole procedure with them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from scipy import stats

from oelm.study.two_way import Overall

LEVEL = 0.05
LOOKS = (5, 10, 15, 20)  # numbers of seeds at which `--until-decided` looks
MOST_NEAR_TIES = 2  # learning rates measured per arm
COLLAPSE_POINTS, COLLAPSE_MAD = 5.0, 6.0  # a run so far below its arm's median has collapsed
MANY = 3  # comparisons; with more than that, each needs MANY_SEEDS
FEWEST_SEEDS, MANY_SEEDS = 5, 10


def fewest_seeds(comparisons: int) -> int:
    """The seeds that a verdict needs, by how many comparisons the study planned."""
    return MANY_SEEDS if comparisons > MANY else FEWEST_SEEDS


def near_ties(scores: Mapping[float, Sequence[float]], noise: float, df: int) -> list[float]:
    """The learning rates that could be the best: the best one first, then the others within the noise.

    `scores` are those of the trials (larger is better) at each learning rate where none failed, `noise` is
    their standard deviation at one learning rate and `df` its degrees of freedom (`choice_noise`).
    """
    means = {lr: fmean(values) for lr, values in scores.items()}
    ranked = sorted(means, key=lambda lr: (-means[lr], lr))
    if not ranked or df < 1:
        return ranked[:1]
    runs = len(scores[ranked[0]])
    within = float(stats.t.ppf(0.90, df)) * noise * math.sqrt(2 / runs)
    return [lr for lr in ranked if means[ranked[0]] - means[lr] <= within]


def choice_noise(arms: Sequence[Mapping[float, Sequence[float]]]) -> tuple[float, int]:
    """The standard deviation of a trial's score at a fixed learning rate, pooled over the arms of a setting,
    and its degrees of freedom.

    Of each arm the best learning rate and its neighbours count: far from the best, runs vary more. Effects of
    the learning rate and of the seed are removed, as all learning rates were tried with the same seeds.
    """
    squares, df = 0.0, 0
    for scores in arms:
        lrs = sorted(scores)
        if not lrs:
            continue
        best = max(range(len(lrs)), key=lambda i: fmean(scores[lrs[i]]))
        rows = [list(scores[lr]) for lr in lrs[max(0, best - 1) : best + 2]]
        runs = len(rows[0])
        if len(rows) < 2 or runs < 2:
            continue
        total = fmean(fmean(row) for row in rows)
        by_seed = [fmean(row[k] for row in rows) for k in range(runs)]
        squares += sum((row[k] - fmean(row) - by_seed[k] + total) ** 2 for row in rows for k in range(runs))
        df += (len(rows) - 1) * (runs - 1)
    return (math.sqrt(squares / df), df) if df else (0.0, 0)


@dataclass(frozen=True)
class Combined:
    """A comparison over all combinations of its arms' near-tied learning rates: it claims only what holds for
    every combination."""

    mean: float  # of the combination of the two best learning rates
    low: float | None  # the envelope of the intervals
    high: float | None
    p: float | None  # the largest
    margin_p: float | None
    tables: tuple[Overall, ...] = ()  # of each combination


def combine(tables: Sequence[Overall], margin: float, looks: int = 1) -> Combined:
    """Combine the intervals of all combinations of near-tied learning rates, that of the best ones first. p
    is multiplied by the number of looks (Bonferroni)."""
    ends = [(one.low, one.high) for one in tables]
    p = [one.p for one in tables]
    tost = [one.margin_p(margin) for one in tables]
    signs = {math.copysign(1, one.mean) for one in tables}
    complete = all(value is not None for value in (*p, *tost)) and all(low is not None for low, _ in ends)
    if not complete:
        return Combined(tables[0].mean, None, None, None, None, tuple(tables))
    largest = 1.0 if len(signs) > 1 else max(value for value in p if value is not None)
    return Combined(
        tables[0].mean,
        min(low for low, _ in ends if low is not None),
        max(high for _, high in ends if high is not None),
        min(1.0, looks * largest),
        min(1.0, looks * max(value for value in tost if value is not None)),
        tuple(tables),
    )


def verdict(mean: float, p: float | None, margin_p: float | None) -> str:
    """From corrected p values: equivalent, better, worse or open ("undecided" in reports). A difference that
    is significantly within the margin is equivalent, whether it is significantly different from 0 or not."""
    if margin_p is not None and margin_p < LEVEL:
        return "equivalent"
    if p is not None and p < LEVEL:
        return "better" if mean > 0 else "worse"
    return "open"


def collapse_rate(collapses: int, runs: int) -> tuple[float, float]:
    """The exact (Clopper-Pearson) 95 % interval of the share of runs that collapse."""
    interval = stats.binomtest(collapses, runs).proportion_ci(1 - LEVEL, method="exact")
    return float(interval.low), float(interval.high)


def collapsed(points: Sequence[float]) -> list[int]:
    """The indices of runs that fell far below their arm's median (larger is better, in points)."""
    if len(points) < 3:
        return []
    middle = median(points)
    spread = median(abs(value - middle) for value in points)
    return [
        index
        for index, value in enumerate(points)
        if middle - value > max(COLLAPSE_POINTS, COLLAPSE_MAD * spread)
    ]
