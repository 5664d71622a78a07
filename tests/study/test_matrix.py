"""Which runs a study asks for, played against a made world in which every run's score is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.study.folder import run_folder
from oelm.study.matrix import Cell, plan_runs, widen_grid

METHODS = ["baseline", "oelm"]
SEEDS, CHOICE = [1, 2, 3], [1001, 1002]


def peak(best):
    """Scores that fall with the distance from a best rate; seeds differ a little."""
    return lambda cell: -abs(math.log(cell.lr / best[cell.method])) + cell.seed * 1e-6


def play(world, lrs=(1e-4, 3e-4, 1e-3), widen=2, choice=CHOICE, seeds=SEEDS, larger=True, order=None):
    """Make every run that is asked for until nothing more is; all runs that were made, and the matrix."""
    scores: dict[Cell, float | None] = {}
    while True:
        matrix = plan_runs(METHODS, lrs, choice, seeds, widen, scores, larger)
        missing = [cell for cell in matrix.needed if cell not in scores]
        if not missing:
            return scores, matrix
        for cell in order(missing) if order else missing:
            scores[cell] = world(cell)


@pytest.mark.parametrize("name", [".", "..", "a/b", "..."])
def test_a_run_lies_below_its_task_and_its_arm_whatever_they_are_called(name):
    """There its model is looked for."""
    folder = run_folder(name, Cell(name, 1e-3, 1, False), "0123456789abcdef")
    assert len(folder.parts) == 4 and folder.name == "measured-lr0.001-s1-01234567"


def test_each_method_is_measured_at_its_own_best_rate_with_fresh_seeds():
    scores, matrix = play(peak({"baseline": 3e-4, "oelm": 3e-4}), lrs=[1e-4, 3e-4, 1e-3])
    assert matrix.grid == [1e-4, 3e-4, 1e-3] and not matrix.at_edge
    measured = {cell for cell in scores if not cell.choosing}
    assert measured == {Cell(m, 3e-4, seed, False) for m in METHODS for seed in SEEDS}
    assert not {c.seed for c in measured} & {c.seed for c in scores if c.choosing}


def test_of_rates_that_tie_two_are_measured():
    def world(cell):  # the seeds differ by more than the rates, and in another way at each
        return math.sin(1e6 * cell.lr * cell.seed) + {3e-4: 0.3, 1e-3: 0.2}.get(cell.lr, 0.0)

    _, matrix = play(world, lrs=[1e-4, 3e-4, 1e-3, 3e-3], widen=0)
    for method in METHODS:
        assert len(matrix.near_ties[method]) > 2
        assert matrix.measured[method] == matrix.near_ties[method][:2]


def test_a_best_rate_at_the_edge_widens_the_grid_for_all_methods():
    scores, matrix = play(peak({"baseline": 3e-4, "oelm": 3e-3}))
    assert matrix.grid == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
    assert matrix.chosen == {"baseline": 3e-4, "oelm": 3e-3}
    trials = {m: sorted({c.lr for c in scores if c.choosing and c.method == m}) for m in METHODS}
    assert trials["baseline"] == trials["oelm"] == matrix.grid  # equal budgets


def test_the_grid_grows_no_further_than_it_may_and_says_so():
    _, matrix = play(peak({"baseline": 1e-9, "oelm": 3e-4}))
    assert matrix.grid == [1e-5, 3e-5, 1e-4, 3e-4, 1e-3]
    assert matrix.chosen["baseline"] == 1e-5 and matrix.at_edge == ["baseline"]
    _, fixed = play(peak({"baseline": 1e-9, "oelm": 3e-4}), widen=0)
    assert fixed.grid == [1e-4, 3e-4, 1e-3] and fixed.at_edge == ["baseline"]


def test_a_failed_run_rules_its_rate_out_and_a_method_that_always_fails_is_named():
    inner = peak({"baseline": 3e-4, "oelm": 1e-3})
    _, matrix = play(lambda cell: None if cell.method == "oelm" and cell.lr >= 1e-3 else inner(cell))
    assert matrix.chosen["oelm"] == 3e-4
    scores, matrix = play(lambda cell: None if cell.method == "oelm" else inner(cell))
    assert matrix.failed == ["oelm"] and matrix.chosen == {"baseline": 3e-4}
    assert not [cell for cell in scores if cell.method == "oelm" and not cell.choosing]


def test_a_study_waits_for_every_trial_and_a_report_chooses_for_the_methods_that_have_theirs():
    scores, whole = play(peak({"baseline": 3e-4, "oelm": 3e-4}))
    lost = Cell("oelm", 1e-3, CHOICE[0], True)
    rest = {cell: score for cell, score in scores.items() if cell != lost}
    world = (METHODS, [1e-4, 3e-4, 1e-3], CHOICE, SEEDS, 2, rest, True)
    waiting, partial = plan_runs(*world), plan_runs(*world, partial=True)
    assert not waiting.chosen and waiting.unevaluated == partial.unevaluated == [lost]
    assert partial.chosen == {"baseline": 3e-4} and not partial.failed
    assert plan_runs(*world[:5], scores, True, partial=True) == whole


def test_a_method_without_all_its_trials_does_not_widen_the_grid_of_the_others():
    scores, _ = play(peak({"baseline": 3e-4, "oelm": 3e-4}))
    rest = {cell: score for cell, score in scores.items() if cell.method != "oelm" or cell.lr == 1e-4}
    found = plan_runs(METHODS, [1e-4, 3e-4, 1e-3], CHOICE, SEEDS, 2, rest, True, partial=True)
    assert found.grid == [1e-4, 3e-4, 1e-3] and found.chosen == {"baseline": 3e-4}


def test_one_rate_needs_no_choice():
    scores, matrix = play(peak({"baseline": 1, "oelm": 1}), lrs=[3e-4])
    assert all(not cell.choosing for cell in scores) and set(matrix.chosen.values()) == {3e-4}


def test_adding_seeds_or_methods_asks_only_for_what_is_new():
    world = peak({"baseline": 3e-4, "oelm": 3e-4})
    before, _ = play(world)
    after, _ = play(world, seeds=[*SEEDS, 4, 5])
    assert {c for c in after if c not in before} == {Cell(m, 3e-4, s, False) for m in METHODS for s in (4, 5)}


def test_less_is_better_for_perplexity():
    _, matrix = play(lambda cell: abs(math.log(cell.lr / 3e-4)) + 5, larger=False)
    assert set(matrix.chosen.values()) == {3e-4}


@given(
    best=st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)),
    seed=st.randoms(use_true_random=False),
    fails=st.sets(st.sampled_from([1e-4, 3e-4, 1e-3, 3e-3, 3e-5])),
    widen=st.integers(0, 3),
)
def test_the_order_in_which_runs_end_changes_nothing(best, seed, fails, widen):
    inner = peak(dict(zip(METHODS, best, strict=True)))
    world = lambda cell: None if cell.method == "oelm" and cell.lr in fails else inner(cell)  # noqa: E731
    plain = play(world, widen=widen)
    shuffled = play(world, widen=widen, order=lambda cells: seed.sample(cells, len(cells)))
    assert plain == shuffled
    _, matrix = plain
    trials = {m: sorted(c.lr for c in plain[0] if c.choosing and c.method == m) for m in METHODS}
    assert trials["baseline"] == trials["oelm"]  # equal budgets, always
    assert len(matrix.grid) <= 3 + 2 * widen


@pytest.mark.parametrize(
    ("grid", "side", "new"),
    [
        ([1e-4, 3e-4, 1e-3], "high", 3e-3),
        ([1e-4, 3e-4, 1e-3, 3e-3], "high", 1e-2),
        ([1e-4, 3e-4, 1e-3], "low", 3e-5),
        ([1e-3, 2e-3], "high", 4e-3),
        ([1e-3, 3e-3], "low", 3e-4),
        ([1.5e-3, 3e-3], "low", 7.5e-4),
        ([1e-3, 2e-3], "low", 5e-4),
    ],
)
def test_the_grid_goes_on_in_its_own_steps(grid, side, new):
    assert widen_grid(grid, side) == pytest.approx(sorted([*grid, new]))
