"""Placements, allocations and the cost of a step, against the counts and the example of HybridFlow's section 6."""

from itertools import permutations, product

import pytest

from rlhf_mapper.search.tables import assignments, placements
from tests.each import each_case
from tests.mapper.oracles.allocations import d_cost, enum_alloc

PPO = ("actor", "critic", "reference", "reward")

ACTOR, CRITIC = (10, 0, 6), (0, 3, 5)
REFERENCE, REWARD = (0, 2, 0), (0, 1, 0)


@each_case(
    ("models", "count"),
    [((), 0), (PPO[:1], 1), (PPO[:3], 5), (PPO, 15), ((*PPO, "cost"), 52)],
    ids=str,
)
def test_placements_are_all_set_partitions(models: tuple[str, ...], count: int) -> None:
    found = placements(models)
    assert len(found) == len(set(map(frozenset, found))) == count
    assert all(sorted(model for models in sets for model in models) == sorted(models) for sets in found)
    assert all(all(sets) for sets in found)


def test_placements_are_ordered_whatever_the_input() -> None:
    expected = placements(PPO)
    assert [len(sets) for sets in expected] == [1] + [2] * 7 + [3] * 6 + [4]
    assert expected[1] == (frozenset({"actor"}), frozenset({"critic", "reference", "reward"}))
    assert all(placements(order) == expected for order in permutations(PPO))
    assert placements(PPO + PPO) == expected


def hosts(*names: str) -> list[frozenset[tuple[int, str]]]:
    """Of groups, a letter for each of their zones."""
    return [frozenset((0, zone) for zone in name) for name in names]


def test_pools_lie_in_every_combination_of_node_groups() -> None:
    typed = [groups for sets in placements((*PPO, "cost")) for groups in assignments(len(sets), hosts("a", "b"))]
    assert len(typed) == 454
    assert assignments(2, hosts("a", "b")).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_of_two_groups_of_the_same_nodes_one_is_taken() -> None:
    found = assignments(2, hosts("a", "a", "b")).tolist()
    assert found == [[0, 0], [0, 2], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]


def test_a_pool_over_two_zones_has_them_for_itself() -> None:
    """Else two pools would share the link, and each would be predicted as if it had it alone."""
    zones = hosts("a", "b", "ab", "c")
    ways = set(map(tuple, assignments(2, zones).tolist()))
    assert ways == {*product((0, 1, 3), repeat=2), (2, 3), (3, 2)}
    assert assignments(1, zones).tolist() == [[0], [1], [2], [3]]


@each_case(
    ("units", "minima", "count"),
    [(16, (1, 1, 1, 1), 455), (128, (1, 1, 1, 1), 333_375), (16, (4, 1), 12), (3, (2, 2), 0)],
)
def test_allocations_are_as_many_as_published(units: int, minima: tuple[int, ...], count: int) -> None:
    found = list(enum_alloc(units, minima))
    assert len(found) == len(set(found)) == count
    assert all(sum(given) == units for given in found)
    assert all(each >= least for given in found[:1000] for each, least in zip(given, minima, strict=True))


def test_allocations_of_two_sets() -> None:
    assert list(enum_alloc(5, (1, 2))) == [(1, 4), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("sets", "seconds"),
    [
        ([[ACTOR, REFERENCE], [CRITIC, REWARD]], 20),
        ([[ACTOR, CRITIC, REFERENCE, REWARD]], 27),
        ([[ACTOR], [CRITIC], [REFERENCE], [REWARD]], 19),
    ],
    ids=["split", "colocated", "standalone"],
)
def test_a_sets_models_take_turns_and_sets_work_at_once(sets: list[list[tuple[int, int, int]]], seconds: float) -> None:
    assert d_cost(sets) == seconds
