"""The cost models against HybridFlow's figures (arXiv 2409.19256, section 8), with one set of coefficients."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from statistics import mean

import numpy as np
import pytest

from rlhf_mapper.hardware import Cluster
from rlhf_mapper.pools import PoolCosts
from rlhf_mapper.prediction import cuts_of
from rlhf_mapper.search.pruned import pruned
from rlhf_mapper.simulate import memory
from tests.each import each_case
from tests.mapper.oracles import testbed
from tests.mapper.oracles.allocations import least_gpus
from tests.mapper.oracles.testbed import PLACED, PLACEMENTS, THROUGHPUT, TRANSITION, Size

TOKENS = 1024 * 2048
CLEAR_GAP = 0.07
MOST_REGRET = 0.06
PUBLISHED_SMALLEST: dict[Size, int] = {"7B": 8, "13B": 16, "34B": 32, "70B": 64}
WHOLE_MACHINES: dict[Size, int] = {"7B": 8, "13B": 16, "34B": 24, "70B": 48}


def off(size: Size, gpus: int, *, layout: bool) -> float:
    """How far the throughput of the best mapping is from the published one, as a share of it."""
    best, *_ = pruned(testbed.costs_of(size, gpus, layout=layout), testbed.roles("PPO"), keep=1)
    return abs(TOKENS / best.seconds / THROUGHPUT[size, gpus] - 1)


def test_throughput_is_within_a_twelfth_on_average() -> None:
    found = [off(size, gpus, layout=False) for size, gpus in THROUGHPUT]
    assert mean(found) <= 0.08
    assert max(found) <= 0.19


@each_case(("size", "gpus"), THROUGHPUT)
def test_throughput_in_the_published_layouts_is_within_a_fifth(size: Size, gpus: int) -> None:
    assert off(size, gpus, layout=True) <= 0.2


@cache
def costs_of_13b(gpus: int) -> PoolCosts:
    return testbed.costs_of("13B", gpus)


def predicted(placement: str, gpus: int) -> float:
    """Tokens/s with the best of all allocations; 0 where none fits."""
    tables = [costs_of_13b(gpus).of(each, 0) for each in PLACEMENTS[placement]]
    stages = [
        np.max([one.seconds[:, place] for one, place in zip(tables, places, strict=True)], axis=0).sum()
        for places in product(*(range(len(one.gpus)) for one in tables))
        if sum(int(one.gpus[place]) for one, place in zip(tables, places, strict=True)) <= gpus
    ]
    return float(TOKENS / min(stages, default=math.inf))


@each_case("gpus", PLACED)
def test_the_placement_that_won_wins(gpus: int) -> None:
    published = PLACED[gpus]
    best, second, *_ = sorted(published.values(), reverse=True)
    winner = max(published, key=lambda name: predicted(name, gpus))
    if best / second - 1 > CLEAR_GAP:
        assert published[winner] == best
    assert 1 - published[winner] / best <= MOST_REGRET


def test_small_clusters_put_models_together_large_do_not() -> None:
    pools = {gpus: len(pruned(costs_of_13b(gpus), testbed.roles("PPO"), keep=1)[0].sets) for gpus in (16, 32, 96, 128)}
    assert pools[16] == pools[32] == 1
    assert min(pools[96], pools[128]) > 1


@each_case("size", PUBLISHED_SMALLEST)
def test_the_smallest_clusters_of_ppo_are_the_published_ones(size: Size) -> None:
    models = [memory.states(testbed.MODELS[size], testbed.SOFTWARE, trains=trains) for trains in (True, False)]
    states = 2 * sum(sum(each.values()) for each in models)
    assert states == 40 * testbed.MODELS[size].parameters
    least = least_gpus(states, testbed.machines(8).gpu.memory)
    assert 8 * math.ceil(least / 8) == WHOLE_MACHINES[size]
    assert max(8, 2 ** math.ceil(math.log2(least))) == PUBLISHED_SMALLEST[size]


def test_a_step_fits_on_the_smallest_cluster_and_no_smaller() -> None:
    for size, gpus in PUBLISHED_SMALLEST.items():
        costs = testbed.costs_of(size, gpus, layout=False)
        assert pruned(costs, testbed.roles("PPO"), keep=1), size
        if gpus > WHOLE_MACHINES["7B"]:
            less = WHOLE_MACHINES[size] - 8
            assert not pruned(testbed.costs_of(size, less, layout=False), testbed.roles("PPO"), keep=1), size


@each_case(("size", "gpus"), TRANSITION)
def test_a_transition_takes_about_as_long(size: Size, gpus: int) -> None:
    cut = cuts_of(testbed.costs_of(size, gpus), frozenset({"actor"}), 0, gpus)["actor"]
    assert cut.predicted.seconds["reshard"] == pytest.approx(TRANSITION[size, gpus], rel=0.35)


def test_the_testbed_is_what_the_paper_says() -> None:
    nodes = testbed.machines(128)
    assert Cluster((nodes,)).gpus == 128
    assert (nodes.count, nodes.link, nodes.node_bandwidth) == (16, 300e9, 25e9)
    assert nodes.gpu.memory == 80e9
