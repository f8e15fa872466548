"""Pods that are not made or cannot start: what is said of them, and when that is a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rlhf_operator.cluster import parse
from rlhf_operator.evidence import NODE_SECONDS, START_SECONDS
from rlhf_operator.reconcile.attempt_status import SLOW_START_SECONDS
from rlhf_operator.reconcile.running import UNSCHEDULABLE_SECONDS
from rlhf_operator.snapshot import ObservedContainer, ObservedNode, ObservedRayJob
from tests.each import each_case
from tests.operator.running_jobs import NODES
from tests.operator.simulated import SFT, World
from tests.operator.test_a_job_lives_its_life import message, reason

LIMIT = "maximum memory usage per Container is 1Gi, but limit is 3Gi"
FULL = "exceeded quota: q, requested: memory=3Gi,pods=1, used: memory=6Gi,pods=3, limited: memory=1Ti,pods=3"
SMALL = "exceeded quota: q, requested: limits.memory=3Gi, used: limits.memory=0, limited: limits.memory=2Gi"
FEW = "exceeded quota: q, requested: count/pods=1, used: count/pods=2, limited: count/pods=2"
LOW = "exceeded quota: q, requested: requests.cpu=1, used: requests.cpu=1, limited: requests.cpu=2"
"""Too little for a head and two workers, though not for one of them."""


def begun(**policy: Any) -> World:
    """Its RayJob is made."""
    world = World(spec={**SFT, "runPolicy": policy}, nodes=NODES)
    world.settle()
    return world


def change(world: World, **fields: Any) -> None:
    """KubeRay says something of the RayJob."""
    rayjob = world.live
    assert rayjob
    world.rayjobs[rayjob.name] = replace(rayjob, **fields)


def refused(why: str) -> World:
    world = begun()
    change(world, deployment_status="Initializing", refused=why)
    world.settle()
    return world


@each_case("why", [LIMIT, FULL, SMALL, FEW, LOW])
def test_a_refusal_is_told_at_once_and_in_every_place(why: str) -> None:
    world, told = refused(why), "PodsRefused" if why == LIMIT else "QuotaExceeded"
    assert (reason(world, "ClusterReady"), world.status.reason) == (told, told)
    assert why in message(world, "ClusterReady")
    assert [each.kind for each in world.events if each.reason == told] == ["Warning"]
    world.settle()
    assert len([each for each in world.events if each.reason == told]) == 1


def without_secret(world: World) -> None:
    world.make_pods()
    world.change(world.head().name, containers=(container("CreateContainerConfigError", 'secret "x" not found'),))


def without_claim(world: World) -> None:
    world.make_pods()
    world.change(world.head().name, unschedulable='persistentvolumeclaim "c" not found')


def without_account(world: World) -> None:
    change(world, deployment_status="Initializing", refused='serviceaccount "nobody" not found')


@each_case(
    ("lack", "told"),
    [(without_secret, "SecretMissing"), (without_claim, "ClaimMissing"), (without_account, "PodsRefused")],
)
@each_case("comes", [True, False])
def test_what_may_still_come_is_awaited_until_the_deadline(
    lack: Callable[[World], None], told: str, comes: bool
) -> None:
    world = begun(startupDeadlineSeconds=1200)
    lack(world)
    world.settle()
    assert (world.phase, world.status.reason, reason(world, "ClusterReady")) == ("Provisioning", told, told)
    assert message(world, "ClusterReady").endswith("; the attempt waits until 2026-01-31T12:20:00Z")
    world.wait(1199)
    world.settle()
    assert (world.phase, world.made) == ("Provisioning", ["job-a1"])
    if comes:
        change(world, refused="")
        for pod in list(world.pods):
            world.change(pod, containers=(), unschedulable="")
        world.run_to(3)
        assert (world.phase, world.made, world.status.failed_attempts) == ("Running", ["job-a1"], 0)
        return
    world.wait(1)
    world.settle()
    assert (world.phase, world.status.reason, world.status.failed_attempts) == ("Restarting", told, 1)


@pytest.mark.parametrize("why", [SMALL, FEW, LOW])
def test_what_is_refused_for_ever_fails_the_job(why: str) -> None:
    world = refused(why)
    world.wait(START_SECONDS["QuotaTooSmall"] - 1)
    world.settle()
    assert world.phase == "Provisioning"
    world.wait(1)
    world.settle()
    assert (world.phase, world.status.reason) == ("Failed", "QuotaTooSmall")
    assert world.made == ["job-a1"]
    of_quota = {SMALL: "limits.memory", FEW: "count/pods", LOW: "requests.cpu"}
    told = message(world, "Failed")
    assert told.endswith(f"the whole job needs more {of_quota[why]} than that")


@pytest.mark.parametrize("why", [FULL, "exceeded quota: q", "exceeded quota: q, requested: x, used: y, limited: z"])
def test_a_full_quota_holds_no_pods_for_longer_than_two_minutes(why: str) -> None:
    world = begun()
    world.make_pods()
    del world.pods[world.worker().name]
    change(world, refused=why)
    world.wait(UNSCHEDULABLE_SECONDS - 1)
    world.settle()
    assert (world.phase, reason(world, "ClusterReady")) == ("Provisioning", "QuotaExceeded")
    world.wait(1)
    world.settle()
    assert (world.phase, world.live, world.status.reserved) == ("Queued", None, ())
    assert why in message(world, "QuotaReserved")
    world.start_again()
    world.run_to(3)
    assert [each.outcome for each in world.status.attempts] == ["Withdrawn", "Running"]
    assert (world.phase, world.status.failed_attempts) == ("Running", 0)


def test_without_kuberay_no_deadline_runs() -> None:
    world = begun(startupDeadlineSeconds=600)
    world.wait(5)
    world.settle()
    assert (reason(world, "ClusterReady"), world.status.reason) == ("KubeRayAway", "KubeRayAway")
    world.wait(6000)
    world.settle()
    assert world.made == ["job-a1"]
    assert not world.status.last_failure
    change(world, deployment_status="Initializing", started=world.now)
    world.wait(599)
    world.settle()
    assert not world.status.last_failure
    world.wait(1)
    world.settle()
    assert world.status.last_failure
    assert world.status.last_failure.reason == "StartupTimeout"


def container(why: str, says: str) -> ObservedContainer:
    return ObservedContainer(name="ray-head", waiting_reason=why, waiting_message=says)


@each_case(
    ("fields", "limit", "told"),
    [
        ({"containers": (container("ErrImagePull", "not found"),)}, START_SECONDS["ImagePull"], "ImagePull"),
        (
            {"containers": (container("CreateContainerConfigError", "runs as root"),)},
            START_SECONDS["ContainerRefused"],
            "ContainerRefused",
        ),
        (
            {"containers": (container("CreateContainerError", "no device"),)},
            START_SECONDS["ContainerRefused"],
            "ContainerRefused",
        ),
        (
            {"containers": (container("RunContainerError", "no such file"),)},
            START_SECONDS["ContainerRefused"],
            "ContainerRefused",
        ),
    ],
)
@each_case("node_is_behind", [0, 600])
def test_what_keeps_a_pod_is_looked_at_when_its_time_is_over(
    fields: dict[str, Any], limit: float, told: str, node_is_behind: int
) -> None:
    world = begun()
    world.make_pods()
    seen = world.now - timedelta(seconds=node_is_behind)
    world.change(world.head().name, not_ready_since=seen, **fields)
    world.settle()
    plan = world.operate()
    assert plan
    assert plan.requeue_after == limit
    assert not world.status.last_failure
    world.wait(limit)
    world.settle()
    assert world.status.last_failure
    assert world.status.last_failure.reason == told


@pytest.mark.parametrize("waits", ["ContainerCreating", "PodInitializing"])
def test_containers_that_wait_are_told_with_the_event(waits: str) -> None:
    world = begun()
    world.make_pods()
    world.complaint = "MountVolume.SetUp failed for volume data: timed out"
    world.change(world.head().name, ready=False, scheduled=world.now, containers=(container(waits, ""),))
    world.settle()
    assert reason(world, "ClusterReady") == "PodsPending"
    world.wait(SLOW_START_SECONDS)
    world.settle()
    assert reason(world, "ClusterReady") == "ContainersWaiting"
    told = message(world, "ClusterReady")
    assert f"waits ({waits}): {world.complaint}; the attempt waits until 2026-01-31T12:30:00Z" in told


@each_case(
    "why",
    [
        "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had volume node affinity conflict",
        "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind",
        "0/3 nodes are available: 3 node(s) did not have enough free storage",
        "Scheduling is blocked due to non-empty scheduling gates",
    ],
)
def test_a_pod_that_waits_for_no_room_has_until_the_deadline(why: str) -> None:
    world = begun(startupDeadlineSeconds=600)
    world.make_pods()
    world.change(world.worker().name, node="", unschedulable=why)
    for _ in range(2):
        world.settle()
        assert (world.phase, world.made) == ("Provisioning", ["job-a1"])
        world.wait(300)
    world.settle()
    assert world.status.last_failure
    assert world.status.last_failure.reason == "StartupTimeout"
    assert why in world.status.last_failure.message


def withdrawn(world: World) -> None:
    """No node takes a worker, and the next attempt begins if there is one."""
    world.make_pods()
    world.change(world.worker().name, node="", unschedulable="0/3 nodes are available: 3 Insufficient cpu")
    world.settle()
    world.wait(UNSCHEDULABLE_SECONDS)
    world.settle()
    assert world.status.attempts[-1].outcome == "Withdrawn"
    world.collect()
    world.wait(400)
    world.settle()


def test_a_withdrawn_job_waits_no_longer_than_it_wants() -> None:
    world = begun(queueDeadlineSeconds=1000)
    withdrawn(world)
    assert (world.phase, reason(world, "QuotaReserved")) == ("Queued", "Withdrawn")
    withdrawn(world)
    assert world.made == ["job-a1", "job-a2", "job-a3"]
    withdrawn(world)
    assert (world.phase, world.status.reason) == ("Failed", "QueueDeadlineExceeded")
    assert world.made == ["job-a1", "job-a2", "job-a3"]


def test_a_withdrawn_job_goes_once_all_pods_have_nodes() -> None:
    world = begun(queueDeadlineSeconds=1000)
    withdrawn(world)
    world.make_pods()
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved")) == ("Provisioning", "NotQueued")
    world.wait(1000)
    world.settle()
    assert world.phase == "Provisioning"


def test_a_silent_node_is_looked_at_again_when_its_time_is_over() -> None:
    world = World(nodes=tuple(ObservedNode(name=f"n{each}", ready=True, schedulable=True, labels={}) for each in "ab"))
    world.run_to(3)
    lost, kept = world.nodes or ()
    world.nodes = (replace(lost, ready=False), kept)
    for pod in list(world.pods.values()):
        if pod.node == lost.name:
            world.change(pod.name, ready=False, not_ready_since=world.now)
    plan = world.operate()
    assert plan
    assert plan.requeue_after is not None
    assert plan.requeue_after <= NODE_SECONDS


def test_a_refusal_is_read_from_the_rayjobs_status() -> None:
    said = 'FailedCreateHeadPod\npods "a-a1-x-head" is forbidden: ' + LIMIT
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateHeadPod", "message": said}
    cluster = {"conditions": [failure]}

    def read(**changes: str) -> ObservedRayJob:
        cluster["conditions"] = [{**failure, **changes}]
        return parse.parse_rayjob({"status": {"rayClusterStatus": cluster}}, "")

    assert read().refused == LIMIT
    assert read(status="False").refused == ""
    assert read(reason="FailedDeleteWorkerPod").refused == ""
