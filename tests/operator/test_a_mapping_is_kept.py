"""When the next attempt has the mapping of the last one, and when the mapper is asked anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_operator.placement.map_job import still_fits
from rlhf_operator.snapshot import ObservedNode
from tests.each import each_case
from tests.operator.rendered import A100, SETTINGS, changed, mapped, nodes, snapshot
from tests.operator.simulated import SFT, World

H100 = "NVIDIA-H100-80GB-HBM3"
TWO = {"resources.nodes": 2, "resources.slotsPerNode": 4}


@each_case(
    ("there", "fits"),
    [
        (nodes(2, 4, A100), True),
        (nodes(5, 4, A100), True),
        (nodes(1, 8, A100), True),
        ((*nodes(1, 4, A100, "a"), *nodes(1, 8, A100, "b")), True),
        (nodes(1, 4, A100), False),
        (nodes(8, 2, A100), False),
        (nodes(2, 4, H100), False),
        (nodes(2), False),
        ((), False),
    ],
)
def test_the_pools_of_a_mapping_need_room(there: Sequence[ObservedNode], fits: bool) -> None:
    job = changed("helpful-sft", TWO)
    have = mapped(job, nodes(2, 4, A100))
    assert (have.slots, {pool.gpu for pool in have.pools}) == (8, {"a100-80g"})
    assert still_fits(job, have, snapshot(job, there), SETTINGS) == fits


@pytest.mark.parametrize(
    "changes", [{"data.maxResponseTokens": 47}, {"resources.nodes": 1}, {"models.critic.uri": "hf://a/b"}]
)
def test_a_mapping_is_of_one_spec_and_its_inputs(changes: dict[str, Any]) -> None:
    have = mapped(changed("helpful-ppo", TWO), nodes(2, 4, A100))
    other = changed("helpful-ppo", TWO | changes)
    assert not still_fits(other, have, snapshot(other, nodes(2, 4, A100)), SETTINGS)


def fleet(count: int) -> tuple[ObservedNode, ...]:
    return nodes(count, prefix="node-")


def slots(world: World) -> int:
    assert world.status.mapping
    return world.status.mapping.slots


def interrupted(**policy: Any) -> World:
    """A job on two nodes, at step 12, and two more nodes have come."""
    resources = {"device": "CPU", "nodes": 2, "maxNodes": 4, "slotsPerNode": 1}
    world = World(spec={**SFT, "resources": resources, "runPolicy": policy}, nodes=fleet(2))
    world.run_to(12)
    assert slots(world) == 2
    world.nodes = fleet(4)
    return world


@pytest.mark.parametrize(("action", "expected"), [("Restart", 2), ("Ignore", 2), ("Remap", 4)])
def test_a_rule_says_whether_the_mapper_is_asked_anew(action: str, expected: int) -> None:
    world = interrupted(failureRules=[{"name": "all", "action": action}])
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    assert (len(world.made), slots(world)) == (2, expected)


def test_a_lost_node_or_a_suspension_asks_the_mapper_anew() -> None:
    world = interrupted()
    world.nodes = fleet(5)[1:]
    world.settle()
    world.start_again()
    world.run_to(20)
    assert (len(world.made), slots(world)) == (2, 4)
    world.nodes = fleet(2)
    world.edit(suspend=True)
    for _ in range(3):
        world.settle()
        world.collect()
    world.edit(suspend=False)
    world.settle()
    assert (len(world.made), slots(world)) == (3, 2)
