"""Equal nodes in two zones that a slow link joins: which nodes a pool gets, in which order, and what that costs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from rlhf_api.job import Job
from rlhf_mapper.auto_map import auto_map, predict, task_of
from rlhf_mapper.hardware import GB, GIGABIT, GPUS, Cluster, NodeGroup
from rlhf_mapper.mapping import DeviceMapping
from rlhf_mapper.pools import PoolCosts
from rlhf_mapper.simulate.layouts import Layouts, Network
from rlhf_mapper.simulate.passes import Passes
from rlhf_mapper.simulate.training import COMPRESSED, training_seconds
from rlhf_mapper.strategy import Setting
from rlhf_mapper.zones import crossings, orders
from tests.mapper.oracles.testbed import MODELS, SOFTWARE
from tests.mapper.planned_jobs import job_of, shapes_of

QUICK_SEEDS = (5, 6, 7)


def nodes(zones: str, gbps: float = 100, **more: object) -> NodeGroup:
    """Nodes of 4 GPUs, a letter each for their zones."""
    group = NodeGroup(gpu=GPUS["h100-80g"], count=len(zones), gpus_per_node=4, node_bandwidth=50 * GB, **more)  # type: ignore[arg-type]
    return replace(group, zones=tuple(zones), zone_bandwidth=gbps * GIGABIT)


def sent(zones: tuple[str, ...], r: int, ring: int, hand_over: int) -> int:
    """Bytes over the link, counted node by node; block k of a replica is on its k-th node, and replicas follow.

    ring: what a ring sends that has nodes of both zones; hand_over: what a block sends the next one in the other zone.
    """
    replicas = [zones[start : start + r] for start in range(0, len(zones), r)]
    rings = sum(len(set(block)) > 1 for block in zip(*replicas, strict=True))
    return ring * rings + hand_over * sum(one != other for each in replicas for one, other in pairwise(each))


@pytest.mark.parametrize("number", [4, 6, 8, 10])
def test_one_order_sends_as_few_bytes_as_the_best_node_set(number: int) -> None:
    draw = random.Random(number)
    every = {
        size: [
            tuple("a" if node in chosen else "b" for node in range(number))
            for chosen in combinations(range(number), size)
        ]
        for size in range(1, number)
    }
    for r in (each for each in range(1, number + 1) if number % each == 0):
        for fewest, most in combinations(range(1, number), 2) if number < 10 else [(1, 1), (3, 5), (5, 5), (4, 8)]:
            ring, hand_over = draw.randint(1, 9), draw.randint(1, 9)
            least = min(sent(each, r, ring, hand_over) for size in range(fewest, most + 1) for each in every[size])
            tried = [tuple("a" if first else "b" for first in order) for order in orders(number, fewest, most)]
            assert all(fewest <= each.count("a") <= most for each in tried)
            assert min(sent(each, r, ring, hand_over) for each in tried) == least, (r, fewest, most, ring, hand_over)


def test_rings_and_hand_overs_cross_as_the_nodes_lie() -> None:
    assert crossings(tuple("aabb"), 4, 1, 4) == (4, 0), "each tensor rank has a ring"
    assert crossings(tuple("aabb"), 4, 1, 1) == (1, 0), "one ring through all GPUs"
    assert crossings(tuple("abab"), 4, 1, 1) == (2, 0), "which crosses twice where zones alternate"
    assert crossings(tuple("aabb"), 4, 2, 4) == (8, 0), "replicas lie whole"
    assert crossings(tuple("abab"), 4, 2, 4) == (0, 8), "their first stages in one zone"
    assert crossings(tuple("abbb"), 4, 4, 4) == (0, 4)
    assert crossings(tuple("aabb"), 4, 1, 4, replicas=2) == (0, 0), "copies lie whole"
    assert crossings(tuple("abab"), 4, 1, 4, replicas=2) == (8, 0), "and here in halves, each with 4 rings"


def test_what_crosses_shares_the_link() -> None:
    efficiency = replace(SOFTWARE.efficiency, network=1.0)
    near, far = (Network(nodes("abab", gbps), efficiency) for gbps in (1e6, 8))
    stages, data = Layouts(np.array(2.0), np.array(4.0), np.array(2.0)), Layouts(*map(np.array, (1.0, 4.0, 4.0)))
    assert far.of_neighbours(stages) == 1e9 / 8
    assert far.of_data_ranks(stages) == near.of_data_ranks(stages), "no ring of these crosses"
    assert far.of_data_ranks(data) == 1e9 / 8, "4 rings, twice each"
    assert far.between == 1e9 / 8, "8 GPUs of a zone send at once"
    assert near.between == Network(replace(nodes("abab"), zones=()), efficiency).between


def planned(job: Job, cluster: Cluster, size: str = "7B") -> DeviceMapping:
    found = auto_map(job, cluster, shapes_of(job, MODELS[size]), device="GPU")  # type: ignore[index]
    assert isinstance(found, DeviceMapping)
    return found


def seconds(mapping: DeviceMapping) -> float:
    assert mapping.prediction
    return mapping.prediction.step_seconds


@pytest.mark.parametrize(("size", "gbps"), [("7B", 800), ("7B", 20), ("34B", 100), ("34B", 2)])
def test_a_pool_over_two_zones_is_as_fast_as_the_best_nodes(size: str, gbps: float) -> None:
    """All models together on all four nodes, which the search may not have: it takes one zone where that is faster."""
    job = job_of("ReMax", models={"actor": {"parallelism": {"pipeline": 2, "tensor": 4}}})
    shapes = shapes_of(job, MODELS[size])  # type: ignore[index]
    task, every = task_of(job, shapes, device="GPU"), nodes("aabb", gbps)
    models = frozenset(role for role in task.requests)

    def of(zones: tuple[str, ...]) -> float:
        setting = Setting(replace(every, zones=zones), task.software, task.load, task.correction)
        return float(PoolCosts(task.requests, [setting], [np.array([16])]).seconds(models, 0, 16).sum())

    sets = [tuple("a" if node in first else "b" for node in range(4)) for first in combinations(range(4), 2)]
    tried = task.costs(Cluster((every,)))
    over = [group for group, hosts in enumerate(tried.hosts) if len(hosts) == 2 and tried.groups[group] == 16]
    assert min(float(tried.seconds(models, group, 16).sum()) for group in over) == min(map(of, sets))


def test_a_slow_link_keeps_pools_in_one_zone() -> None:
    """Rings of data ranks over 8 nodes are fast over a network of one kind; each half has its own pool else."""
    job = job_of("ReMax", training={"promptBatchSize": 256})
    fast, slow = (planned(job, Cluster((nodes("aaaabbbb", gbps),))) for gbps in (1e5, 1))
    assert seconds(fast) < seconds(slow)
    assert all(len(set(pool.zones)) == 1 for pool in slow.pools)
    assert {pool.where for pool in slow.pools} <= {"4 a", "4 b", "2 a", "2 b", "1 a", "1 b"}


def test_a_model_over_both_zones_is_linked_between_stages() -> None:
    """A 70B model that fits on no zone alone: rings of its gradients would send more than hidden states do."""
    job = job_of("SFT", training={"batchSize": 64}, models={"actor": {"gradientCheckpointing": True}})
    mapping = planned(job, Cluster((nodes("aaaabbbb", 25, host_memory=1 * GB),)), "70B")
    (pool,), sizes = mapping.pools, mapping.sizes["actor"]
    assert set(pool.zones) == {"a", "b"}
    rings, hand_overs = crossings(pool.zones, 4, sizes.pipeline, sizes.tensor)
    assert not rings
    assert hand_overs


@pytest.mark.parametrize(("gbps", "auto"), [(0.5, "TopK"), (25, "None")])
def test_copies_compress_over_a_thin_link(gbps: float, auto: str) -> None:
    job = job_of("SFT", training={"batchSize": 64})
    task = task_of(job, shapes_of(job, MODELS["7B"]), device="GPU")
    passes, layouts = (
        Passes(MODELS["7B"], nodes("aabb", gbps), task.software),
        Layouts(*map(np.array, (1.0, 1.0, 16.0))),
    )

    def seconds_of(compression: Any, replicas: int) -> float:
        work = replace(task.load.work["actor"], replicas=replicas, compression=compression)
        return float(training_seconds(passes, work, task.load, layouts, np.array(4.0)))

    assert seconds_of("Auto", 2) == seconds_of(auto, 2)
    assert seconds_of("TopK", 2) < seconds_of("None", 2) < seconds_of("None", 1), "gathers of a copy stay in a zone"
    saved = 4 * MODELS["7B"].parameters * (1 - COMPRESSED) / (passes.network.between * 8)
    assert seconds_of("None", 2) - seconds_of("TopK", 2) == pytest.approx(saved)

    def held_with(compression: Any) -> float:
        request = replace(
            task.requests["actor"], work=replace(task.load.work["actor"], replicas=2, compression=compression)
        )
        setting = Setting(passes.nodes, task.software, task.load, task.correction)
        return PoolCosts({"actor": request}, [setting], [np.array([16])]).states("actor", 0)["optimizer"]

    assert held_with("Auto") == held_with(auto)
    assert held_with("TopK") - held_with("None") == 4 * MODELS["7B"].parameters, "what is not sent, in float32"


def drawn(seed: int) -> tuple[Job, NodeGroup]:
    draw = random.Random(seed)
    job = job_of(draw.choice(["PPO", "ReMax", "SFT"]), data={"maxResponseTokens": draw.choice([256, 2048])})
    return job, nodes("a" * draw.randint(1, 4) + "b" * draw.randint(1, 4), draw.choice([5, 50, 500]))


@pytest.mark.parametrize("seed", [*QUICK_SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5))])
def test_more_links_nodes_or_zones_never_make_a_plan_slower(seed: int) -> None:
    job, group = drawn(seed)
    less = [
        replace(group.in_zones[0], zone_bandwidth=None),
        replace(group, zone_bandwidth=group.zone_bandwidth and group.zone_bandwidth / 4),
    ]
    more = [
        replace(group, count=group.count + 1, zones=(*group.zones, "a")),
        replace(group, count=group.count + 2, zones=(*group.zones, "c", "c")),
        replace(group, zone_bandwidth=1e15),
    ]
    now = seconds(planned(job, Cluster((group,))))
    for each in less:
        assert now <= seconds(planned(job, Cluster((each,)))) * (1 + 1e-9), each.zones
    for each in more:
        assert seconds(planned(job, Cluster((each,)))) <= now * (1 + 1e-9), each.zones


def test_zones_make_no_plan_faster_than_one_network() -> None:
    job, one = job_of("PPO"), replace(nodes("aabb"), zones=(), zone_bandwidth=None)
    assert seconds(planned(job, Cluster((one,)))) <= seconds(planned(job, Cluster((nodes("aabb", 1e6),))))


def test_pools_by_hand_are_predicted_where_they_lie() -> None:
    job, cluster = job_of("ReMax"), Cluster((nodes("aabb", 5),))
    best = planned(job, Cluster((replace(nodes("aabb"), zones=(), zone_bandwidth=None),)))
    (pool,) = best.pools
    assert len(pool.slots_per_machine) == 4
    lies = [replace(best, pools=(replace(pool, zones=zones),)) for zones in (tuple("aabb"), tuple("abab"), ())]
    found = [predict(job, each, cluster, shapes_of(job)) for each in lies]
    order, turns, unknown = (seconds(each) for each in found if isinstance(each, DeviceMapping))
    assert seconds(best) < order < turns == unknown


@pytest.mark.parametrize(
    ("zones", "words"),
    [("aaaa", "4 a"), ("aabb", "2 a + 2 b"), ("aabaab", "2 x (2 a + 1 b)"), ("abb", "1 a + 2 b"), ("", "")],
)
def test_where_nodes_lie_is_told_in_the_order_of_ranks(zones: str, words: str) -> None:
    mapping = planned(job_of("SFT"), Cluster((nodes("a"),)))
    assert replace(mapping.pools[0], zones=tuple(zones)).where == words
