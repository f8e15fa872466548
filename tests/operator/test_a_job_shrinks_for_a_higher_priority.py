"""A job on more nodes than it needs gives some to a job of higher priority, and takes them back; simulated cluster.

A node has room for one worker pod; head pods have a node of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from rlhf_api.status import Attempt, Progress, SavedState, Status
from rlhf_operator.actions import Plan
from rlhf_operator.cluster.cache import Key
from rlhf_operator.times import timestamp
from tests.operator.rendered import A100
from tests.operator.shared_cluster import SharedCluster, node
from tests.operator.test_node_groups_that_grow import settings
from tests.operator.test_small_jobs_begin_before_their_turn import (
    WORKERS,
    begun,
    cluster_of,
    job,
    nodes_of,
    outcomes,
    told,
)


def with_classes(cluster: SharedCluster) -> SharedCluster:
    for name, value in (("low", -10), ("high", 10)):
        cluster.put("priorities", {"metadata": {"name": name, "uid": name}, "value": value})
    return cluster


def elastic(fewest: int, most: int, priority: str = "low", **fields: Any) -> dict[str, Any]:
    """A job on as many nodes as there are within these limits."""
    made = job(fewest, steps=10_000, **fields)
    made["resources"]["maxNodes"] = most
    return with_priority(made, priority)


def with_priority(made: dict[str, Any], priority: str) -> dict[str, Any]:
    made["runtime"]["worker"]["template"]["spec"]["priorityClassName"] = priority
    return made


def submit(cluster: SharedCluster, name: str, made: dict[str, Any]) -> None:
    cluster.submit(name, made)
    cluster.settle()


def train(cluster: SharedCluster, name: str, step: int, saved: int = 0, seconds: float = 200.0) -> None:
    """The current attempt reports so many steps of so many seconds, and a checkpoint."""
    now, status = timestamp(cluster.now), cluster.status(name)
    progress = Progress(step=step, total_steps=10_000, stage="SFT", step_seconds=seconds, last_step_time=now)
    checkpoint = SavedState(step=saved, uri="pvc://x/y", time=now) if saved else status.checkpoint
    last = status.attempts[-1]
    record = last.model_copy(update={"first_step": step if last.first_step is None else last.first_step})
    changes = {"attempts": (*status.attempts[:-1], record), "progress": progress, "checkpoint": checkpoint}
    cluster.write(cluster.home(name), status.model_copy(update=changes))
    cluster.settle()


def nodes_held(cluster: SharedCluster, name: str) -> int:
    mapping = cluster.status(name).mapping
    assert mapping
    return mapping.nodes


def shrunk() -> SharedCluster:
    """A job has given two of its four nodes to one of higher priority."""
    cluster = with_classes(cluster_of(4))
    submit(cluster, "big", elastic(1, 4))
    train(cluster, "big", step=9, saved=8)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    cluster.wait(100)
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Running"], 2)
    return cluster


def test_both_run_side_by_side_after_the_next_checkpoint() -> None:
    cluster = with_classes(cluster_of(4))
    submit(cluster, "big", elastic(1, 4))
    train(cluster, "big", step=1)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    train(cluster, "big", step=9, saved=4)
    cluster.wait(600)
    assert (begun(cluster, "urgent"), outcomes(cluster, "big")) == ([False], ["Running"]), "no step is lost"
    train(cluster, "big", step=10, saved=9)
    cluster.wait(600)
    assert begun(cluster, "urgent", "big") == [True, True]
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Running"], 2)
    assert cluster.status("big").attempts[0].message == (
        "Attempt 1 makes room for team/urgent of higher priority; the job goes on with 2 of its 4 nodes."
    )
    assert cluster.condition("big", "Mapped").message == "2 CPU slots (actor: 2 x 1)."
    assert cluster.status("big").failed_attempts == 0
    assert not cluster.status("big").attempts[-1].backfilled


def test_the_job_of_higher_priority_is_told_who_gives() -> None:
    cluster = with_classes(cluster_of(4))
    submit(cluster, "big", elastic(1, 4))
    train(cluster, "big", step=9)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    assert told(cluster, "urgent") == (
        "1st in line; no node has room for 2 of 2 pods of pool all (4 CPUs, 1Gi each); "
        "team/big makes room at its next checkpoint and goes on with 2 of its 4 nodes."
    )


@pytest.mark.parametrize(
    ("of_big", "wanted"),
    [
        pytest.param(elastic(1, 4, "high"), 2, id="of equal priority"),
        pytest.param(elastic(2, 4), 3, id="it keeps what it needs"),
        pytest.param(with_priority(job(4), "low"), 2, id="without maxNodes"),
    ],
)
def test_nobody_else_shrinks(of_big: dict[str, Any], wanted: int) -> None:
    cluster = with_classes(cluster_of(4))
    submit(cluster, "big", of_big)
    submit(cluster, "urgent", with_priority(job(wanted), "high"))
    cluster.wait(1000)
    assert (begun(cluster, "urgent"), outcomes(cluster, "big")) == ([False], ["Running"])


def test_of_two_jobs_only_one_shrinks_if_it_suffices() -> None:
    cluster = with_classes(cluster_of(6))
    for name, most in (("early", 4), ("late", 2)):
        submit(cluster, name, elastic(1, most))
        cluster.now += timedelta(seconds=5)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    cluster.wait(100)
    assert begun(cluster, "urgent") == [True]
    assert (nodes_held(cluster, "early"), nodes_held(cluster, "late")) == (2, 2), "late could give one of two"


def test_several_jobs_shrink_where_one_would_not_suffice() -> None:
    cluster = with_classes(cluster_of(6))
    for name in ("early", "late"):
        submit(cluster, name, elastic(1, 3))
    submit(cluster, "urgent", with_priority(job(3), "high"))
    cluster.wait(100)
    assert begun(cluster, "urgent") == [True]
    assert sorted((nodes_held(cluster, "early"), nodes_held(cluster, "late"))) == [1, 2]


def test_room_given_before_its_pods_exist_is_taken_at_once() -> None:
    cluster = with_classes(cluster_of(6))
    submit(cluster, "big", elastic(1, 6))
    train(cluster, "big", step=9, saved=8)
    for name in ("one", "two", "three"):
        cluster.submit(name, with_priority(job(1), "high"))
    cluster.wait(61)
    assert begun(cluster, "one", "two", "three") == [True, True, True]
    assert outcomes(cluster, "big") == ["Resized", "Resized", "Running"], "five nodes do not divide the batch"


def test_jobs_that_wait_together_are_served_by_one_shrink() -> None:
    cluster = with_classes(cluster_of(6))
    submit(cluster, "big", elastic(1, 6))
    train(cluster, "big", step=9)
    for name in ("one", "two", "three"):
        submit(cluster, name, with_priority(job(1), "high"))
    assert told(cluster, "one").endswith("makes room at its next checkpoint and goes on with 4 of its 6 nodes.")
    train(cluster, "big", step=10, saved=10)
    cluster.wait(61)
    assert begun(cluster, "one", "two", "three") == [True, True, True]
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Running"], 3)
    assert cluster.status("big").attempts[0].message == (
        "Attempt 1 makes room for team/one and team/three and team/two of higher priority; "
        "the job goes on with 3 of its 6 nodes."
    )


def test_a_guest_gives_its_room_before_another_job_shrinks() -> None:
    cluster = with_classes(cluster_of(4))
    submit(cluster, "big", elastic(1, 3))
    for name, made in (("wide", job(4)), ("guest", with_priority(job(1, steps=10), "low"))):
        submit(cluster, name, made)
    assert cluster.status("guest").attempts[-1].backfilled
    submit(cluster, "urgent", with_priority(job(1), "high"))
    cluster.wait(100)
    assert begun(cluster, "urgent", "guest") == [True, False]
    assert outcomes(cluster, "big") == ["Running"]


def test_no_third_job_takes_the_room_that_is_kept() -> None:
    """An older job of the same priority waits, too."""
    cluster = with_classes(cluster_of(4))
    submit(cluster, "older", {**with_priority(job(1), "low"), "suspend": True})
    submit(cluster, "big", elastic(1, 4))
    submit(cluster, "urgent", with_priority(job(2), "high"))
    document = cluster.objects["jobs"][cluster.home("older")]
    spec = {key: value for key, value in document["spec"].items() if key != "suspend"}
    cluster.put("jobs", {**document, "spec": spec, "metadata": {**document["metadata"], "generation": 2}})
    cluster.settle()
    cluster.wait(1000)
    assert begun(cluster, "older", "urgent", "big") == [False, True, True]
    assert nodes_held(cluster, "big") == 2


def test_it_goes_on_in_its_room_before_the_other_begins() -> None:
    """Only one node is large enough for the job of higher priority."""
    nodes = [node("narrow", 4, {}, **WORKERS), node("wide", 8, {}, **WORKERS), *nodes_of(0)]
    cluster = with_classes(SharedCluster(nodes))
    submit(cluster, "big", elastic(1, 3))
    urgent = with_priority(job(1), "high")
    urgent["runtime"]["worker"]["cpu"] = "8"
    cluster.submit("urgent", urgent)
    for name in ("urgent", "big", "big", "urgent"):
        cluster.operate(cluster.home(name))
    assert [each.outcome for each in cluster.status("big").attempts] == ["Resized", "Starting"]
    held = {name: [each.node for each in cluster.status(name).reserved] for name in ("big", "urgent")}
    assert held == {"big": ["heads", "narrow"], "urgent": ["heads", "wide"]}


def test_it_takes_nothing_back_on_nodes_that_do_not_exist() -> None:
    """A group may add nodes, but none that is large enough for the job of higher priority."""
    nodes = [node("narrow", 4, {}, **WORKERS), node("wide", 8, {}, **WORKERS), *nodes_of(0)]
    group = {"name": "g", "max": 8, "matchLabels": WORKERS, "cpu": "4", "memory": "512Gi"}
    cluster = with_classes(SharedCluster(nodes, settings=settings(group)))
    submit(cluster, "big", elastic(1, 3))
    urgent = with_priority(job(1), "high")
    urgent["runtime"]["worker"]["cpu"] = "8"
    cluster.submit("urgent", urgent)
    for name in ("urgent", "big", "urgent"):
        cluster.operate(cluster.home(name))
    cluster.settle()
    train(cluster, "big", step=9, saved=8)
    train(cluster, "big", step=10, saved=10)
    cluster.wait(200)
    assert (outcomes(cluster, "big"), begun(cluster, "urgent")) == (["Resized", "Running"], [True])


def test_it_keeps_off_nodes_on_which_it_failed() -> None:
    cluster = with_classes(cluster_of(5))
    cluster.submit("big", elastic(1, 4))
    now = timestamp(cluster.now)
    failed = Attempt(
        attempt=1, start_time=now, end_time=now, slots=4, outcome="Failed", reason="NodeLost", node="node-4"
    )
    cluster.write(cluster.home("big"), Status(attempt=1, attempts=(failed,)))
    cluster.settle()
    train(cluster, "big", step=9, saved=9)
    cluster.submit("urgent", with_priority(job(2), "high"))
    for name in ("urgent", "big"):
        cluster.operate(cluster.home(name))
    assert outcomes(cluster, "big") == ["Failed", "Resized"]
    assert "node-4" not in [each.node for each in cluster.status("big").reserved]


def test_it_gives_no_more_than_is_needed() -> None:
    cluster = with_classes(cluster_of(5))
    submit(cluster, "big", elastic(1, 4))
    submit(cluster, "urgent", with_priority(job(2), "high"))
    cluster.wait(100)
    assert begun(cluster, "urgent") == [True]
    assert nodes_held(cluster, "big") == 3, "one node was free"


def test_no_job_shrinks_if_a_group_adds_nodes() -> None:
    group = {"name": "g", "max": 6, "matchLabels": WORKERS, "cpu": "4", "memory": "512Gi"}
    cluster = with_classes(SharedCluster(nodes_of(4), settings=settings(group)))
    submit(cluster, "big", elastic(1, 4))
    submit(cluster, "urgent", with_priority(job(2), "high"))
    cluster.wait(100)
    assert cluster.status("urgent").phase == "WaitingForNodes"
    assert outcomes(cluster, "big") == ["Running"]


def test_a_job_of_many_sizes_begins_on_the_nodes_of_another() -> None:
    """Both may have all GPUs; the one of higher priority begins with as few as it may."""
    cluster = with_classes(SharedCluster(nodes_of(0)))
    for number in range(4):
        labels = {**WORKERS, "nvidia.com/gpu.product": A100}
        cluster.put("nodes", node(f"gpu-{number}", 64, {"nvidia.com/gpu": "8"}, **labels))
    for name, priority in (("big", "low"), ("urgent", "high")):
        made = elastic(1, 4, priority)
        made["resources"] = {"device": "GPU", "nodes": 1, "maxNodes": 4, "slotsPerNode": 8}
        made["training"]["batchSize"] = 96
        submit(cluster, name, made)
    cluster.wait(100)
    assert begun(cluster, "urgent") == [True]
    assert outcomes(cluster, "big") == ["Resized", "Running"]
    assert (nodes_held(cluster, "big"), nodes_held(cluster, "urgent")) == (3, 1)


def test_it_takes_its_nodes_back_after_a_checkpoint() -> None:
    cluster = shrunk()
    cluster.end("urgent-a1")
    cluster.settle()
    cluster.wait(1000)
    assert nodes_held(cluster, "big") == 2, "its second attempt has saved nothing"
    train(cluster, "big", step=10, saved=8)
    train(cluster, "big", step=20, saved=20)
    cluster.wait(100)
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Resized", "Running"], 4)
    assert cluster.status("big").attempts[1].message == (
        "The job takes back 2 nodes that it had given away; it goes on with 4."
    )
    train(cluster, "big", step=30, saved=30)
    for _ in range(50):
        cluster.operate(cluster.home("big"))
    assert outcomes(cluster, "big") == ["Resized", "Resized", "Running"]


def test_it_takes_nodes_back_where_one_more_divides_no_batch() -> None:
    cluster = with_classes(cluster_of(4))
    made = elastic(1, 4)
    made["training"]["batchSize"] = 16
    submit(cluster, "big", made)
    submit(cluster, "urgent", with_priority(job(2), "high"))
    cluster.wait(100)
    cluster.end("urgent-a1")
    train(cluster, "big", step=10, saved=8)
    train(cluster, "big", step=20, saved=20)
    cluster.wait(100)
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Resized", "Running"], 4)


@pytest.mark.parametrize("priority", ["low", "high"])
def test_it_takes_nothing_back_that_another_waits_for(priority: str) -> None:
    cluster = shrunk()
    submit(cluster, "waits", with_priority(job(4), priority))
    train(cluster, "big", step=20, saved=8)
    cluster.end("urgent-a1")
    train(cluster, "big", step=30, saved=30)
    cluster.wait(1000)
    assert (begun(cluster, "waits"), outcomes(cluster, "big")) == ([False], ["Resized", "Running"])


def test_it_takes_nothing_back_from_a_job_that_is_to_begin_anew() -> None:
    cluster = shrunk()
    train(cluster, "big", step=20, saved=8)
    (pod, *_) = [each for each in cluster.pods_of("urgent-a1") if each["spec"]["nodeName"] != "heads"]
    lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": ""}
    cluster.put("pods", {**pod, "status": {"phase": "Failed", "conditions": [lost]}})
    cluster.settle()
    train(cluster, "big", step=30, saved=30)
    assert (begun(cluster, "urgent"), outcomes(cluster, "big")) == ([False], ["Resized", "Running"])
    cluster.wait(300)
    assert (outcomes(cluster, "urgent"), outcomes(cluster, "big")) == (["Failed", "Running"], ["Resized", "Running"])


def test_it_takes_no_more_than_it_gave() -> None:
    cluster = shrunk()
    for number in range(4):
        cluster.put("nodes", node(f"new-{number}", 4, {}, **WORKERS))
    document = cluster.objects["jobs"][cluster.home("big")]
    resources = {**document["spec"]["resources"], "maxNodes": 8}
    cluster.put("jobs", {**document, "spec": {**document["spec"], "resources": resources}})
    train(cluster, "big", step=20, saved=8)
    train(cluster, "big", step=30, saved=30)
    cluster.wait(100)
    assert (outcomes(cluster, "big"), nodes_held(cluster, "big")) == (["Resized", "Resized", "Running"], 4)


def test_it_stays_small_shortly_before_its_end() -> None:
    cluster = shrunk()
    cluster.end("urgent-a1")
    train(cluster, "big", step=9_998, saved=8, seconds=100.0)
    train(cluster, "big", step=9_999, saved=9_999, seconds=100.0)
    cluster.wait(30)
    assert outcomes(cluster, "big") == ["Resized", "Running"]


class KilledError(Exception):
    """The operator dies."""


class Killed(SharedCluster):
    """The operator is killed after so many writes to the server; the next one begins at once."""

    at, writes, is_at_work = 0, 0, False

    def operate(self, key: Key) -> Plan | None:
        self.is_at_work = True
        try:
            return super().operate(key)
        except KilledError:
            self.start_operator()
            return None
        finally:
            self.is_at_work = False

    def write(self, key: Key, status: Status) -> None:
        super().write(key, status)
        self.count_write()

    def _create(self, manifest: Mapping[str, Any]) -> None:
        super()._create(manifest)
        self.count_write()

    def delete_rayjob(self, namespace: str, name: str) -> None:
        super().delete_rayjob(namespace, name)
        self.count_write()

    def count_write(self) -> None:
        self.writes += self.is_at_work
        if self.is_at_work and self.writes == self.at:
            raise KilledError


def whole_life(at: int) -> tuple[object, int]:
    """Return what becomes of both jobs from the request on, and the number of the operator's writes."""
    cluster = Killed(nodes_of(2))
    with_classes(cluster)
    submit(cluster, "big", elastic(1, 2))
    train(cluster, "big", step=9, saved=8)
    cluster.writes, cluster.at = 0, at
    submit(cluster, "urgent", with_priority(job(1), "high"))
    cluster.wait(100)
    cluster.end("urgent-a1")
    cluster.settle()
    train(cluster, "big", step=20, saved=8)
    train(cluster, "big", step=30, saved=30)
    cluster.wait(100)
    ends = [[(each.outcome, each.slots) for each in cluster.status(name).attempts] for name in ("big", "urgent")]
    return (ends, sorted(cluster.begun), cluster.status("big").failed_attempts), cluster.writes


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_changes_nothing(every: int) -> None:
    """`make test` tries each fifth write, `make test-full` all."""
    whole, writes = whole_life(0)
    assert whole == (
        [[("Resized", 2), ("Resized", 1), ("Running", 2)], [("Succeeded", 1)]],
        ["big-a1", "big-a2", "big-a3", "urgent-a1"],
        0,
    )
    for at in range(every, writes + 1, every):
        assert whole_life(at)[0] == whole, at
