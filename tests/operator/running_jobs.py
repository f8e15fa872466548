"""Simulated worlds in which a job is under way, for the tests of what interrupts it."""

from __future__ import annotations

from typing import Any

from rlhf_api.status import Failure
from rlhf_operator.snapshot import ObservedNode
from tests.operator.simulated import World

NODES = tuple(
    ObservedNode(
        name=f"node-{place}", ready=True, schedulable=True, labels={}, allocatable={"cpu": "64", "memory": "512Gi"}
    )
    for place in range(3)
)


def running(**fields: Any) -> World:
    """A job at step 12, with a checkpoint of step 10."""
    world = World(**fields)
    world.settle()
    world.admit()
    world.run_to(12)
    assert world.phase == "Running"
    return world


def failed(world: World) -> Failure:
    assert world.status.last_failure is not None
    return world.status.last_failure
