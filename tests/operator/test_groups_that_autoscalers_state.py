"""Node groups by Karpenter's NodePools and Cluster Autoscaler's status; the objects have their documented form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_operator import names
from rlhf_operator.cluster.autoscalers import UNLIMITED, read_live_groups, with_live_groups
from rlhf_operator.placement.map_job import map_job
from rlhf_operator.placement.node_groups import with_coming_nodes
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document
from tests.each import each_case
from tests.operator.elastic_cluster import POOL, ElasticCluster
from tests.operator.elastic_cluster import elastic as elastic_job
from tests.operator.rendered import A100, changed, groups, made, node, pod_of, snapshot
from tests.operator.shared_cluster import node as node_document
from tests.operator.test_a_job_lives_its_life import reason
from tests.operator.test_a_pool_grows_and_shrinks import size
from tests.operator.test_kueue_takes_the_quota_away import starting
from tests.operator.test_node_groups_that_grow import settings
from tests.operator.test_small_jobs_begin_before_their_turn import WORKERS
from tests.operator.test_writes_to_a_failing_server import Parts, run

STATUS = """
autoscalerStatus: Running
clusterWide:
  health: {status: Healthy, nodeCounts: {registered: {ready: 4, total: 4}}}
  scaleUp: {status: NoActivity, lastTransitionTime: "2026-10-02T14:29:02Z"}
nodeGroups:
- name: https://www.googleapis.com/compute/v1/projects/p/zones/z/instanceGroups/a100
  health:
    cloudProviderTarget: 1
    maxSize: 6
    minSize: 1
    nodeCounts: {registered: {ready: 1, total: 1}}
    status: Healthy
  scaleDown: {status: NoCandidates}
- name: general
  health: {cloudProviderTarget: 3, maxSize: 9, minSize: 3, status: Healthy}
time: 2026-10-02 14:29:22.999645779 +0000 UTC
"""
NAMED = {"name": "a100", "matchLabels": {"pool": "a100"}, "gpu": A100, "gpusPerNode": 8}


def node_pool(name: str = "gpus", weight: int | None = None, limits: Any = None, **values: list[str]) -> dict[str, Any]:
    """A NodePool whose requirements have these values, by the last part of their keys."""
    keys = {"gpu_count": "karpenter.k8s.aws/instance-gpu-count", "gpu_name": "karpenter.k8s.aws/instance-gpu-name"}
    keys |= {"gpu_memory": "karpenter.k8s.aws/instance-gpu-memory", "type": "node.kubernetes.io/instance-type"}
    keys |= {"capacity": "karpenter.sh/capacity-type", "zone": "topology.kubernetes.io/zone"}
    requirements = [{"key": keys[key], "operator": "In", "values": each} for key, each in values.items()]
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "template": {
                "metadata": {"labels": {"team": "research"}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"},
                    "requirements": [{"key": "kubernetes.io/arch", "operator": "Exists"}, *requirements],
                    "taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}],
                },
            },
            **({"weight": weight} if weight else {}),
            **({"limits": limits} if limits else {}),
        },
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}]},
    }


def coming(known: Settings) -> list[tuple[str, str, str, bool]]:
    """(name, GPU product, GPUs, whether spot) of the nodes that may come."""
    found = with_coming_nodes([], known)
    return [(n.name, names.gpu_product(n.labels, ""), n.allocatable.get("nvidia.com/gpu", ""), n.spot) for n in found]


def test_a_job_is_planned_on_the_nodes_of_a_node_pool() -> None:
    pool = node_pool(limits={"nvidia.com/gpu": 16, "cpu": "1k"}, type=["p4de.24xlarge"], capacity=["on-demand"])
    known, told = with_live_groups(settings(), [pool], "")
    assert (coming(known), told) == ([(f"gpus/{n:05}", "a100-80gb", "8", False) for n in (1, 2)], ())
    sft = changed("helpful-sft", {"resources": {"device": "GPU", "nodes": 2, "slotsPerNode": 8}})
    there = with_coming_nodes([node("cpu")], known)
    assert map_job(sft, snapshot(sft, there), known).reason == "Mapped"
    (group,) = groups(made(sft, there, known)["RayJob"]).values()
    required = pod_of(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert {"key": "karpenter.sh/nodepool", "operator": "In", "values": ["gpus"]} in term["matchExpressions"]
    assert {"key": "team", "operator": "In", "values": ["research"]} in term["matchExpressions"]


def test_requirements_on_gpus_tell_what_the_nodes_have() -> None:
    pool = node_pool(gpu_name=["a100"], gpu_memory=["40960"], gpu_count=["8"], capacity=["spot", "on-demand"])
    known, _ = with_live_groups(settings(), [pool], "")
    assert set(coming(known)[0][1:]) == {"a100-40gb", "8", True}
    assert len(coming(known)) == UNLIMITED


def test_the_node_pool_of_the_highest_weight_comes_first() -> None:
    pools = [
        node_pool("b", 5, {"nodes": "1"}, type=["g6.xlarge"]),
        node_pool("c", 50, {"nodes": 1}, type=["g5.xlarge"]),
    ]
    known, _ = with_live_groups(settings(), [node_pool("a", None, {"nodes": 1}, type=["g6.xlarge"]), *pools], "")
    assert [each[0] for each in coming(known)] == ["c/00001", "b/00001", "a/00001"]


@each_case(
    ("pool", "why"),
    [
        (node_pool(), "it does not say what GPUs its nodes have; an entry of this name in cluster.nodeGroups can"),
        (node_pool(type=["g5.xlarge", "g5.48xlarge"]), "it does not say what GPUs its nodes have"),
        (node_pool(type=["m5.large"]), "it does not say what GPUs its nodes have"),
        (node_pool(gpu_name=["a100"], gpu_count=["0"]), "it does not say what GPUs its nodes have"),
        (
            {**node_pool(type=["g5.xlarge"]), "status": {"conditions": [{"type": "Ready", "status": "False"}]}},
            "it is not ready",
        ),
    ],
)
def test_a_group_on_which_no_job_is_planned_is_named(pool: dict[str, Any], why: str) -> None:
    known, told = with_live_groups(settings(), [pool], "")
    assert coming(known) == []
    assert told[0].startswith(f"no job is planned on node group gpus of the autoscaler: {why}")
    sft = changed("helpful-sft", {"resources": {"device": "GPU", "nodes": 1, "slotsPerNode": 8}})
    seen = replace(snapshot(sft, [node("cpu")]), unusable_groups=told)
    assert told[0] in map_job(sft, seen, known).message


def test_a_group_that_may_be_in_any_zone_is_named() -> None:
    level = {"topology": [{"label": "topology.kubernetes.io/zone", "gbps": 1}]}
    pools = [
        node_pool("any", type=["g5.xlarge"]),
        node_pool("one", limits={"nodes": 1}, type=["g5.xlarge"], zone=["z"]),
    ]
    known, told = with_live_groups(settings(**level), pools, "")
    assert [each[0] for each in coming(known)] == ["one/00001"]
    assert "any topology.kubernetes.io/zone, which cluster.topology names" in told[0]


def test_many_groups_are_told_in_one_sentence() -> None:
    _, told = with_live_groups(settings(), [node_pool(f"p{number}") for number in range(9)], "")
    assert len(told) == 1
    assert "node group p0, p1, p2, p3, p4 and 4 more of the autoscaler" in told[0]


def test_sizes_of_a_named_group_are_the_autoscalers() -> None:
    known, told = with_live_groups(settings({**NAMED, "max": 2}), [], STATUS)
    (group,) = known.node_groups
    assert (group.least, group.most, len(coming(known))) == (1, 6, 6)
    (sentence,) = told
    assert sentence.startswith("no job is planned on node group general of the autoscaler: it does not say what GPUs ")


def test_an_entry_needs_no_max_where_the_autoscaler_states_it() -> None:
    assert coming(settings(NAMED)) == []
    known, _ = with_live_groups(settings(NAMED), [node_pool("a100", limits={"nodes": 3}, capacity=["spot"])], "")
    assert [each[1:] for each in coming(known)] == [(A100, "8", True)] * 3
    known, _ = with_live_groups(settings(NAMED), [node_pool("a100", limits={"nvidia.com/gpu": 17})], "")
    assert len(coming(known)) == 2, "17 GPUs are two nodes with eight"


def test_an_entry_for_the_nodes_of_a_node_pool_is_that_group() -> None:
    entry = {**NAMED, "name": "large", "matchLabels": {"karpenter.sh/nodepool": "p4"}, "max": 3, "deadlineSeconds": 60}
    pool = node_pool("p4", type=["p4de.24xlarge"])
    known, told = with_live_groups(settings(entry), [pool], "")
    assert ([each[0] for each in coming(known)], told) == ([f"large/{n:05}" for n in (1, 2, 3)], ())
    away, _ = with_live_groups(
        settings(), [{**pool, "status": {"conditions": [{"type": "Ready", "status": "False"}]}}], ""
    )
    assert [known.seconds_to_add(["large"], 9), away.seconds_to_add(["p4"], 9), away.seconds_to_add([], 9)] == [
        60,
        1800,
        9,
    ]


def test_limits_of_cpus_count_where_the_size_of_a_node_is_known() -> None:
    pool = node_pool("a100", limits={"cpu": "1k", "memory": "8Ti"})
    known, _ = with_live_groups(settings({**NAMED, "cpu": 192, "memory": "1Ti", "max": 40}), [pool], "")
    assert len(coming(known)) == 5


def test_an_entry_whose_node_pool_is_not_ready_adds_no_node() -> None:
    pool = {
        **node_pool("a100"),
        "status": {"conditions": [{"type": "Ready", "status": "False", "message": "no class"}]},
    }
    known, told = with_live_groups(settings({**NAMED, "max": 2}), [pool], "")
    assert coming(known) == []
    assert told == ("no job is planned on node group a100 of the autoscaler: it is not ready: no class",)


@each_case("status", ["", "{", "a: [", "nodeGroups: 3", "nodeGroups: [{health: 1}]", "- 1", "Name: x"])
def test_no_status_makes_it_fail(status: str) -> None:
    wrong = [{"operator": "In", "key": 3, "values": 3}, {"operator": "In", "values": [None, {}]}]
    pools: list[Document] = [{}, {"spec": 1}, {"spec": {"template": {"spec": {"requirements": wrong, "taints": [{}]}}}}]
    assert coming(with_live_groups(settings(), pools, status)[0]) == []


def test_nodes_that_come_anyway_are_planned_on_first() -> None:
    other = {**NAMED, "name": "other", "matchLabels": {"pool": "o"}, "max": 2, "min": 1}
    found = with_coming_nodes([], settings({**NAMED, "max": 1}, other))
    assert [each.name for each in found] == ["other/00001", "a100/00001", "other/00002"]


@pytest.mark.parametrize(("status", "sentences"), [(403, 2), (200, 0)])
def test_a_missing_right_is_one_sentence(status: int, sentences: int, tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        versions = {"preferredVersion": {"version": "v1"}}
        parts.server.will("GET", "/apis/karpenter.sh", 200, versions)
        parts.server.will("GET", "/apis/karpenter.sh/v1", 200, {"resources": [{"name": "nodepools"}]})
        pool = node_pool(limits={"nodes": 1}, type=["p5.48xlarge"])
        parts.server.will("GET", "/apis/karpenter.sh/v1/nodepools", status, {"items": [pool], "metadata": {}})
        path = "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"
        parts.server.will("GET", path, status, {"data": {"status": ""}})
        known, told = await read_live_groups(parts.client, Settings())
        assert (len(told), len(coming(known))) == (sentences, status == 200)
        assert all(each.startswith("the operator may not read ") for each in told)

    run(tmp_path, test)


def test_without_the_right_to_nodes_nothing_is_asked(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        assert await read_live_groups(parts.client, Settings(read_nodes=False)) == (Settings(read_nodes=False), ())
        assert parts.server.most_at_once == 0

    run(tmp_path, test)


def growing(deadline: int = 1200) -> ElasticCluster:
    """A cluster without a free node, and two groups of one node each, of which one is spot."""
    entry = {"max": 1, "cpu": "4", "memory": "512Gi", "deadlineSeconds": deadline}
    owned = {**entry, "name": "owned", "matchLabels": {**WORKERS, "is": "owned"}}
    spot = {**entry, "name": "spot", "matchLabels": {**WORKERS, "is": "spot"}, "spot": True}
    cluster = ElasticCluster(2, settings=settings(owned, spot))
    cluster.submit("grows", elastic_job())
    cluster.settle()
    cluster.step("grows", 3)
    cluster.step("grows", trainer=0.31)
    return cluster


def extras(cluster: ElasticCluster) -> list[str]:
    return [each.node for each in cluster.status("grows").reserved if each.extra]


def test_an_elastic_pool_grows_onto_spot_nodes_that_come() -> None:
    cluster = growing()
    assert (size(cluster), extras(cluster)) == ((2, 1), ["spot/00001"])
    assert cluster.status("grows").phase == "Running"
    labels = {**WORKERS, "is": "spot"}
    cluster.put("nodes", node_document("new", 4, {}, **labels))
    cluster.settle()
    cluster.step("grows", 2)
    assert (size(cluster), extras(cluster)) == ((2, 2), ["new"])
    group = groups(cluster.objects["rayjobs"]["team", "grows-a1"])[POOL]
    (preferred,) = group["template"]["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert {"key": "is", "operator": "In", "values": ["spot"]} in preferred["preference"]["matchExpressions"]


def test_a_pool_whose_node_does_not_come_shrinks_again() -> None:
    cluster = growing()
    cluster.wait(1100)
    cluster.step("grows")
    assert size(cluster) == (2, 1), "the group may take longer"
    cluster.wait(200)
    cluster.step("grows", 2)
    assert (size(cluster), extras(cluster)) == ((1, 1), [])
    said = [each.message for each in cluster.events if each.reason == "RolloutPoolResized"]
    assert said[-1] == (
        "Pool writers: 2 -> 1 node, because after 1200 s node group spot has not added all nodes, and pods run on 1."
    )
    assert [each.outcome for each in cluster.status("grows").attempts] == ["Running"]


@pytest.mark.parametrize(("group", "limit"), [(None, 1800), (NAMED, 1800)])
def test_a_pod_without_a_node_ends_a_queued_attempt(group: dict[str, Any] | None, limit: int) -> None:
    world = starting()
    world.settings = settings(*([{**group, "max": 2}] if group else []))
    for pod in list(world.pods):
        world.change(pod, node="", unschedulable="0/3 nodes are available", scheduled=None)
    world.wait(limit - 10)
    world.settle()
    assert world.status.attempts[-1].outcome in ("Starting", "Running")
    world.wait(20)
    world.settle()
    assert (world.status.attempts[-1].outcome, reason(world, "QuotaReserved")) == ("Withdrawn", "Withdrawn")
