"""Every statistic against scipy, statsmodels or a value worked by hand, and the properties it must have."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats import multitest

from oelm.errors import UserError
from oelm.study.statistics import (
    area_under_curve,
    expected_best,
    holm,
    interquartile_mean,
    interval,
    lr_robustness,
    probability_of_improvement,
)

# Scores as they are reported, to four places.
scores = st.integers(-10_000, 10_000).map(lambda n: n / 10_000)
few = st.lists(scores, min_size=2, max_size=12)


def differing(values):
    assume(len(set(values)) > 1)
    return values


@pytest.mark.parametrize(
    ("values", "said"),
    [([], "0 of 0"), ([0.1, math.nan], "1 of 2"), ([0.1, None, math.inf], "2 of 3"), ([[0.1, 0.2]], "shape")],
)
def test_values_that_cannot_be_used_are_refused(values, said):
    with pytest.raises(UserError, match=said):
        interval(values)


def test_one_arm_has_a_mean_and_a_t_interval():
    arm = [0.91, 0.93, 0.90, 0.92]
    result = interval(arm)
    expected = stats.t.interval(0.95, 3, np.mean(arm), stats.sem(arm))
    assert (result.low, result.high) == pytest.approx(expected)
    assert (result.n, result.mean, result.sd) == pytest.approx((4, 0.915, np.std(arm, ddof=1)))
    assert asdict(interval([0.9])) == {"n": 1, "mean": 0.9, "sd": None, "low": None, "high": None}
    assert asdict(interval([0.9] * 3))["low"] is None


def test_holm_by_hand():
    # Sorted .01 .02 .03 .04: times 4, 3, 2, 1, and never below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    p_values = np.random.default_rng(0).random(30) ** 4
    assert holm(p_values.tolist()) == pytest.approx(multitest.multipletests(p_values, method="holm")[1])


@given(st.lists(st.floats(0, 1) | st.none(), max_size=8), st.integers(0, 3))
def test_holm_counts_what_was_not_tested_as_p_1(p_values, missing):
    adjusted = holm(p_values, missing)
    assert [p is None for p in adjusted] == [p is None for p in p_values]
    whole = holm([1.0 if p is None else p for p in p_values] + [1.0] * missing)
    pairs = [(before, after) for before, after in zip(p_values, adjusted, strict=True) if before is not None]
    assert [after for _, after in pairs] == [
        after for before, after in zip(p_values, whole, strict=False) if before is not None
    ]
    assert all(before <= after <= 1 for before, after in pairs)


# Items of one test set.


# Across tasks.


def test_interquartile_mean_is_the_trimmed_mean_of_all_runs():
    tasks = [[0.1, 0.9, 0.5, 0.4], [0.2, 0.6, 0.8], [0.7]]
    assert interquartile_mean(tasks).value == stats.trim_mean(np.concatenate(tasks), 0.25)
    assert interquartile_mean([[0, 1, 2, 3, 4, 5, 6, 100]]).value == 3.5  # (2 + 3 + 4 + 5) / 4


def test_runs_are_drawn_within_their_task():
    # The tasks are far apart and the runs of each alike: drawn over all tasks, the interval would be huge.
    spread = np.array([-0.01, 0.0, 0.01])
    result = interquartile_mean([task + spread for task in (0.0, 10.0, 20.0, 30.0)])
    assert result.value == pytest.approx(15)
    assert 14.9 < result.low < 15 < result.high < 15.1


def test_probability_of_improvement_is_mann_whitney():
    rng = np.random.default_rng(2)
    x, y = [rng.integers(0, 6, 7), rng.integers(2, 9, 4)], [rng.integers(0, 6, 5), rng.integers(0, 9, 6)]
    expected = [stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(x, y, strict=True)]
    there, back = probability_of_improvement(x, y), probability_of_improvement(y, x)
    assert there.value == pytest.approx(np.mean(expected))
    assert back.value == pytest.approx(1 - there.value)
    assert there.low < there.value < there.high
    assert (back.low, back.high) == pytest.approx((1 - there.high, 1 - there.low), abs=0.06)
    assert probability_of_improvement([[1, 1]], [[1, 1, 1]]).value == 0.5


@pytest.mark.parametrize("runs", [[[1.0], [2.0]], [[1.0, 2.0], [3.0]], [[1.0, 1.0], [2.0, 2.0]]])
def test_too_few_runs_across_tasks_give_no_interval(runs):
    for result in (interquartile_mean(runs), probability_of_improvement(runs, [[0.0, 0.0]] * 2)):
        assert result.low is result.high is None


# Tuning and learning curves.


def test_expected_best_by_hand():
    # Of 1, 2, 4: one draw is 7/3. Best of two: 1 with 1/9, 2 with 3/9, 4 with 5/9. Of three: 1, 7, 19 of 27.
    assert expected_best([4, 1, 2]) == pytest.approx([7 / 3, 27 / 9, 91 / 27])
    # The least of two: 1 with 5/9, 2 with 3/9, 4 with 1/9.
    assert expected_best([4, 1, 2], larger_is_better=False)[:2] == pytest.approx([7 / 3, 15 / 9])


@given(st.lists(scores, min_size=1, max_size=40))
def test_expected_best_rises_from_the_mean_towards_the_best(values):
    curve = expected_best(values)
    assert len(curve) == len(values)
    assert curve[0] == pytest.approx(np.mean(values))
    assert (np.diff(curve) >= -1e-12).all() and curve[-1] <= max(values) + 1e-12
    negated = expected_best([-value for value in values], larger_is_better=False)
    assert -negated == pytest.approx(curve)


def test_area_under_a_curve_is_on_the_scale_of_the_metric():
    assert area_under_curve([0, 10, 40], [0.2, 0.6, 0.8]) == pytest.approx((10 * 0.4 + 30 * 0.7) / 40)
    assert area_under_curve([100, 200, 700], [0.9, 0.9, 0.9]) == pytest.approx(0.9)


RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]


def test_lr_robustness_by_hand():
    result = lr_robustness(RATES, [0.899, 0.90, 0.89, 0.70, 0.895])
    assert (result.best_rate, result.best_score) == (3e-4, 0.90)
    assert (result.low, result.high) == (1e-4, 1e-3), "1e-2 is good again, but not without a gap"
    assert result.ratio == pytest.approx(10)
    # 9e-4 lies log(3) / log(10/3) of the way from 3e-4 to 1e-3.
    assert result.lost == pytest.approx(0.01 * math.log(3) / math.log(10 / 3))
    assert lr_robustness(RATES, [0.8, 0.9, 0.9, 0.8, 0.1]).best_rate == 3e-4, "of equals the smallest"
    # In binary 0.7 is a little less than 0.8 - 0.1.
    assert lr_robustness([1e-3, 2e-3], [0.8, 0.7], tolerance=0.1).high == 2e-3


def test_lr_robustness_where_less_is_better():
    perplexities = [30.0, 21.0, 20.0, 24.0, 90.0]
    result = lr_robustness(RATES, perplexities, larger_is_better=False, tolerance=1.0)
    assert (result.best_rate, result.best_score, result.low, result.high) == (1e-3, 20, 3e-4, 1e-3)
    assert result.lost == pytest.approx(4), "3e-3 is on the grid"
    turned = lr_robustness(RATES, [-value for value in perplexities], tolerance=1.0)
    assert (turned.low, turned.high, turned.lost) == (result.low, result.high, pytest.approx(result.lost))


def test_a_grid_point_is_found_in_spite_of_rounding():
    # 3 * 3e-4 falls short of 9e-4 by rounding, 3 * 0.1 goes past 0.3: neither is outside or between.
    for best in (3e-4, 0.1):
        result = lr_robustness([best, 3 * best * (1 - 1e-15)], [0.9, 0.6])
        assert result.lost == pytest.approx(0.3)
        assert lr_robustness([best, 3 * best * (1 + 1e-15)], [0.9, 0.6]).lost == pytest.approx(0.3)


def test_what_a_larger_rate_loses_may_be_unknown():
    beyond = lr_robustness([1e-3, 2e-3], [0.9, 0.8])
    assert (beyond.lost, beyond.lost_unknown) == (None, "outside_grid")
    failed = lr_robustness(RATES, [0.90, 0.90, None, 0.90, None])
    assert (failed.best_rate, failed.low, failed.high) == (1e-4, 1e-4, 3e-4)
    assert failed.lost == pytest.approx(0)
    broken = lr_robustness(RATES, [0.80, 0.90, None, 0.90, None])
    assert (broken.lost, broken.lost_unknown) == (None, "run_failed")
    exactly = lr_robustness([1e-3, 3e-3], [0.9, None])
    assert (exactly.lost, exactly.lost_unknown) == (None, "run_failed")
