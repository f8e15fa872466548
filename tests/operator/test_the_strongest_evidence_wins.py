"""Two pieces of evidence at once: the stronger one names the failure, whichever pod it is on."""

from __future__ import annotations

from rlhf_operator import names
from rlhf_operator.snapshot import ObservedContainer
from tests.each import each_case
from tests.operator.running_jobs import failed, running
from tests.operator.simulated import World


def preempted(world: World, pod: str) -> None:
    world.change(pod, deleting_since=world.now, disruption="PreemptionByScheduler", ready=False)


def node_lost(world: World, pod: str) -> None:
    world.change(pod, deleting_since=world.now, disruption="DeletionByTaintManager", ready=False)


def evicted(world: World, pod: str) -> None:
    world.change(pod, deleting_since=world.now, disruption="EvictionByEvictionAPI", ready=False)


def out_of_memory(world: World, pod: str) -> None:
    own = names.HEAD_CONTAINER if world.pods[pod].role == names.CONTROLLER else names.WORKER_CONTAINER
    ended = ObservedContainer(name=own, exit_code=137, ended_reason="OOMKilled")
    world.change(pod, phase="Failed", ready=False, containers=(ended,))


def ended(world: World, pod: str) -> None:
    world.change(pod, phase="Failed", ready=False, reason="Error")


EVIDENCE = {
    "Preempted": preempted,
    "NodeLost": node_lost,
    "Evicted": evicted,
    "OutOfMemory": out_of_memory,
    "WorkerLost": ended,
}


@each_case("is_first", [True, False])
@each_case(
    ("stronger", "weaker"),
    [
        ("Preempted", "NodeLost"),
        ("NodeLost", "Evicted"),
        ("Evicted", "OutOfMemory"),
        ("OutOfMemory", "WorkerLost"),
    ],
)
def test_of_two_workers_the_stronger_evidence_wins(stronger: str, weaker: str, is_first: bool) -> None:
    world = running()
    workers = [pod.name for pod in world.pods.values() if pod.role == names.WORKER]
    blamed, other = workers if is_first else reversed(workers)
    EVIDENCE[stronger](world, blamed)
    EVIDENCE[weaker](world, other)
    world.settle()
    assert (failed(world).reason, failed(world).pod) == (stronger, blamed)


@each_case("lost", ["Preempted", "NodeLost", "Evicted", "OutOfMemory", "WorkerLost"])
@each_case(("code", "reason"), [(2, "Spec"), (3, "Data"), (6, "Numerics"), (7, "UserCode")])
def test_what_only_the_trainer_can_know_wins_over_a_lost_pod(code: int, reason: str, lost: str) -> None:
    world = running()
    world.end(code, "what it said")
    world.ray_tells()
    EVIDENCE[lost](world, world.worker().name)
    world.settle()
    assert failed(world).reason == reason


@each_case("lost", ["Preempted", "NodeLost", "Evicted", "OutOfMemory"])
@each_case("code", [1, 4])
def test_a_lost_pod_wins_over_what_may_be_its_consequence(code: int, lost: str) -> None:
    world = running()
    world.end(code, "what it said")
    world.ray_tells()
    EVIDENCE[lost](world, world.worker().name)
    world.settle()
    assert failed(world).reason == lost


def test_a_lost_head_wins_over_a_lost_worker() -> None:
    world = running()
    ended(world, world.worker().name)
    ended(world, world.head().name)
    world.settle()
    assert failed(world).reason == "HeadLost"
