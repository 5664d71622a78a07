"""Seeds and items together, against simulations, scipy's one-way tests and jackknives done by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from oelm.data.tasks import KINDS
from oelm.data.tasks.classification import classification_metrics
from oelm.errors import UserError
from oelm.study.item_values import item_values
from oelm.study.two_way import overall, seeds_needed


def drawn(rng, seeds, items, by_seed, by_item, rest):
    """A table of differences whose true mean is 0; the last three are standard deviations."""
    return (
        rng.normal(0, by_seed, (seeds, 1))
        + rng.normal(0, by_item, items)
        + rng.normal(0, rest, (seeds, items))
    )


@pytest.mark.parametrize("seeds", [5, 20])
@pytest.mark.parametrize(("by_seed", "by_item", "rest"), [(0.1, 0.0, 1.0), (0.1, 0.3, 0.7), (0.0, 0.3, 1.0)])
def test_it_covers_the_truth_as_often_as_it_says(seeds, by_seed, by_item, rest):
    rng = np.random.default_rng(seeds)
    found = [overall(drawn(rng, seeds, 300, by_seed, by_item, rest)) for _ in range(1000)]
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert 0.93 < covered < 0.985
    rejected = np.mean([one.p < 0.05 for one in found])
    assert rejected == pytest.approx(1 - covered)  # p and interval are one statement


def test_without_noise_of_items_it_is_the_test_over_seeds():
    rng = np.random.default_rng(0)
    table = np.repeat(rng.normal(0.3, 1, (6, 1)), 50, axis=1)
    found, by_t = overall(table), stats.ttest_1samp(table[:, 0], 0)
    assert found.p == pytest.approx(by_t.pvalue)
    assert (found.low, found.high) == pytest.approx(by_t.confidence_interval(0.95))
    assert found.share_items == pytest.approx(0, abs=1e-9)


def test_with_identical_seeds_it_is_the_test_over_items():
    rng = np.random.default_rng(0)
    table = np.repeat(rng.normal(0.3, 1, (1, 80)), 7, axis=0)
    found, by_t = overall(table), stats.ttest_1samp(table[0], 0)
    assert found.p == pytest.approx(by_t.pvalue)
    assert (found.low, found.high) == pytest.approx(by_t.confidence_interval(0.95))
    assert found.share_items == pytest.approx(1)
    assert seeds_needed([found], 0.9 * (found.high - found.mean)) is None  # no number of seeds narrows it


def test_a_large_cluster_counts_for_its_items():
    rng = np.random.default_rng(1)
    sizes = np.array([1, 5, 2, 9, 1, 3])
    table = rng.normal(size=(4, 6))
    mean = (table * sizes).sum() / (4 * sizes.sum())
    assert overall(table, sizes).mean == pytest.approx(mean)
    assert overall(table, np.full(6, 3.0)) == overall(table)


def test_arms_that_agree_or_differ_by_a_constant_have_no_interval():
    same = overall(np.zeros((5, 10)))
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    apart = overall(np.full((5, 10), 2.0))
    assert (apart.mean, apart.low, apart.p) == (2, None, None)
    assert overall(np.ones((1, 10))).p is None and overall(np.ones((10, 1))).p is None
    with pytest.raises(UserError, match="finite"):
        overall([[1.0, math.nan]])


def test_equivalence_is_the_90_percent_interval_within_the_margin():
    found = overall(drawn(np.random.default_rng(3), 8, 200, 0.2, 0.2, 1.0))
    narrow = overall(drawn(np.random.default_rng(3), 8, 200, 0.2, 0.2, 1.0), level=0.90)
    edge = max(abs(narrow.low), abs(narrow.high))
    assert found.margin_p(edge) == pytest.approx(0.05)
    assert found.margin_p(2 * edge) < 0.05 < found.margin_p(0.5 * edge)


def test_the_planned_number_of_seeds_gives_the_width():
    rng = np.random.default_rng(5)
    pilot = overall(drawn(rng, 200, 400, 0.3, 0.1, 1.0))  # its variances are nearly the true ones
    needed = seeds_needed([pilot], 0.15)
    widths = [overall(drawn(rng, needed, 400, 0.3, 0.1, 1.0)) for _ in range(200)]
    assert np.mean([(one.high - one.low) / 2 for one in widths]) == pytest.approx(0.15, rel=0.1)


def test_pseudo_values_are_those_of_leaving_clusters_out():
    rng = np.random.default_rng(0)
    groups = np.array([3, 3, 0, 1, 1, 1, 2, 4, 4, 5, 6, 6])
    labels, predictions = rng.integers(0, 3, 12), rng.integers(0, 3, 12)
    arrays = {"ids": np.arange(12), "groups": groups, "labels": labels, "predictions": predictions}

    def f1(keep):
        return classification_metrics(labels[keep], predictions[keep], 3)["f1_macro"]

    found = item_values("f1_macro", arrays)
    whole = f1(np.full(12, True))
    left = np.array([f1(groups != group) for group in np.unique(groups)])
    pseudo = 7 * whole - 6 * left
    np.testing.assert_allclose(found.values, pseudo - pseudo.mean() + whole)
    assert found.values.mean() == pytest.approx(whole) and found.items == 12


def absolute(metric, arrays):
    return abs(arrays["labels"] - arrays["predictions"]), None


def test_other_metrics_by_cluster(monkeypatch):
    rng = np.random.default_rng(1)
    n = 40
    groups, ids = np.sort(rng.integers(0, 15, n)), np.arange(n)
    values, numbers = rng.normal(size=n), rng.normal(size=n)
    tokens = rng.integers(1, 9, n)
    entities, predicted = rng.integers(0, 4, n), rng.integers(0, 4, n)
    right = np.minimum(entities, predicted)
    arrays = {
        "ids": ids, "groups": groups, "labels": values, "predictions": numbers, "scores": 3.0 * tokens,
        "tokens": tokens, "entities": entities, "entities_predicted": predicted, "entities_right": right,
    }  # fmt: skip
    expected = {
        "rmse": 0.5 * math.log(((values - numbers) ** 2).mean()),
        "pearson": stats.pearsonr(values, numbers)[0],
        "entity_f1": 2 * right.sum() / (entities + predicted).sum(),
        "perplexity": 3.0,
    }
    for metric, value in expected.items():
        found = item_values(metric, arrays)
        assert len(found.values) == len(np.unique(groups)), metric
        assert np.average(found.values, weights=found.sizes) == pytest.approx(value), metric
    # A plugin's mean that is better smaller is compared by its logarithm, too, as its runs' scores are.
    monkeypatch.setitem(KINDS, "absolute", SimpleNamespace(metrics={"mae": False}, item_scores=absolute))
    found = item_values("mae", arrays)
    mae = abs(values - numbers).mean()
    assert np.average(found.values, weights=found.sizes) == pytest.approx(math.log(mae))
    assert item_values("accuracy", {"ids": ids}) is None and item_values("f1_macro", {"ids": ids}) is None


def test_the_jackknife_knows_how_f1_varies():
    """Its interval over items covers the true macro F1 about as often as it says."""
    rng = np.random.default_rng(2)

    def f1(n):
        labels = (rng.random(n) < 0.3).astype(int)
        return {"ids": np.arange(n), "labels": labels, "predictions": labels ^ (rng.random(n) < 0.15)}

    truth = item_values("f1_macro", f1(400_000)).values.mean()
    hits = 0
    for _ in range(300):
        values = item_values("f1_macro", f1(400)).values
        hits += abs(values.mean() - truth) < stats.t.ppf(0.975, 399) * stats.sem(values)
    assert 0.92 < hits / 300 < 0.98
