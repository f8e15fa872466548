"""What becomes of a job that Kueue has preempted or evicted, on a simulated cluster that does as Kueue 0.15 does.

Its Workload says Evicted while the quota is still reserved; that is free when KubeRay has taken the cluster down.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_operator import conditions, names
from rlhf_operator.cluster import parse
from rlhf_operator.reconcile.decide import decide
from tests.operator.running_jobs import failed, running
from tests.operator.simulated import World
from tests.operator.test_a_job_lives_its_life import message, reason

QUEUED = {names.QUEUE: "team"}
EVICTION_SECONDS, FORCE_SECONDS = 10.0, 300.0


def preempted() -> World:
    """A job that was running."""
    world = running(labels=QUEUED)
    world.take_quota()
    assert world.quota
    assert world.quota.reserved
    return world


def starting() -> World:
    """A job that has its quota, and pods that have not started."""
    world = World(labels=QUEUED)
    world.settle()
    world.admit()
    world.make_pods()
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved")) == ("Provisioning", "QuotaReserved")
    return world


def admitted_beside_its_old_pods() -> World:
    """Preempted before it was whole, and admitted again while the old pods are still ending."""
    world = starting()
    world.take_quota()
    world.settle()
    world.take_down()
    world.settle()
    world.admit()
    world.wait(1)
    world.make_pods()
    world.start_pods()
    assert len(world.pods) == 6
    return world


def old_pods(world: World) -> list[str]:
    return [pod.name for pod in world.pods.values() if pod.deleting_since]


def requeue_after(world: World) -> float:
    seconds = decide(world.observe(fresh=True), world.now, world.settings).requeue_after
    assert seconds is not None
    return seconds


@pytest.mark.parametrize("is_free", [False, True])
def test_a_preemption_is_no_fault_of_a_running_job(is_free: bool) -> None:
    world = preempted()
    if is_free:
        world.take_down()
    world.settle()
    assert (failed(world).reason, world.status.failed_attempts, world.phase) == ("Preempted", 0, "Restarting")
    assert failed(world).message == "Kueue took the quota away: a job of higher priority came"
    assert world.status.attempts[-1].counted is False


def test_a_preempted_job_goes_on_when_it_is_admitted_again() -> None:
    world = preempted()
    world.settle()
    world.start_again()
    assert world.phase == "Queued"
    world.admit()
    world.run_to(20)
    assert (world.phase, world.made) == ("Running", ["job-a1", "job-a2"])
    assert [each.outcome for each in world.status.attempts] == ["Failed", "Running"]


def test_a_preemption_is_known_before_the_rayjob_is_suspended() -> None:
    world = preempted()
    world.rayjobs["job-a1"] = replace(world.rayjobs["job-a1"], suspended=False, deployment_status="Running")
    world.settle()
    assert failed(world).reason == "Preempted"


def test_another_eviction_is_none_either() -> None:
    world = preempted()
    assert world.quota
    world.quota = replace(world.quota, evicted="InactiveWorkload", message="the workload is deactivated")
    world.settle()
    assert (failed(world).reason, world.status.failed_attempts) == ("Evicted", 0)
    assert "the workload is deactivated" in failed(world).message


def suspended_before_kueue_says_why() -> World:
    world = running(labels=QUEUED)
    world.is_quota_lagging = True
    world.take_quota()
    world.settle()
    assert (world.phase, world.status.last_failure) == ("Running", None)
    assert requeue_after(world) == pytest.approx(EVICTION_SECONDS)
    return world


def test_a_suspension_explained_later_is_a_preemption() -> None:
    world = suspended_before_kueue_says_why()
    world.wait(EVICTION_SECONDS - 1)
    world.settle()
    assert world.phase == "Running"
    world.is_quota_lagging = False
    world.settle()
    assert (failed(world).reason, world.phase) == ("Preempted", "Restarting")


def test_a_suspension_whose_reason_is_never_seen_is_an_eviction() -> None:
    world = suspended_before_kueue_says_why()
    world.wait(EVICTION_SECONDS)
    world.settle()
    assert (failed(world).reason, world.status.failed_attempts, world.phase) == ("Evicted", 0, "Restarting")


def test_unreadable_workloads_are_not_waited_for() -> None:
    world = running(labels=QUEUED)
    world.take_quota()
    world.quota = None
    world.settle()
    assert failed(world).reason == "Evicted"


@pytest.mark.parametrize("why", ["Preempted", "PodsReadyTimeout"])
def test_an_eviction_before_pods_were_ready_queues_again(why: str) -> None:
    world = starting()
    world.take_quota()
    assert world.quota
    world.quota = replace(world.quota, evicted=why)
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved")) == ("Queued", why)
    world.collect()
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved")) == ("Queued", why)
    world.admit()
    world.run_to(3)
    assert (world.phase, world.made, world.status.failed_attempts) == ("Running", ["job-a1"], 0)


def test_a_job_admitted_again_waits_for_its_old_pods() -> None:
    world = admitted_beside_its_old_pods()
    old = old_pods(world)
    world.settle()
    assert (world.phase, reason(world, "QuotaReserved"), world.status.head_pod) == ("Queued", "Pending", None)
    assert message(world, "QuotaReserved") == f"waits until pod {old[0]} of an earlier admission is gone"
    for pod in old:
        assert world.phase == "Queued"
        del world.pods[pod]
        world.settle()
    assert (world.phase, world.status.head_pod) == ("Initializing", world.head().name)
    world.run_to(3)
    assert (world.phase, world.made, world.status.failed_attempts) == ("Running", ["job-a1"], 0)


def test_it_waits_for_a_stuck_pod_until_that_is_forced() -> None:
    world = admitted_beside_its_old_pods()
    limit = world.pods[old_pods(world)[0]].grace_seconds + 300
    world.settle()
    assert requeue_after(world) == pytest.approx(limit - 1)
    world.wait(limit - 2)
    world.settle()
    assert world.phase == "Queued"
    world.wait(1)
    world.settle()
    assert (failed(world).reason, world.phase) == ("HeadLost", "Restarting")


def test_a_pod_that_is_deleted_under_its_quota_is_lost_at_once() -> None:
    world = starting()
    world.change(world.head().name, deleting_since=world.now, ready=False)
    world.settle()
    assert (failed(world).reason, world.phase) == ("HeadLost", "Restarting")


def test_a_job_that_fails_early_waits_for_no_taken_quota() -> None:
    world = starting()
    world.restart_operator()
    world.rayjobs["job-a1"] = replace(world.rayjobs["job-a1"], deployment_status="Failed", job_status="FAILED")
    told = [("Finished", "True", "Failed"), ("QuotaReserved", "False", "Finished")]
    found = [{"type": kind, "status": status, "reason": why} for kind, status, why in told]
    world.quota = parse.quota({"status": {"conditions": found}})
    world.settle()
    assert (world.phase, world.status.attempts[-1].outcome) == ("Restarting", "Failed")
    ended = conditions.found(world.status.conditions, "QuotaReserved")
    assert ended
    assert (ended.status, ended.reason) == ("False", "Ended")
