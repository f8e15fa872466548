"""A job begins on nodes that an autoscaler has yet to add; the autoscaler is played, and so is the scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_operator import names
from rlhf_operator.actions import Create
from rlhf_operator.cluster import parse
from rlhf_operator.placement.map_job import map_job
from rlhf_operator.placement.node_groups import with_coming_nodes
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.settings import Settings
from tests.each import each_case
from tests.operator.rendered import A100, changed, groups, made, node, pod_of, snapshot
from tests.operator.shared_cluster import NAMESPACE, SharedCluster, spec
from tests.operator.shared_cluster import node as node_document
from tests.operator.simulated import World

HEAD = 1.05
"""CPUs of a head pod with its side-car."""
POOL = {"pool": "a"}
GROUP = {"name": "grows", "max": 2, "matchLabels": POOL, "cpu": "1", "memory": "2Gi", "deadlineSeconds": 600}
GPUS = {"name": "a100", "max": 4, "matchLabels": {"pool": "a100"}, "gpu": A100, "gpusPerNode": 8}


def settings(*entries: dict[str, Any], **fields: Any) -> Settings:
    return Settings.model_validate({"nodeGroups": list(entries), **fields}, by_alias=True, by_name=False)


def growing(*more: dict[str, Any]) -> SharedCluster:
    """A node for head pods, and a group of up to two nodes with room for a worker each."""
    return SharedCluster([node_document("heads", 9 * HEAD)], settings=settings(GROUP, *more))


def workers(count: int, **fields: Any) -> dict[str, Any]:
    return spec(count, on=POOL, **fields)


def add_node(cluster: SharedCluster, name: str) -> None:
    """An autoscaler adds a node for pods that no node takes."""
    cluster.put("nodes", node_document(name, 1, pool="a"))


def reserved(cluster: SharedCluster, job: str) -> list[str]:
    return [each.node for each in cluster.status(job).reserved]


def test_pods_are_made_for_nodes_that_a_group_may_add() -> None:
    cluster = growing()
    cluster.submit("job", workers(2))
    cluster.settle()
    assert (cluster.status("job").phase, cluster.begun) == ("WaitingForNodes", ["job-a1"])
    assert reserved(cluster, "job") == ["grows/00001", "grows/00002", "heads"]
    told = cluster.condition("job", "QuotaReserved")
    assert told.message == "Attempt 1 waits for 2 nodes that node group grows is to add."
    cluster.wait(300)
    assert cluster.status("job").phase == "WaitingForNodes", "two minutes are too short for a new node"
    add_node(cluster, "new-1")
    cluster.settle()
    assert cluster.status("job").phase == "WaitingForNodes"
    add_node(cluster, "new-2")
    cluster.settle()
    cluster.wait(10_000)
    assert reserved(cluster, "job") == ["heads", "new-1", "new-2"]
    assert [each.outcome for each in cluster.status("job").attempts][:1] != ["Withdrawn"]


def test_time_without_nodes_is_no_time_with_slots() -> None:
    cluster = growing()
    cluster.submit("job", workers(1, runPolicy={"activeDeadlineSeconds": 60}))
    cluster.settle()
    cluster.wait(300)
    add_node(cluster, "new-1")
    cluster.settle()
    assert cluster.status("job").phase == "Provisioning"


def test_a_group_that_adds_nothing_is_named_and_avoided() -> None:
    other = {**GROUP, "name": "other", "matchLabels": {**POOL, "other": "yes"}}
    cluster = growing(other)
    cluster.submit("job", workers(1))
    cluster.settle()
    assert reserved(cluster, "job") == ["grows/00001", "heads"]
    cluster.wait(599)
    assert cluster.begun == ["job-a1"]
    cluster.wait(60)
    first, second = cluster.status("job").attempts
    assert first.outcome == "Withdrawn"
    assert first.message
    assert "for 600 s node group grows has not added all nodes, and no node took pod job-a1-" in first.message
    assert (second.attempt, reserved(cluster, "job")) == (2, ["heads", "other/00001"])
    assert cluster.status("job").phase == "WaitingForNodes"
    assert cluster.status("job").failed_attempts == 0


def test_room_on_coming_nodes_is_given_to_one_job_only() -> None:
    cluster = growing()
    for name in ("first", "second", "third"):
        cluster.submit(name, workers(1))
    cluster.settle()
    phases = [cluster.status(name).phase for name in ("first", "second", "third")]
    assert phases == ["WaitingForNodes", "WaitingForNodes", "Queued"]
    assert cluster.begun == ["first-a1", "second-a1"]
    add_node(cluster, "new-1")
    cluster.pass_over_all()
    assert cluster.begun == ["first-a1", "second-a1"], "the new node is for a job that waits for it"
    cluster.settle()
    add_node(cluster, "new-2")
    cluster.settle()
    assert [cluster.status(name).phase for name in ("first", "second", "third")] == [
        *("Provisioning", "Provisioning", "Queued")
    ]


def test_a_pod_on_a_new_node_takes_the_room_held_for_it() -> None:
    cluster = SharedCluster(
        [node_document("heads", 9 * HEAD), node_document("free", 1, pool="b")], settings=settings(GROUP)
    )
    cluster.submit("job", workers(2))
    cluster.settle()
    add_node(cluster, "new-1")
    cluster.settle()
    cluster.submit("beside", spec(on={"pool": "b"}))
    cluster.settle()
    assert cluster.begun == ["job-a1", "beside-a1"]


def test_a_killed_operator_goes_on_waiting() -> None:
    cluster = growing()
    cluster.submit("job", workers(2))
    cluster.settle()
    cluster.start_operator()
    cluster.settle()
    cluster.wait(300)
    assert (cluster.status("job").phase, cluster.begun) == ("WaitingForNodes", ["job-a1"])


def test_more_than_the_group_may_have_is_not_tried() -> None:
    cluster = growing()
    cluster.submit("job", workers(4))
    cluster.settle()
    assert (cluster.status("job").phase, cluster.begun) == ("Mapping", [])


@each_case("mode", ["Auto", "Manual"])
@each_case("queue", [None, "team"])
def test_gpus_of_a_group_are_planned_on(mode: str, queue: str | None) -> None:
    manual = {"mode": "Manual", "pools": [{"name": "all", "models": ["actor"], "nodes": 2, "slotsPerNode": 8}]}
    by_mode: dict[str, dict[str, Any]] = {
        "Auto": {"resources": {"device": "GPU", "nodes": 2, "slotsPerNode": 8}},
        "Manual": {"resources": {"device": "GPU"}, "placement": manual},
    }
    job = changed("helpful-sft", by_mode[mode])
    grows = settings(GPUS)
    there = with_coming_nodes([node("cpu"), node("old", labels={"pool": "a100"})], grows)
    assert [each.name for each in there] == ["cpu", "old", "a100/00002", "a100/00003", "a100/00004"]
    seen = snapshot(job, there, labels={names.QUEUE: queue} if queue else {})
    mapping = map_job(job, seen, grows).mapping
    assert mapping
    assert (mapping.device, sum(pool.nodes for pool in mapping.pools)) == ("GPU", 2)


def test_a_group_counts_as_gpus_that_exist() -> None:
    tainted = {**GPUS, "taints": [{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]}
    job = changed("helpful-ppo", {"resources.device": "Auto"})
    answer = map_job(job, snapshot(job, with_coming_nodes([node("cpu")], settings(tainted))), settings(tainted))
    assert answer.reason == "GPUNodesUnusable"
    assert "tainted dedicated=gpu:NoSchedule" in answer.message


def test_pods_name_the_labels_that_an_autoscaler_knows() -> None:
    job, grows = changed("helpful-sft", {"resources": {"device": "GPU", "nodes": 2, "slotsPerNode": 8}}), settings(GPUS)
    there = with_coming_nodes([node("cpu"), node("old", gpus=8, product=A100)], grows)

    def terms(**more: Any) -> list[Any]:
        (group,) = groups(made(job, there, grows, **more)["RayJob"]).values()
        affinity = pod_of(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return [each["matchExpressions"] for each in affinity["nodeSelectorTerms"]]

    of_old = [{"key": "nvidia.com/gpu.product", "operator": "In", "values": [A100]}]
    of_group = [{"key": "pool", "operator": "In", "values": ["a100"]}]
    assert terms() == [of_old, of_group]
    assert terms(avoided=("a100/00001",)) == [of_old]


def test_no_autoscaler_and_no_drain_takes_a_worker() -> None:
    world = World()
    world.settle()
    world.make_pods()
    world.start_pods()
    plan = decide(world.observe(fresh=True), world.now, world.settings)
    (budget,) = [each.manifest for each in plan.actions if isinstance(each, Create)]
    assert budget["kind"] == "PodDisruptionBudget"
    assert budget["metadata"]["ownerReferences"][0]["kind"] == "RayJob", "it goes when the attempt ends"
    labels = budget["spec"]["selector"]["matchLabels"]
    workers = groups(made(changed("helpful-sft", {}), [node("cpu")])["RayJob"]).values()
    for each in workers:
        metadata = each["template"]["metadata"]
        assert labels.keys() <= metadata["labels"].keys()
        assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert budget["spec"]["minAvailable"] == len(world.pods)


@each_case(
    ("fields", "message"),
    [
        ({"nodeGroups": [{"matchLabels": POOL, "max": 1}]}, "needs name and matchLabels"),
        ({"nodeGroups": [{"name": "a", "matchLabels": {}, "max": 1}]}, "needs name and matchLabels"),
        ({"nodeGroups": [{**GPUS, "gpusPerNode": 0}]}, "needs both gpu and gpusPerNode"),
        ({"nodeGroups": [GPUS, GPUS]}, "two entries with max and the same name"),
        ({"nodeGroups": [GPUS], "topology": [{"label": "zone", "gbps": 1}]}, "a100 needs zone in matchLabels"),
    ],
)
def test_an_incomplete_group_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate(fields, by_alias=True, by_name=False)


def test_entries_of_the_last_release_are_valid() -> None:
    old = {"matchLabels": POOL, "interNodeGbps": 100, "intraNodeGBps": 600, "pricePerGpuHour": 2}
    assert with_coming_nodes([], settings(old)) == ()
    assert settings(old).node_figures(POOL).price_per_gpu_hour == 2


@pytest.mark.parametrize(
    ("state", "message"), [("Pending", "admission check prov is pending: 2 nodes are asked for"), ("Ready", "reserved")]
)
def test_a_check_of_kueue_that_adds_nodes_is_told(state: str, message: str) -> None:
    reserved = {"type": "QuotaReserved", "status": "True", "message": "reserved"}
    check = {"name": "prov", "state": state, "message": "2 nodes are asked for"}
    assert parse.quota({"status": {"conditions": [reserved], "admissionChecks": [check]}}).message == message


def test_a_job_in_the_cluster_begins_once_a_group_is_named() -> None:
    without, named = SharedCluster([node_document("heads", 9 * HEAD)]), growing()
    for cluster in (without, named):
        cluster.submit("job", workers(1))
        cluster.settle()
    assert (without.begun, named.begun) == ([], ["job-a1"])
    assert (NAMESPACE, "job-a1") in named.objects["rayjobs"]
