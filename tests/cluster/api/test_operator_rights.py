"""The operator as the chart's service account lives whole lives of jobs with just the rights that the chart gives."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_operator import names
from tests.cluster import chart
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import PODS, SECONDS
from tests.cluster.stage import Lives, has_failed_once, small_job, stage
from tests.operator.rendered import changed

ALL_JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/rlhfjobs"
NO_PODS = ("--set", "replicaCount=0", "--set", "rbac.aggregate=false")


@pytest.fixture(params=["all namespaces", "one namespace"])
def release(rlhf_server: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[str, bool]]:
    """Namespace of the chart's release, and whether it is for that one only."""
    for namespace in fresh_namespace(rlhf_server):
        is_narrow = request.param == "one namespace"
        only = ("--set", f"watchNamespaces={{{namespace}}}") if is_narrow else ()
        chart.helm_upgrade(rlhf_server, namespace, "--skip-crds", "--set", "crds.enabled=false", *NO_PODS, *only)
        yield namespace, is_narrow
        chart.uninstall(rlhf_server, namespace=namespace)


def no_jobs_are_left(server: Cluster) -> bool:
    """Delete the jobs of earlier tests, whose namespaces may still be going: nothing can be made in those."""
    left = server.items(ALL_JOBS)
    for job in (each["metadata"] for each in left):
        path = f"{ALL_JOBS.removesuffix('/rlhfjobs')}/namespaces/{job['namespace']}/rlhfjobs/{job['name']}"
        server.request("DELETE", path)
    return not left


def test_a_whole_life_needs_only_the_charts_rights(
    rlhf_server: Cluster, release: tuple[str, bool], tmp_path: Path
) -> None:
    namespace, is_narrow = release
    rlhf_server.until(lambda: no_jobs_are_left(rlhf_server), SECONDS, "jobs of earlier tests are gone")
    own = {"namespaces": [namespace] if is_narrow else [], "readNodes": not is_narrow, "leaseNamespace": namespace}
    own["jobNetworkPolicy"] = {"operator": [{"podSelector": {}}]}
    token = rlhf_server.token(namespace, chart.RELEASE)
    with stage(rlhf_server, namespace, tmp_path, token, **own) as (lives, process):
        lives.apply(small_job("whole", namespace, ttlSecondsAfterFinished=600), small_job("suspended", namespace))
        assert has_failed_once(lives.through_a_failure("whole"))
        suspend_and_resume(lives, "suspended")
        sandboxes_are_replaced(lives)
        lives.apply(small_job("short", namespace, ttlSecondsAfterFinished=0))
        lives.train("short")
        lives.kubelets.trainer("short").succeeds(1)
        lives.jobs.set_rayjob("short", 1, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        path = f"{ALL_JOBS.removesuffix('/rlhfjobs')}/namespaces/{namespace}/rlhfjobs/short"
        rlhf_server.until(lambda: rlhf_server.request("GET", path)[0] == 404, SECONDS, "its time to live is over")
        assert {"Mapped", "Running", "Succeeded"} <= {each["reason"] for each in lives.jobs.events("whole")}
        refused = [line for line in (process.get("/metrics") or "").splitlines() if 'code="403"' in line]
        assert refused == []
        assert "forbidden" not in process.log().lower()


def sandboxes_are_replaced(lives: Lives) -> None:
    """Two sandboxes run; one serves, and another one follows; all go with the attempt."""
    server, namespace = lives.jobs.server, lives.jobs.namespace
    job = small_job("sandboxed", namespace)
    spec = changed("calculator-grpo", {}).model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    actor = {**spec["models"]["actor"], "uri": job["spec"]["models"]["actor"]["uri"]}
    sandbox = {"warm": 2, "cpu": "10m", "memory": "64Mi"}
    job["spec"] = {**job["spec"], **spec, "models": {**spec["models"], "actor": actor}, "sandbox": sandbox}
    job["spec"]["resources"] = {"device": "CPU", "nodes": 1, "slotsPerNode": 2}
    lives.apply(job)

    def running() -> set[str]:
        selector = f"?labelSelector={names.ROLE}={names.SANDBOX}"
        pods = server.items(PODS.format(namespace) + selector)
        return {each["metadata"]["name"] for each in pods if each["status"]["phase"] == "Running"}

    def run(*numbers: int) -> None:
        expected = {f"sandboxed-a1-sandbox-{number}" for number in numbers}
        server.until(lambda: running() == expected, SECONDS, f"sandboxes {numbers} run")

    run(1, 2)
    server.end_pod(namespace, "sandboxed-a1-sandbox-1", 0)
    run(2, 3)
    lives.jobs.patch("sandboxed", {"spec": {"suspend": True}})
    lives.wait_until_clear("sandboxed")


def test_gpus_that_another_pod_holds_are_seen(rlhf_server: Cluster, namespace: str, tmp_path: Path) -> None:
    job = small_job("large", namespace)
    job["spec"]["resources"] = {"device": "GPU", "slotsPerNode": 4}
    with (
        gpus_held(rlhf_server, namespace, 6),  # of the node's 8, before the operator lists the pods
        stage(rlhf_server, namespace, tmp_path) as (lives, _),
    ):
        lives.apply(job)
        told = rlhf_server.until(lambda: lives.jobs.condition("large", "Mapped"), SECONDS, "the mapper is asked")
    assert (told["status"], told["reason"]) == ("False", "NoFeasiblePlacement")
    assert "pods of others hold 6 GPUs" in told["message"]


@contextmanager
def gpus_held(server: Cluster, namespace: str, number: int) -> Iterator[None]:
    """A pod of somebody else on the node meanwhile, with so many of its GPUs."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    holds = {"name": "one", "image": "none", "resources": {"limits": {"nvidia.com/gpu": str(number)}}}
    server.expect("POST", pods, {"metadata": {"name": "holder"}, "spec": {"containers": [holds]}})
    server.until(lambda: server.expect("GET", f"{pods}/holder")["spec"].get("nodeName"), SECONDS, "it is on the node")
    yield
    server.expect("DELETE", f"{pods}/holder", {"gracePeriodSeconds": 0})


def suspend_and_resume(lives: Lives, job: str) -> None:
    """A job that is suspended and ends well later."""
    lives.train(job)
    lives.jobs.patch(job, {"spec": {"suspend": True}})
    lives.jobs.wait_for(job, "Suspended")
    lives.jobs.patch(job, {"spec": {"suspend": False}})
    lives.train(job, 2)
    lives.succeed(job, 2)
