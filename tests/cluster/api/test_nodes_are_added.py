"""Jobs begin on nodes that do not exist yet: scheduler and API server are real, the autoscaler is played."""

from collections.abc import Iterator

import pytest

from tests.cluster.autoscaler import Autoscaler
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import PODS, SECONDS
from tests.cluster.stage import Lives, small_job, stage

A100 = "NVIDIA-A100-SXM4-80GB"
ON = {"pool": "a100"}
GROWS = {"name": "a100", "matchLabels": ON, "max": 2, "gpu": A100, "gpusPerNode": 8}
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


def test_a_gpu_job_begins_on_nodes_that_its_pods_call_for(lives: Lives) -> None:
    job, server, namespace = small_job("grows", lives.jobs.namespace), lives.jobs.server, lives.jobs.namespace
    job["spec"]["resources"] = {"device": "GPU", "nodes": 1, "slotsPerNode": 8}
    lives.apply(job)
    waiting = lives.jobs.wait_for("grows", "WaitingForNodes")
    assert {each["node"] for each in waiting["reserved"]} >= {"a100/00001"}
    with Autoscaler(server, namespace, {"a100": (ON, {"nvidia.com/gpu": "8"}, 2)}) as autoscaler:
        pods = lives.jobs.wait_for_pods("grows", 1)
        assert autoscaler.added["a100"] == ["a100-0"], "one node is enough"
        assert "a100-0" in {pod["spec"]["nodeName"] for pod in pods}
        lives.train("grows")
        name = pods[0]["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        code, answer = server.request("POST", f"{PODS.format(namespace)}/{name}/eviction", eviction)
        assert (code, answer["reason"]) == (429, "TooManyRequests"), "a drain waits"
        final = lives.succeed("grows")
    assert [each["outcome"] for each in final["attempts"]] == ["Succeeded"]


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
