"""Batches as arithmetic: nothing lost, nothing twice, whatever the sizes and the number of processes."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.data import Plan
from oelm.errors import UserError

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=300).map(np.array)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    items = draw(lengths)
    size = draw(st.one_of(st.integers(1, 50), st.none()))
    tokens = None if size else draw(st.integers(int(items.max()), 400))
    seed = draw(st.one_of(st.none(), st.integers(0, 2**63)))
    return Plan(items, batch_size=size, batch_tokens=tokens, seed=seed)


@given(plans(), st.integers(0, 5), st.integers(1, 8))
def test_every_item_once_an_epoch_for_any_size_budget_and_number_of_processes(
    plan: Plan, epoch: int, parts: int
) -> None:
    batches = plan.epoch(epoch)
    shares = [batches.share(step, part, parts) for step in range(len(batches)) for part in range(parts)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(plan.lengths)))


@given(plans(), st.integers(0, 3), st.integers(1, 8))
def test_a_plan_that_passes_its_check_leaves_no_process_without_items(
    plan: Plan, epoch: int, parts: int
) -> None:
    try:
        plan.check(parts)
    except UserError:
        return
    batches = plan.epoch(epoch)
    assert all(len(batches.share(step, parts - 1, parts)) for step in range(len(batches)))


@given(plans(), st.integers(0, 3))
def test_no_batch_exceeds_what_was_asked_for(plan: Plan, epoch: int) -> None:
    batches = plan.epoch(epoch)
    sizes = np.diff(batches.bounds)
    if plan.batch_size:
        assert sizes.max() <= plan.batch_size
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == -(-len(plan.lengths) // plan.batch_size)
    else:
        for step in range(len(batches)):
            taken = plan.lengths[batches.batch(step)]
            cost = len(taken) * taken.max()
            assert cost <= plan.batch_tokens


def _flat(plan: Plan, start: int, count: int) -> Iterator[list[int]]:
    for _, step, batches in islice(plan.schedule(start), count):
        yield batches.batch(step).tolist()


@given(plans(), st.integers(0, 40))
def test_starting_at_step_k_equals_skipping_k_steps(plan: Plan, start: int) -> None:
    assert list(_flat(plan, start, 10)) == list(_flat(plan, 0, start + 10))[start:]


@given(plans(), st.integers(1, 4))
def test_steps_counts_what_the_schedule_gives(plan: Plan, epochs: int) -> None:
    steps = plan.steps(epochs)
    seen = [epoch for epoch, _, _ in islice(plan.schedule(), steps + 1)]
    assert seen[:-1].count(epochs - 1) > 0
    assert seen[-2:] == [epochs - 1, epochs]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    items = np.arange(1, 500) % 37 + 1

    def order(seed: int, epoch: int) -> list[int]:
        return Plan(items, batch_size=8, seed=seed).epoch(epoch).order.tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_never_changes_between_versions() -> None:
    """Pinned: resumed runs and published records depend on it."""
    batches = Plan(np.array([5, 1, 4, 2, 3, 9, 8]), batch_size=3, seed=7).epoch(2)
    assert [batches.batch(step).tolist() for step in range(len(batches))] == [[2, 0], [3, 6], [1, 4, 5]]


def test_even_a_small_set_has_other_batches_in_another_epoch() -> None:
    plan = Plan(np.arange(1, 161), batch_size=8, seed=0)
    first, second = (
        {frozenset(e.batch(step).tolist()) for step in range(len(e))} for e in map(plan.epoch, (0, 1))
    )
    assert len(first & second) < 3


def test_evaluation_takes_items_in_a_fixed_order_by_length() -> None:
    items = np.array([3, 1, 2, 1])
    batches = Plan(items, batch_size=2).epoch()
    assert batches.order.tolist() == [1, 3, 2, 0]


def test_batches_of_similar_length_waste_little_padding() -> None:
    rng = np.random.default_rng(0)
    items = np.minimum(rng.lognormal(5.3, 0.6, 20_000).astype(int) + 1, 512)

    def padded(plan: Plan) -> float:
        batches = plan.epoch(0)
        each = [items[batches.batch(step)] for step in range(len(batches))]
        return sum(len(taken) * taken.max() for taken in each) / items.sum()

    assert padded(Plan(items, batch_size=16, seed=0)) < 1.03
    assert padded(Plan(items, batch_tokens=8192, seed=0)) < 1.05


def test_token_budgets_are_used() -> None:
    items = np.minimum(np.random.default_rng(0).lognormal(5.3, 0.6, 20_000).astype(int) + 1, 512)
    steps = len(Plan(items, batch_tokens=65_536, seed=0).epoch(0))
    assert items.sum() / (steps * 65_536) > 0.92


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 4, "batch_tokens": 100}, "either batch_size or batch_tokens"),
        ({}, "either batch_size or batch_tokens"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_tokens": 5}, "less than the longest item"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(np.array([3, 9]), **changes)


def test_a_batch_smaller_than_the_number_of_processes_is_refused() -> None:
    with pytest.raises(UserError, match="too few for 8"):
        Plan(np.full(100, 5), batch_size=4).check(8)
