"""The rules of a verdict, one by one, and the whole procedure by simulation (`benchmarks/verdicts.py`)."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import verdicts
from oelm.study.analysis import analyse_records, more_seeds_useless
from oelm.study.decide import choice_noise, collapsed, combine, fewest_seeds, near_ties, verdict
from oelm.study.design import make_study
from oelm.study.report.summary import as_plain
from oelm.study.two_way import envelope_half_width, overall, seeds_needed
from tests.claims.claim_records import GRID, pairs, tuned


def test_near_ties_are_within_the_noise():
    scores = {
        1e-4: [80.0, 80.4, 80.2],
        3e-4: [81.0, 81.4, 81.2],
        1e-3: [80.9, 81.2, 81.3],
        3e-3: [70.0, 60.0, 65.0],
    }
    noise, df = choice_noise([scores])
    assert df == 4 and 0 < noise < 0.2  # of the best rate and its neighbours, without the wild one
    assert near_ties(scores, noise, df) == [3e-4, 1e-3]
    assert near_ties(scores, 0.001, 4) == [3e-4]
    assert near_ties(scores, 100.0, 4) == [3e-4, 1e-3, 1e-4, 3e-3]
    assert near_ties({3e-4: [81.0], 1e-3: [80.9]}, *choice_noise([{3e-4: [81.0], 1e-3: [80.9]}])) == [3e-4]
    assert near_ties({}, 1.0, 3) == []


def test_what_all_trials_of_a_seed_share_is_no_noise():
    seeds = np.array([0.0, 5.0, -3.0])
    scores = {lr: list(value + seeds) for lr, value in ((1e-4, 80.0), (3e-4, 81.0), (1e-3, 79.0))}
    noise, df = choice_noise([scores, scores])
    assert noise == pytest.approx(0, abs=1e-9) and df == 8


def test_a_verdict_holds_for_all_combinations():
    rng = np.random.default_rng(0)
    up, flat, down = (overall(rng.normal(mean, 1, (6, 300))) for mean in (0.5, 0.0, -0.5))
    assert combine([up], 1.0).p < 0.05
    assert combine([up, flat], 1.0).p == pytest.approx(max(up.p, 1.0 if flat.mean < 0 else flat.p))
    assert combine([up, down], 1.0).p == 1.0  # both certain, and opposite
    both = combine([up, flat], 1.0)
    assert (both.mean, both.low, both.high) == (up.mean, min(up.low, flat.low), max(up.high, flat.high))
    assert both.tables == (up, flat) and envelope_half_width(both.tables) >= (up.mean - flat.mean) / 2
    assert envelope_half_width(both.tables, 6) == pytest.approx((both.high - both.low) / 2, rel=0.05)
    assert seeds_needed([up, flat], 0.9 * (up.mean - flat.mean) / 2) is None  # they stay apart
    assert seeds_needed([up, flat], 0.28) > seeds_needed([up], 0.28)
    assert combine([flat], 1.0, looks=4).p == pytest.approx(min(1.0, 4 * flat.p))
    assert combine([up, overall(np.ones((6, 300)))], 1.0).p is None


def test_a_difference_within_the_margin_is_equivalent():
    assert verdict(0.2, 0.001, 0.001) == "equivalent"
    assert (verdict(0.2, 0.001, 0.5), verdict(-0.2, 0.001, None), verdict(0.2, 0.5, 0.5)) == (
        "better",
        "worse",
        "open",
    )


def test_planned_arms_without_runs_make_nothing_look_better():
    """Deleting an arm's runs neither shrinks the family of comparisons nor the seeds that they need."""
    methods = ["baseline", "oelm", "frozen", "oelm-random", "oelm-global"]

    def compared(number: int):
        (whole,) = tuned(pairs(-0.4, spread=1.2))
        values = {"methods": methods[:number], "lrs": GRID, "choose_seeds": 2, "widen": 0}
        return analyse_records(whole.records, make_study({"study": values}))

    (one,), (of_three,), (of_four,) = (compared(number).comparisons for number in (2, 4, 5))
    assert (one.problems, of_three.problems, of_four.problems) == ((), (), ("few_seeds",))
    assert one.p_holm < 0.3 and of_three.p_holm == pytest.approx(3 * one.p_holm)
    warned = [w["text"] for w in as_plain(compared(4))["warnings"]]
    assert any("frozen, oelm-random: no runs" in text for text in warned)


def test_intervals_say_their_level():
    for lang, texts in (("en", ("95 % interval", "98.75 % interval")), ("zh", ("95 % 区间", "98.75 % 区间"))):
        for text, looks in zip(texts, (False, True), strict=True):
            (analysis,) = tuned(pairs(3), until_decided=looks)
            assert text in as_plain(analysis, lang)["answer"][0]


def test_between_two_looks_nothing_is_decided():
    """Whoever could stop at any number of seeds would look more often than p is corrected for."""
    for seeds, problems in ((5, ()), (7, ("unfinished",)), (10, ())):
        (analysis,) = tuned(pairs(3, n=seeds), until_decided=True, seeds=seeds)
        assert analysis.comparisons[0].problems == problems, seeds


def test_a_study_that_looks_ends_when_all_is_decided_or_items_forbid_it():
    (decided,), (open_,), (few,) = tuned(pairs(3)), tuned(pairs(0.1, spread=10.0)), tuned(pairs(3, n=4))
    assert more_seeds_useless(decided) and decided.comparisons[0].verdict == "better"
    (comparison,) = open_.comparisons
    assert comparison.verdict == "open" and not more_seeds_useless(open_)  # more seeds would help
    assert few.comparisons[0].verdict == "void" and not more_seeds_useless(few)
    rng = np.random.default_rng(0)
    items = overall(np.tile(rng.normal(0.1, 30, 300), (5, 1)) + rng.normal(0, 0.1, (5, 300)))
    assert items.share_items > 0.99 and items.half_width() > 1
    assert more_seeds_useless(replace(open_, comparisons=[replace(comparison, overall=items)]))
    certain = overall(np.tile(rng.normal(9, 30, 300), (5, 1)) + rng.normal(0, 0.1, (5, 300)))
    assert not more_seeds_useless(replace(open_, comparisons=[replace(comparison, overall=certain)]))
    assert more_seeds_useless(replace(open_, comparisons=[]))


def test_a_run_far_below_the_others_has_collapsed():
    assert collapsed([85.0, 86.0, 85.5, 70.0, 85.2]) == [3]
    assert collapsed([85.0, 86.0, 85.5, 81.0, 85.2]) == []  # less than 5 points
    assert collapsed([85.0, 60.0]) == []
    assert collapsed([90.0, 70.0, 80.0, 85.0, 60.0, 75.0]) == []  # all vary as much


def test_one_of_many_comparisons_needs_ten_seeds():
    assert [fewest_seeds(n) for n in (1, 3, 4, 20)] == [5, 5, 10, 10]


def test_the_table_in_the_docs_is_the_record():
    root = Path(__file__).parents[2]
    record = json.loads((root / "benchmarks" / "verdicts.json").read_text())
    assert record["draws"] == 10_000
    assert verdicts.render(record) in (root / "docs" / "studies.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("part", verdicts.PARTS)
def test_the_procedure_errs_no_more_often_than_it_says(part):
    """As in docs/studies.md, with fewer draws: two standard errors of so many more."""
    for row in verdicts.PARTS[part](400):
        slack = 3 * math.sqrt(row.bound * (1 - row.bound) / row.draws)
        if row.kind == "least":
            assert row.share >= row.bound - slack, row
        else:
            assert row.share <= row.bound + slack, row
