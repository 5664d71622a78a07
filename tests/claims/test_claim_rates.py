"""C8: whether OELM wants a higher learning rate, from the trials of made-up studies."""

from typing import Any

import pytest

from oelm.claims.verdicts import Verdict
from oelm.study.analysis import analyse_records
from oelm.study.records import Record
from tests.claims.claim_records import GRID, pairs, rates_study, run, trials, verdicts

TASKS = ("imdb", "ag_news", "sst2")
Rates = list[float]


def chosen(*ratios: tuple[float, float], seeds: int = 3, grid: Rates = GRID, **more: Any) -> Verdict:
    """Studies, one of each task, whose trials all have these best learning rates of oelm and of baseline."""
    analyses = []
    for task, (ours, theirs) in zip(TASKS, ratios, strict=False):
        rows = range(1, seeds + 1)
        best = {"oelm": dict.fromkeys(rows, ours), "baseline": dict.fromkeys(rows, theirs)}
        analyses.append(analyse_records(trials(best, grid, task, **more), rates_study(seeds, grid)))
    return verdicts(analyses)["C8"]


HIGH, SAME, LOW = (3e-4, 1e-4), (3e-4, 3e-4), (1e-4, 3e-4)


def test_three_tasks_that_agree_decide():
    higher = chosen(HIGH, HIGH, (1e-3, 1e-4))
    assert (higher.verdict, higher.n, higher.unit) == ("supported", 3, "ratio")
    assert higher.number == pytest.approx((3 * 3 * 10) ** (1 / 3))
    assert higher.interval == pytest.approx((3, 10))
    assert chosen(SAME, SAME, LOW).verdict == "refuted"
    mixed = chosen(HIGH, HIGH, SAME)
    assert mixed.verdict == "in part" and "Refuted: sst2" in mixed.why


def test_seeds_of_one_task_are_no_further_evidence():
    six = chosen(HIGH, seeds=6)
    assert six.verdict == "not decided" and "1 of 3 tasks that a verdict needs" in six.why
    assert six.details[0].verdict == "supported" and six.n == 1
    assert chosen(HIGH, HIGH, seeds=6).verdict == "not decided"


def noisy(best: float, *ties: float) -> list[Record]:
    """Trials of oelm best at one rate, and as good at others but for noise; of baseline best at 1e-4."""
    noise = (0.004, -0.004, 0.001)

    def score(method: str, lr: float, k: int) -> float:
        top = best if method == "oelm" else 1e-4
        if lr == top:
            return 0.8 + noise[k]
        return 0.799 - noise[k] if method == "oelm" and lr in ties else 0.6 + 0.0001 * k

    return [
        run(method, 1001 + k, None, lr=lr, task=task, validation=score(method, lr, k))
        for task in TASKS
        for method in ("oelm", "baseline")
        for lr in GRID
        for k in range(3)
    ]


def test_near_ties_leave_a_ratio_open():
    """The best rate of oelm is three times higher by the mean, and any of two by the noise."""
    clear = verdicts([analyse_records(noisy(3e-4), rates_study(3))])["C8"]
    assert clear.verdict == "supported"
    tied = verdicts([analyse_records(noisy(3e-4, 1e-4), rates_study(3))])["C8"]
    assert tied.verdict == "not decided" and "near-ties allow 1 to 3" in tied.why
    assert tied.details[0].interval == pytest.approx((1, 3))
    more = verdicts([analyse_records(noisy(3e-4, 1e-4, 1e-3), rates_study(3))])["C8"]
    assert more.details[0].interval == pytest.approx((1, 10))  # all of them, not only those measured


def test_says_what_the_method_loses_at_the_references_rate():
    found = chosen(HIGH, HIGH, HIGH)
    assert "At the learning rate of baseline, oelm is 1.00 points behind its own best" in found.reason


def test_needs_a_fair_and_fine_grid_and_several_runs():
    assert "at the edge of the grid" in chosen((3e-3, 1e-4)).why
    assert "at the edge of the grid" in chosen((3e-4, 3e-5)).why
    coarse = chosen(*[(1e-3, 1e-4)] * 3, grid=[1e-5, 1e-4, 1e-3, 1e-2])
    assert coarse.verdict == "not decided" and "too coarse" in coarse.why
    unlearned = chosen(*[HIGH] * 3, results={"at_chance": True})
    assert unlearned.verdict == "not decided" and "at chance level (oelm with seeds" in unlearned.why
    single = chosen(*[HIGH] * 3, seeds=1)
    assert single.verdict == "not decided" and "tried by one run" in single.why
    untuned = verdicts([analyse_records(pairs(0), None)])["C8"]
    assert untuned.verdict == "not decided" and "not chosen on validation" in untuned.why
    for found in (coarse, unlearned, single, untuned):
        assert (found.number, found.n) == (None, 0)
