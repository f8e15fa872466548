"""The next attempts keep off a node that an earlier one failed on, for a time and if there is room elsewhere."""

from __future__ import annotations

from typing import Any

from rlhf_operator import failure
from rlhf_operator.actions import Create
from tests.each import each_case
from tests.operator.rendered import A100, node
from tests.operator.running_jobs import NODES, running
from tests.operator.simulated import SFT, World

GPUS = {"device": "GPU", "nodes": 2, "slotsPerNode": 1}


def next_attempt(world: World, wait: float = 60.0) -> list[set[str]]:
    """The nodes that each pod of the next attempt keeps off."""
    made: list[Create] = []
    for seconds in (0.0, 0.0, wait):
        world.wait(seconds)
        for _ in range(4):
            world.collect()
            plan = world.operate()
            made += [each for each in (plan.actions if plan else ()) if isinstance(each, Create)]
    (cluster,) = (each.manifest["spec"]["rayClusterSpec"] for each in made if each.manifest["kind"] == "RayJob")
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    return [avoided(group["template"]["spec"]) for group in groups]


def avoided(pod: dict[str, Any]) -> set[str]:
    affinity = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = affinity["nodeSelectorTerms"] if affinity else []
    found = [{each["values"][0] for each in term.get("matchFields", ())} for term in terms]
    assert all(each == found[0] for each in found), "whichever term holds"
    return found[0] if found else set()


def named(world: World) -> list[str]:
    return [each.message for each in world.events if each.reason == "NodesAvoided"]


def fail_on(world: World, code: int, pod: str | None) -> None:
    assert world.trainer
    world.trainer.pod = pod
    world.end(code)
    world.ray_tells()
    world.settle()
    world.wait(failure.EVIDENCE_SECONDS)
    world.settle()


@each_case(("code", "blamed"), [(8, True), (4, True), (5, False), (6, False), (1, False)])
def test_the_node_of_the_rank_to_blame_is_avoided(code: int, blamed: bool) -> None:
    world = running(nodes=NODES)
    worker = world.worker()
    fail_on(world, code, worker.name)
    (attempt,) = world.status.attempts
    assert (attempt.pod, attempt.node) == (worker.name, worker.node)
    told = [each.node for each in world.events if each.reason == "RLHFAttemptFailed"]
    assert told == [worker.node] * blamed, "an event about the node"
    expected = {worker.node} if blamed else set()
    assert next_attempt(world) == [expected, expected]
    assert [worker.node in each for each in named(world)] == [True] * blamed


def test_nobody_is_blamed_where_the_trainer_cannot_say_who_is() -> None:
    world = running(nodes=NODES)
    fail_on(world, 8, None)
    assert (world.status.attempts[0].reason, world.status.attempts[0].node) == ("Communication", None)
    assert next_attempt(world) == [set(), set()]


def test_a_node_is_forgiven_after_a_time() -> None:
    world = running(nodes=NODES)
    fail_on(world, 8, world.worker().name)
    assert next_attempt(world, wait=failure.NODE_AVOIDED_SECONDS) == [set(), set()]


def test_a_job_without_room_elsewhere_goes_back() -> None:
    there = tuple(node(f"node-{place}", gpus=1, product=A100) for place in range(2))
    world = World(spec={**SFT, "resources": GPUS}, nodes=there)
    world.run_to(3)
    fail_on(world, 8, world.worker().name)
    assert next_attempt(world) == [set(), set()]
    assert named(world) == []


def test_the_choice_of_gpus_does_not_lead_back() -> None:
    there = tuple(node(f"node-{place}", gpus=1, product=A100) for place in range(3))
    world = World(spec={**SFT, "resources": GPUS}, nodes=there)
    world.run_to(3)
    worker = world.worker()
    fail_on(world, 8, worker.name)
    assert next_attempt(world) == [{worker.node}, {worker.node}]
