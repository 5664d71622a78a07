"""C8: whether OELM wants a higher learning rate, from the trials of made-up studies."""

from typing import Any

import pytest

from oelm.claims.verdicts import Verdict
from tests.claims.claim_records import GRID, pairs, rates_study, trials, verdict


def chosen(ours: list[float], theirs: float = 1e-4, grid: list[float] = GRID, **more: Any) -> Verdict:
    seeds = range(1, len(ours) + 1)
    best = {"oelm": dict(zip(seeds, ours, strict=True)), "baseline": dict.fromkeys(seeds, theirs)}
    return verdict("C8", trials(best, grid, **more), rates_study(len(ours), grid))


def test_counts_ratios():
    """Two-sided sign tests: 0.031 for 6 of 6, 0.22 for 5 of 6, 0.0625 for 5 of 5."""
    higher = chosen([3e-4] * 6)
    assert (higher.verdict, higher.n, higher.unit) == ("supported", 6, "ratio")
    assert higher.number == pytest.approx(3) and higher.interval is None  # nothing varied
    assert "at least 3 times in 6 of 6 choices (sign test, p = 0.031)" in higher.reason
    assert chosen([1e-4] * 6).verdict == "refuted"
    lower = chosen([1e-4] * 6, theirs=3e-4)
    assert lower.verdict == "refuted" and lower.number == pytest.approx(1 / 3)
    mixed = chosen([3e-4] * 5 + [1e-4])
    assert mixed.verdict == "not decided"
    assert mixed.interval is not None and mixed.interval[0] < mixed.number < mixed.interval[1]
    few = chosen([3e-4] * 5)
    assert few.verdict == "not decided" and "Fewer than 6 choices cannot decide" in few.reason


def test_counts_over_tasks():
    tasks = ("imdb", "ag_news", "sst2")
    best = {"oelm": {1: 1e-3, 2: 1e-3}, "baseline": {1: 3e-4, 2: 3e-4}}
    records = [r for task in tasks for r in trials(best, task=task)]
    found = verdict("C8", records, rates_study(2))
    assert (found.verdict, found.n, len(found.details)) == ("supported", 6, 3)
    assert {f.verdict for f in found.details} == {"not decided"}  # two choices each


def test_says_what_the_method_loses_at_the_references_rate():
    assert (
        "At the learning rate of baseline, oelm is 1.00 points behind its own best"
        in chosen([3e-4] * 6).reason
    )


def test_needs_a_fair_and_fine_grid():
    assert "at the edge of the grid" in chosen([3e-3] * 6).reason
    assert "at the edge of the grid" in chosen([3e-4] * 6, theirs=3e-5).reason
    coarse = chosen([1e-3] * 6, theirs=1e-4, grid=[1e-5, 1e-4, 1e-3, 1e-2])
    assert coarse.verdict == "not decided" and "too coarse" in coarse.reason
    unlearned = chosen([3e-4] * 6, results={"at_chance": True})
    assert unlearned.verdict == "not decided" and "at chance level (oelm with seeds" in unlearned.reason
    untuned = verdict("C8", pairs(0))
    assert untuned.verdict == "not decided" and "not chosen on validation" in untuned.reason
    for found in (coarse, unlearned, untuned):
        assert (found.number, found.n) == (None, 0)
