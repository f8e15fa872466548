"""Taints, nodes that come and jobs that pass others: scheduler, API server and KubeRay are real."""

from collections.abc import Iterator

import pytest

from tests.cluster import clusters
from tests.cluster.client import Cluster
from tests.cluster.clusters import GROWS
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import SECONDS
from tests.cluster.stage import Lives, small_job, stage
from tests.operator.test_groups_that_autoscalers_state import STATUS, node_pool

BROKEN = {"name": "broken", "matchLabels": {"pool": "broken"}, "max": 2, "cpu": "1", "deadlineSeconds": 3}


@pytest.fixture(scope="module")
def lives(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    for namespace in fresh_namespace(rlhf_server):
        with stage(rlhf_server, namespace, tmp_path_factory.mktemp("operator"), nodeGroups=[GROWS, BROKEN]) as (
            lives,
            process,
        ):
            yield lives
            assert "Traceback" not in process.log()


def test_gpus_behind_a_taint_are_told(lives: Lives) -> None:
    found = clusters.tainted(lives)
    assert found["reason"] == "GPUNodesUnusable"
    assert "1 node tainted dedicated=gpu:NoSchedule, which spec.runtime.worker.template" in found["told"]


def test_a_gpu_job_begins_on_nodes_that_its_pods_call_for(lives: Lives) -> None:
    found = clusters.autoscaled(lives)
    assert "a100/00001" in found["reserved"]
    assert found["added"] == ["a100-0"], "one node is enough"
    assert "a100-0" in found["nodes"]
    assert found["eviction"] == 429, "a drain waits"
    assert found["outcomes"] == ["Succeeded"]


def test_a_group_that_adds_no_node_is_told(lives: Lives) -> None:
    job = small_job("in-vain", lives.jobs.namespace)
    template = {"spec": {"nodeSelector": BROKEN["matchLabels"]}}
    job["spec"]["runtime"] = {"worker": {"cpu": "1", "template": template}}
    lives.apply(job)
    lives.jobs.wait_for("in-vain", "WaitingForNodes")

    def withdrawn() -> str:
        first = (lives.jobs.status("in-vain").get("attempts") or [{}])[0]
        return str(first.get("message", "")) if first.get("outcome") == "Withdrawn" else ""

    message = lives.jobs.server.until(withdrawn, SECONDS, "the attempt is withdrawn")
    assert "node group broken has not added all nodes, and no node took pod in-vain-a1-" in message
    lives.jobs.delete("in-vain")


def test_a_job_passes_another_and_gives_its_node_back(lives: Lives) -> None:
    found = clusters.backfilled(lives)
    assert found == {
        "wide_meanwhile": "Queued",
        "backfilled": True,
        "wide": ["Succeeded"],
        "short": ["Yielded", "Succeeded"],
    }


def test_a_job_gives_a_node_to_a_higher_priority_for_a_while(lives: Lives) -> None:
    found = clusters.shrunk(lives)
    assert (
        f"{lives.jobs.namespace}/gives-a-node makes room at its next checkpoint and goes on with 1 of its 2 nodes"
        in found["told"]
    )
    assert found["before"] == ["Running"], "it waits for the checkpoint"
    assert found["meanwhile"] == {"gives-a-node": "Running", "urgent": "Running"}
    assert found["attempts"] == [["Resized", 2, 0], ["Resized", 1, 11], ["Succeeded", 2, 13]], "no step is lost"


def test_a_pool_takes_idle_nodes_and_gives_one_to_a_job(lives: Lives) -> None:
    found = clusters.elastic(lives)
    assert found["pods"] == 5, "head, trainer and three that generate"
    assert [each.split(", because")[0] for each in found["told"]] == [
        "Pool writers: 1 -> 2 nodes",
        "Pool writers: 2 -> 3 nodes",
        "Pool writers: 3 -> 2 nodes",
    ]
    assert found["evictions"] == [429, 201], "a drain waits for the trainer alone"
    assert found["outcomes"] == ["Succeeded", "Succeeded"]


def test_groups_of_karpenter_and_cluster_autoscaler_are_read(lives: Lives) -> None:
    server = lives.jobs.server
    with clusters.autoscalers(server, [node_pool(limits={"nodes": "2"}, type=["p5.48xlarge"])], STATUS):
        for user, groups, refused in (("admin", ["gpus"], 0), ("dev", [], 2)):
            known, told = clusters.groups_read_by(server, user)
            assert [each.name for each in known.node_groups] == groups
            assert sum(each.startswith("the operator may not read ") for each in told) == refused
