"""What `oelm study --dry-run` says seeds and test items can show: by hand from the noise and the items."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from oelm.study import enough
from oelm.study.decide import choice_noise
from oelm.study.design import make_study


def told(monkeypatch, *, metric="accuracy", items=900, clusters=None, trials=(), **table):
    """The sentence on a task with so many test items in so many clusters."""
    groups = np.arange(items) % (clusters or items)
    monkeypatch.setattr(enough, "objective_of", lambda *_: SimpleNamespace(groups=lambda split: groups))
    monkeypatch.setattr(enough, "_trials", lambda *_: list(trials))
    study = make_study({"study": {"seeds": 5, **table}, "task": {"data": "x.csv"}})
    better = metric not in ("perplexity", "rmse")
    setting = SimpleNamespace(
        study=study, task="x", metric=metric, larger_is_better=better, config=None, store=None
    )
    return enough.expected_precision(setting, None)


def numbers(text):
    return [float(number) for number in re.findall(r"±([\d.e-]+)", text)]


def test_before_any_run_the_items_bound_what_can_be_shown(monkeypatch):
    text = told(monkeypatch, items=25_000)
    wide = stats.t.ppf(0.975, 24_999) * 100 * math.sqrt(0.1 / 25_000)
    assert numbers(text) == pytest.approx([wide / math.sqrt(5), wide], rel=0.05)
    assert "25,000 test items" in text and "no number of seeds" not in text
    assert "no number of seeds is enough for the margin of 1" in told(monkeypatch, items=872)


def test_items_that_belong_together_are_one(monkeypatch):
    text = told(monkeypatch, items=5_010, clusters=1_670)
    assert "1,670 test items" in text
    assert numbers(text) == numbers(told(monkeypatch, items=1_670))


def test_of_one_group_of_items_no_number_of_seeds_gives_a_verdict(monkeypatch):
    for metric, trials in (("accuracy", ()), ("perplexity", TRIALS)):
        text = told(monkeypatch, metric=metric, items=559, clusters=1, trials=trials)
        assert text == "x: all test items belong together, so there is no verdict with any number of seeds"


def test_a_metric_that_is_no_mean_of_items_has_no_bound_before_runs_are_tested(monkeypatch):
    for metric in ("f1_macro", "perplexity"):
        text = told(monkeypatch, metric=metric)
        assert not numbers(text) and f"by {metric} is known once runs have been tested" in text


def test_looks_are_told_at_the_last_one_and_at_their_level(monkeypatch):
    text = told(monkeypatch, items=25_000, until_decided=True)
    wide = stats.t.ppf(1 - 0.0125 / 2, 24_999) * 100 * math.sqrt(0.1 / 25_000)
    assert "20 seeds show" in text and numbers(text) == pytest.approx([wide / math.sqrt(20), wide], rel=0.05)
    text = told(monkeypatch, items=25_000, until_decided=True, max_seeds=10, trials=TRIALS)
    width = stats.t.ppf(1 - 0.025 / 2, 9) * choice_noise(TRIALS)[0] * math.sqrt(2 / 10)
    assert "10 seeds show" in text and numbers(text)[0] == pytest.approx(width, rel=0.05)


TRIALS = [{1e-4: [80.0, 81.0, 79.5], 3e-4: [82.0, 81.5, 82.5], 1e-3: [81.0, 82.0, 81.5]}]


def test_after_the_trials_their_noise_says_how_many_seeds_the_margin_takes(monkeypatch):
    noise, df = choice_noise(TRIALS)
    assert df

    def width(seeds):
        return stats.t.ppf(0.975, seeds - 1) * noise * math.sqrt(2 / seeds)

    for margin in (0.5, 1.0, 3.0):
        text = told(monkeypatch, trials=TRIALS, items=100_000, margin=margin)
        needed = next(n for n in range(2, 1000) if width(n) <= margin)
        assert f"takes {needed} seeds" in text and numbers(text)[0] == pytest.approx(width(5), rel=0.05)
        worst = stats.t.ppf(0.975, 99_999) * 100 * math.sqrt(0.1 / 100_000)
        assert numbers(text)[1] == pytest.approx(math.hypot(width(5), worst), rel=0.05)
    assert "takes more than 999 seeds" in told(monkeypatch, trials=TRIALS, margin=0.001)
    assert "no number of seeds is enough" in told(monkeypatch, trials=TRIALS, items=872)


def test_a_perplexity_is_told_in_per_cent_and_so_is_its_margin(monkeypatch):
    loud = [{lr: [10 * value for value in values] for lr, values in TRIALS[0].items()}]
    noise, _ = choice_noise(loud)
    width = stats.t.ppf(0.975, 4) * noise * math.sqrt(2 / 5)
    text = told(monkeypatch, metric="perplexity", trials=loud, margin=25.0)
    assert numbers(text) == pytest.approx([100 * math.expm1(width / 100)], rel=0.05)
    bound = 100 * math.log(1.25)
    needed = next(n for n in range(2, 1000) if stats.t.ppf(0.975, n - 1) * noise * math.sqrt(2 / n) <= bound)
    assert f"the margin of 25 takes {needed} seeds; 900 test items add to it" in text
