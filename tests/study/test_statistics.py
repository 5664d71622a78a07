"""Every statistic against scipy, statsmodels or a value worked by hand, and the properties it must have."""

import math
import time
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats import contingency_tables, multitest, weightstats

from oelm.errors import UserError
from oelm.study.items import EXACT_BELOW, item_bootstrap, mcnemar, mcnemar_seeds
from oelm.study.statistics import (
    area_under_curve,
    equivalence,
    expected_best,
    holm,
    interquartile_mean,
    interval,
    lr_robustness,
    paired,
    probability_of_improvement,
    widened,
)

FIVE = [0.012, -0.003, 0.008, 0.015, 0.001]
MANY = np.random.default_rng(7).exponential(size=24) - 0.6

# Scores as they are reported, to four places.
scores = st.integers(-10_000, 10_000).map(lambda n: n / 10_000)
few = st.lists(scores, min_size=2, max_size=12)
enough = st.lists(scores, min_size=20, max_size=30)


def differing(values):
    assume(len(set(values)) > 1)
    return values


# One arm and pairs of arms.


def test_few_pairs_get_a_t_test_and_a_t_interval():
    result = paired(FIVE)
    assert result.p == pytest.approx(stats.ttest_rel(FIVE, np.zeros(5)).pvalue)
    mean, error = np.mean(FIVE), stats.sem(FIVE)
    assert (result.low, result.high) == pytest.approx(stats.t.interval(0.95, 4, mean, error))
    assert (result.n, result.mean, result.sd) == pytest.approx((5, 0.0066, np.std(FIVE, ddof=1)))
    assert (result.test, result.interval) == ("paired t", "t")


def test_many_pairs_get_a_sign_flip_test_and_a_bca_interval():
    result = paired(MANY)
    flips = np.random.default_rng(1).choice([-1, 1], (100_000, len(MANY)))
    exact = np.mean(np.abs((flips * MANY).mean(axis=1)) >= abs(MANY.mean()))
    # Both are drawn; three standard errors of the rougher one, with its 9,999 draws.
    assert abs(result.p - exact) < 3 * math.sqrt(exact * (1 - exact) / 9999)
    # The same interval from another seed agrees to the noise of its 9,999 draws; BCa leans with the skew.
    other = stats.bootstrap(
        (MANY,), np.mean, method="BCa", confidence_level=widened(len(MANY)), random_state=5
    ).confidence_interval
    width = result.high - result.low
    assert (result.low, result.high) == pytest.approx(tuple(other), abs=0.05 * width)
    assert result.high - result.mean > 1.1 * (result.mean - result.low)
    assert (result.test, result.interval) == ("sign-flip permutation", "BCa bootstrap")


def test_the_interval_does_not_jump_where_the_method_changes():
    normal = stats.norm.ppf((np.arange(20) + 0.5) / 20)
    result = paired(normal + 1)
    low, high = stats.t.interval(0.95, 19, 1, stats.sem(normal))
    assert (result.low, result.high) == pytest.approx((low, high), abs=0.05 * (high - low))
    assert paired(normal[:19] + 1).test == "paired t"


@given(few | enough, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_neither_the_order_of_pairs_nor_of_arms_matters(values, random):
    differing(values)
    assume(math.fsum(values) != 0)
    shuffled = values.copy()
    random.shuffle(shuffled)
    result = paired(values)
    assert paired(shuffled) == result
    swapped = paired([-value for value in values])
    assert (swapped.mean, swapped.low, swapped.high) == (-result.mean, -result.high, -result.low)
    assert (swapped.sd, swapped.p, swapped.test) == (result.sd, result.p, result.test)


@given(few, scores)
def test_a_shift_moves_the_interval_and_keeps_its_width(values, shift):
    differing(values)
    for function in (paired, interval):
        before, after = function(values), function([value + shift for value in values])
        moved = (before.mean + shift, before.low + shift, before.high + shift, before.sd)
        assert (after.mean, after.low, after.high, after.sd) == pytest.approx(moved, abs=1e-9)


@given(few)
def test_an_interval_without_zero_is_a_significant_difference(values):
    differing(values)
    result = paired(values)
    assume(abs(result.p - 0.05) > 1e-9)
    assert (result.p < 0.05) == (result.low > 0 or result.high < 0)


def test_what_did_not_vary_is_not_called_significant():
    alone = paired([0.02])
    assert (alone.n, alone.mean) == (1, 0.02)
    assert alone.sd is alone.low is alone.high is alone.p is None
    nothing = paired([0.0, 0.0, 0.0])
    assert (nothing.mean, nothing.low, nothing.high, nothing.p) == (0, 0, 0, 1)
    # 0.3 - 0.2 and 0.2 - 0.1 are not the same number, but the same difference.
    for same in ([0.3 - 0.2, 0.2 - 0.1, 0.1], [0.5] * 30):
        result = paired(same)
        assert result.mean == pytest.approx(same[0])
        assert result.low is result.high is result.p is None
        assert "the same" in result.test and "the same" in result.interval
    rounded = paired([0.3 - 0.2 - 0.1, 0.2 - 0.1 - 0.1, 1e-17])
    assert (rounded.mean, rounded.p) == (0, 1)


@pytest.mark.parametrize("function", [paired, interval, lambda values: equivalence(values, 1.0)])
@pytest.mark.parametrize(
    ("values", "said"),
    [([], "0 of 0"), ([0.1, math.nan], "1 of 2"), ([0.1, None, math.inf], "2 of 3"), ([[0.1, 0.2]], "shape")],
)
def test_values_that_cannot_be_used_are_refused(function, values, said):
    with pytest.raises(UserError, match=said):
        function(values)


def test_one_arm_has_a_mean_and_a_t_interval():
    arm = [0.91, 0.93, 0.90, 0.92]
    result = interval(arm)
    expected = stats.t.interval(0.95, 3, np.mean(arm), stats.sem(arm))
    assert (result.low, result.high) == pytest.approx(expected)
    assert (result.n, result.mean, result.sd) == pytest.approx((4, 0.915, np.std(arm, ddof=1)))
    assert asdict(interval([0.9])) == {"n": 1, "mean": 0.9, "sd": None, "low": None, "high": None}
    assert asdict(interval([0.9] * 3))["low"] is None


# Equivalence and families.


@given(few, st.floats(0.001, 2))
def test_equivalence_is_statsmodels_tost(values, margin):
    differing(values)
    result = equivalence(values, margin)
    expected = weightstats.ttost_paired(np.array(values), np.zeros(len(values)), -margin, margin)[0]
    assert result.p == pytest.approx(expected)
    low, high = stats.t.interval(0.90, len(values) - 1, np.mean(values), stats.sem(values))
    assert (result.low, result.high) == pytest.approx((low, high))
    assume(abs(result.p - 0.05) > 1e-9)
    assert result.equivalent == (-margin < low and high < margin)
    swapped = equivalence([-value for value in values], margin)
    assert (swapped.p, swapped.equivalent) == (pytest.approx(result.p), result.equivalent)


def test_equivalence_that_cannot_be_tested_is_not_claimed():
    for values in ([0.0], [0.0, 0.0, 0.0], [0.001] * 5):
        result = equivalence(values, 0.5)
        assert (result.p, result.low, result.high, result.equivalent) == (None, None, None, False)


def test_holm_by_hand():
    # Sorted .01 .02 .03 .04: times 4, 3, 2, 1, and never below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    p_values = np.random.default_rng(0).random(30) ** 4
    assert holm(p_values.tolist()) == pytest.approx(multitest.multipletests(p_values, method="holm")[1])


@given(st.lists(st.floats(0, 1) | st.none(), max_size=8))
def test_holm_leaves_out_what_was_not_tested(p_values):
    adjusted = holm(p_values)
    assert [p is None for p in adjusted] == [p is None for p in p_values]
    tested = [p for p in p_values if p is not None]
    assert [p for p in adjusted if p is not None] == holm(tested)
    assert all(before <= after <= 1 for before, after in zip(tested, holm(tested), strict=True))


# Items of one test set.


def test_item_bootstrap_is_scipys_of_the_item_means():
    rng = np.random.default_rng(3)
    a, b = rng.random((4, 300)) < 0.9, rng.random((4, 300)) < 0.8
    result = item_bootstrap(a, b)
    per_item = a.mean(axis=0) - b.mean(axis=0)
    expected = stats.bootstrap(
        (per_item,), np.mean, method="percentile", confidence_level=widened(300), random_state=9
    ).confidence_interval
    assert result.mean == pytest.approx(per_item.mean())
    width = result.high - result.low
    assert (result.low, result.high) == pytest.approx(tuple(expected), abs=0.06 * width)
    assert (result.seeds, result.items) == (4, 300)
    assert item_bootstrap(a, b) == result, "the same numbers give the same interval"


def test_an_item_is_drawn_for_all_seeds_and_both_arms_at_once():
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=200), rng.normal(size=200)
    once, copied = item_bootstrap(a, b), item_bootstrap(np.tile(a, (5, 1)), np.tile(b, (5, 1)))
    assert (once.low, once.high) == pytest.approx((copied.low, copied.high)), (
        "copies of a seed tell nothing new"
    )
    difficulty = 100 * rng.normal(size=200)
    shared = item_bootstrap(a + difficulty, b + difficulty)
    assert (shared.low, shared.high) == pytest.approx((once.low, once.high)), "how hard an item is cancels"


@given(st.lists(st.tuples(scores, scores), min_size=2, max_size=30))
@settings(max_examples=30)
def test_swapping_arms_turns_the_item_interval_around(pairs):
    a, b = np.array(pairs).T
    assume(np.ptp(a - b) > 1e-6)
    there, back = item_bootstrap(a, b, resamples=200), item_bootstrap(b, a, resamples=200)
    assert (back.mean, back.low, back.high) == pytest.approx(
        (-there.mean, -there.high, -there.low), abs=1e-12
    )


def test_items_that_do_not_vary():
    same = item_bootstrap([1, 0, 1], [1, 0, 1])
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    for a, b in (([1], [0]), ([1, 1, 1], [0, 0, 0])):
        result = item_bootstrap(a, b)
        assert (result.mean, result.low, result.high) == (1, None, None)


def test_item_bootstrap_of_a_large_test_set_is_fast():
    rng = np.random.default_rng(0)
    a, b = rng.random((10, 25_000)), rng.random((10, 25_000))
    start = time.process_time()
    item_bootstrap(a, b)
    assert time.process_time() - start < 2.0  # 0.2 s on one free core; drawing each seed anew takes 4


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 5), st.integers(0, 5))
@example(EXACT_BELOW, 0, 0, 0)
@example(EXACT_BELOW - 1, 0, 0, 0)
def test_mcnemar_is_statsmodels(b, c, both, neither):
    assume(b + c + both + neither > 0)
    a_right = np.repeat([1, 0, 1, 0], [b, c, both, neither])
    b_right = np.repeat([0, 1, 1, 0], [b, c, both, neither])
    result = mcnemar(a_right, b_right)
    assert (result.b, result.c) == (b, c)
    assert mcnemar(b_right, a_right).p == result.p
    if b == c:
        assert result.p == pytest.approx(1)  # statsmodels' correction goes past 0 here, to p < 1
    else:
        table = [[both, b], [c, neither]]
        expected = contingency_tables.mcnemar(table, exact=b + c < EXACT_BELOW, correction=True)
        assert result.p == pytest.approx(expected.pvalue)


def test_a_majority_of_seeds_decides():
    # Six items on which only A is right give p = 2 / 2^6; equal rows give 1.
    strong, none = np.ones(6), np.zeros(6)
    zero = np.zeros((3, 6))
    two_of_three = mcnemar_seeds([strong, none, strong], zero)
    assert [test.p for test in two_of_three.seeds] == [1 / 32, 1, 1 / 32]
    assert two_of_three.p == pytest.approx(1 / 32 * 3 / 2)
    assert mcnemar_seeds([strong, none, none], zero).p == 1
    assert mcnemar_seeds([strong, strong], zero[:2]).p == 1 / 32
    assert mcnemar_seeds([strong, none], zero[:2]).p == 1
    assert mcnemar_seeds(strong, zero[0]).p == mcnemar(strong, zero[0]).p


def test_items_that_cannot_be_compared_are_refused():
    with pytest.raises(UserError, match="give the same of both"):
        item_bootstrap(np.ones((2, 5)), np.ones((2, 6)))
    with pytest.raises(UserError, match="scores of B: 1 of 2"):
        item_bootstrap([1, 0], [1, math.nan])


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
