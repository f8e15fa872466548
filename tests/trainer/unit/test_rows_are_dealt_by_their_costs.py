"""Which rank computes which row, when ranks hold rows of other lengths."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rlhf_trainer.training.batching import assign_bundles

Costs = list[list[int]]
COSTS = st.lists(st.lists(st.integers(1, 1000), max_size=6), min_size=1, max_size=4).filter(any)


def work(costs: Costs, ranks: list[list[int]]) -> list[int]:
    """What each rank computes."""
    sums = [0] * len(costs)
    for owned, destinations in zip(costs, ranks, strict=True):
        for cost, rank in zip(owned, destinations, strict=True):
            sums[rank] += cost
    return sums


@given(COSTS)
def test_no_rank_has_more_than_the_mean_and_one_row(costs: Costs) -> None:
    ranks = assign_bundles(costs)
    most, rows = max(work(costs, ranks)), [cost for owned in costs for cost in owned]
    assert most <= max(map(sum, costs))
    assert most <= sum(rows) / len(costs) + max(rows)


@given(st.lists(st.lists(st.integers(1, 1000), max_size=2), min_size=2, max_size=3).filter(any))
def test_the_most_is_at_most_four_thirds_of_the_least_possible(costs: Costs) -> None:
    rows = [cost for owned in costs for cost in owned]
    best = min(
        max(sum(cost for cost, rank in zip(rows, each, strict=True) if rank == own) for own in range(len(costs)))
        for each in product(range(len(costs)), repeat=len(rows))
    )
    assert 3 * max(work(costs, assign_bundles(costs))) <= 4 * best


def test_rows_stay_where_they_are_if_nothing_is_won() -> None:
    assert assign_bundles([[5, 5], [5, 5]]) == [[0, 0], [1, 1]]
    assert assign_bundles([[9], [1, 1]]) == [[0], [1, 1]]
    assert assign_bundles([[9, 9, 1], [1, 1, 1]]) == [[0, 1, 0], [1, 0, 1]]
