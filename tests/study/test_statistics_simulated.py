"""Error rates and coverage, simulated: what 5 % and 95 % promise is what happens.

A simulated share may stray from its nominal value by three binomial standard errors of the simulation, and
no further; rates that are bounds and not values may stray below as far as they like.
"""

import math

import numpy as np
import pytest
from scipy import stats

from oelm.study.items import item_bootstrap, mcnemar_seeds
from oelm.study.statistics import (
    equivalence,
    holm,
    interquartile_mean,
    interval,
    paired,
    probability_of_improvement,
    widened,
)


def three_sigma(share: float, repeats: int) -> float:
    return 3 * math.sqrt(share * (1 - share) / repeats)


def differences(kind: str, repeats: int, n: int) -> np.ndarray:
    """Paired differences without an effect, of spread about 1.

    "skewed" arms have gamma-distributed scores. Their differences are heavy-tailed yet symmetric, as
    differences of two arms alike in distribution are: mildly non-normal, and no more is claimed.
    """
    rng = np.random.default_rng(n)
    if kind == "normal":
        return rng.normal(size=(repeats, n))
    a, b = rng.gamma(4.0, 0.35, size=(2, repeats, n))
    return a - b


@pytest.mark.parametrize("n", [5, 10])
@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_few_pairs_keep_their_promises(kind, n):
    repeats = 2000
    results = [paired(row) for row in differences(kind, repeats, n)]
    false_alarms = np.mean([result.p < 0.05 for result in results])
    covered = np.mean([result.low <= 0 <= result.high for result in results])
    assert abs(false_alarms - 0.05) <= three_sigma(0.05, repeats)
    assert abs(covered - 0.95) <= three_sigma(0.95, repeats)


def test_pairs_find_an_effect_that_arms_apart_hide():
    # The spread between seeds is ten times that of the differences: pairing is what makes n = 5 worth while.
    rng = np.random.default_rng(5)
    repeats = 500
    seeds, a, b = rng.normal(size=(3, repeats, 5))
    x, y = 10 * seeds + a + 3, 10 * seeds + b
    found = np.mean([paired(row).p < 0.05 for row in x - y])
    # The power of the t test for a difference of 3 with spread sqrt(2).
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, 4), 4, 3 / math.sqrt(2) * math.sqrt(5))
    assert abs(found - power) <= three_sigma(power, repeats)
    assert np.mean(stats.ttest_ind(x, y, axis=1).pvalue < 0.05) < 0.2


def test_many_pairs_keep_their_promises():
    repeats, n = 300, 20
    results = [paired(row) for row in differences("skewed", repeats, n)]
    assert {result.test for result in results} == {"sign-flip permutation"}
    false_alarms = np.mean([result.p < 0.05 for result in results])
    covered = np.mean([result.low <= 0 <= result.high for result in results])
    assert abs(false_alarms - 0.05) <= three_sigma(0.05, repeats)
    assert abs(covered - 0.95) <= three_sigma(0.95, repeats)


@pytest.mark.parametrize("n", [20, 40])
def test_widening_makes_the_bootstrap_cover(n):
    repeats = 2000
    rows = differences("normal", repeats, n)
    covered = {}
    for level in (0.95, widened(n)):
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
    rows = 0.9 + 0.01 * differences("normal", repeats, 5)
    results = [interval(row) for row in rows]
    covered = np.mean([result.low <= 0.9 <= result.high for result in results])
    assert abs(covered - 0.95) <= three_sigma(0.95, repeats)


@pytest.mark.parametrize("n", [5, 10])
def test_equivalence_at_the_margin_is_claimed_at_most_one_time_in_twenty(n):
    repeats = 1000
    rows = differences("normal", repeats, n)
    for margin in (0.5, 4.0):
        for side in (-1, 1):
            claimed = np.mean([equivalence(row + side * margin, margin).equivalent for row in rows])
            assert claimed <= 0.05 + three_sigma(0.05, repeats)
            if margin == 4.0:  # so wide that only one of the two tests can fail: 5 % is a value here
                assert claimed >= 0.05 - three_sigma(0.05, repeats)


@pytest.mark.parametrize("effects", [(0, 0, 0, 0), (0, 0, 4, 6)])
@pytest.mark.parametrize("correlation", [0.0, 0.5])  # four methods against one baseline: 0.5
def test_holm_keeps_the_error_of_a_family_of_four(effects, correlation):
    repeats = 4000
    rng = np.random.default_rng(6)
    shared, own = rng.normal(size=(repeats, 1)), rng.normal(size=(repeats, 4))
    z = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own + effects
    p_values = 2 * stats.norm.sf(np.abs(z))
    null = np.array(effects) == 0
    adjusted = np.array([holm(row.tolist()) for row in p_values], dtype=float)
    allowed = 0.05 + three_sigma(0.05, repeats)
    assert np.mean((adjusted[:, null] < 0.05).any(axis=1)) <= allowed
    assert np.mean((p_values[:, null] < 0.05).any(axis=1)) > allowed, "without Holm it goes wrong"


def two_arms(rng: np.random.Generator, seeds: int, items: int, a: float, b: float):
    hard = rng.normal(size=items)  # as hard for every seed and both arms
    noise = rng.normal(size=(2, seeds, items))
    return noise[0] + a > hard, noise[1] + b > hard


@pytest.mark.parametrize(("seeds", "items"), [(1, 60), (5, 400)])
def test_item_intervals_of_correlated_classifiers_cover(seeds, items):
    repeats = 500
    rng = np.random.default_rng(8)
    truth = stats.norm.cdf(1.0 / math.sqrt(2)) - stats.norm.cdf(0.8 / math.sqrt(2))
    covered = 0
    for _ in range(repeats):
        result = item_bootstrap(*two_arms(rng, seeds, items, 1.0, 0.8), resamples=1000)
        covered += result.low <= truth <= result.high
    assert abs(covered / repeats - 0.95) <= three_sigma(0.95, repeats)


def test_mcnemar_over_dependent_seeds_keeps_its_error():
    repeats = 500
    rng = np.random.default_rng(9)
    false_alarms = np.mean([mcnemar_seeds(*two_arms(rng, 5, 300, 1.0, 1.0)).p < 0.05 for _ in range(repeats)])
    assert false_alarms <= 0.05 + three_sigma(0.05, repeats)
    found = np.mean([mcnemar_seeds(*two_arms(rng, 5, 300, 1.5, 0.8)).p < 0.05 for _ in range(50)])
    assert found > 0.9, "and a plain effect is seen"


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
