"""Error rates and coverage, simulated: what 5 % and 95 % promise is what happens.

A simulated share may stray from its nominal value by three binomial standard errors of the simulation, and
no further; rates that are bounds and not values may stray below as far as they like.
"""

import math

import numpy as np
import pytest
from scipy import stats

from oelm.study.statistics import (
    interquartile_mean,
    interval,
    probability_of_improvement,
    widened_level,
)


def three_sigma(share: float, repeats: int) -> float:
    return 3 * math.sqrt(share * (1 - share) / repeats)


@pytest.mark.parametrize("n", [20, 40])
def test_widening_makes_the_bootstrap_cover(n):
    repeats = 2000
    rows = np.random.default_rng(n).normal(size=(repeats, n))
    covered = {}
    for level in (0.95, widened_level(n)):
        low, high = stats.bootstrap(
            (rows,),
            np.mean,
            axis=1,
            method="BCa",
            n_resamples=999,
            confidence_level=level,
            batch=50,
            random_state=1,
        ).confidence_interval
        covered[level] = np.mean((low <= 0) & (high >= 0))
    plain, wide = covered.values()
    assert abs(wide - 0.95) <= three_sigma(0.95, repeats)
    if n == 20:
        assert plain < 0.95 - three_sigma(0.95, repeats), "otherwise there is nothing to mend"


def test_the_interval_of_one_arm_covers():
    repeats = 1500
    rows = 0.9 + 0.01 * np.random.default_rng(5).normal(size=(repeats, 5))
    results = [interval(row) for row in rows]
    covered = np.mean([result.low <= 0.9 <= result.high for result in results])
    assert abs(covered - 0.95) <= three_sigma(0.95, repeats)


def test_intervals_across_tasks_cover():
    repeats = 500
    rng = np.random.default_rng(10)
    centres = np.linspace(-1, 1, 5)[:, None]  # symmetric around 0, and so is their interquartile mean
    better = stats.norm.cdf(0.5 / math.sqrt(2))
    quartiles = improved = 0
    for _ in range(repeats):
        x, y = centres + rng.normal(size=(2, 5, 5))
        middle = interquartile_mean(y, resamples=1000)
        quartiles += middle.low <= 0 <= middle.high
        chance = probability_of_improvement(x + 0.5, y, resamples=1000)
        improved += chance.low <= better <= chance.high
    assert abs(quartiles / repeats - 0.95) <= three_sigma(0.95, repeats)
    assert improved / repeats >= 0.95 - three_sigma(0.95, repeats)  # bounded by 0 and 1, it errs to the wide
