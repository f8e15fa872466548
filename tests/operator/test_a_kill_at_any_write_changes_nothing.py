"""A life with a suspension, a failure and a lost node ends the same wherever the operator is killed; simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from rlhf_operator.actions import Plan
from rlhf_operator.snapshot import ObservedNode
from tests.operator.running_jobs import NODES
from tests.operator.simulated import World

DEATHS = (-1, 0, 1, 2, 3)
"""Actions done before an operator is killed; -1 is before the status is written."""


@dataclass
class Killed(World):
    """A cluster whose operator is killed once, in a pass, after so many actions; the next one begins at once."""

    at: int | None = None
    done: int = 0
    passes: int = 0

    def operate(self, *, dies_after: int | None = None) -> Plan | None:
        self.passes += 1
        if self.passes - 1 == self.at:
            super().operate(dies_after=self.done)
            self.restart_operator()
        return super().operate(dies_after=dies_after)


def suspend_and_resume(world: Killed) -> None:
    world.edit(suspend=True)
    world.settle()
    world.save_and_end(6)
    world.settle()
    world.collect()
    world.collect()
    world.settle()
    assert world.phase == "Suspended"
    world.edit(suspend=False)


def lose_a_node(world: Killed) -> None:
    """The node of the head pod is silent for good."""
    lost, begun = world.head().node, world.now
    silent = (replace(each, ready=False, not_ready_since=begun) for each in world.nodes or () if each.name == lost)
    world.nodes = (*silent, *(each for each in world.nodes or () if each.name != lost))
    for pod in [each.name for each in world.pods.values() if each.node == lost]:
        world.change(pod, ready=False, not_ready_since=begun)
    for seconds in (61, 1, 120, 400):  # a new operator counts silence from its own beginning
        world.wait(seconds)
        world.settle()
        world.collect()
        world.settle()


def through(world: Killed) -> Killed:
    """A life up to its end."""
    world.run_to(5)
    suspend_and_resume(world)
    world.run_to(12)
    world.end(5)
    world.ray_tells()
    world.settle()
    world.start_again()
    world.run_to(3)
    if world.nodes:
        lose_a_node(world)
    world.run_to(60)
    world.end(0)
    world.ray_tells()
    for _ in range(3):
        world.settle()
        world.collect()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [None, NODES], ids=["unknown nodes", "nodes"])
def test_a_kill_at_any_write_changes_nothing(nodes: tuple[ObservedNode, ...] | None) -> None:
    whole = through(Killed(nodes=nodes))
    assert (whole.phase, len(whole.made)) == ("Succeeded", 4 if nodes else 3)
    for at in range(whole.passes):
        for done in DEATHS:
            world = through(Killed(nodes=nodes, at=at, done=done))
            ended = (world.phase, world.made, world.status.failed_attempts, world.pods)
            assert ended == (whole.phase, whole.made, whole.status.failed_attempts, {}), (at, done)
