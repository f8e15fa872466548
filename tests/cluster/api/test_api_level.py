"""Level api does what the tests of the operator build on."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.client import Cluster
from tests.cluster.launch import PREFIX, remove_leftovers
from tests.cluster.processes import FailedError
from tests.cluster.settings import ROOT

RAYJOB = ROOT / "tests" / "cluster" / "rayjob.yaml"
RAYJOBS = "/apis/ray.io/v1/namespaces/{}/rayjobs"
SHOWN_BY_THE_OPERATORS = pytest.mark.slow
"""Tests of the operator, which always run, need the same and would fail as well, only less plainly."""


def rayjob(name: str = "real") -> dict[str, Any]:
    """The RayJob of these tests."""
    document: dict[str, Any] = yaml.safe_load(RAYJOB.read_text())
    document["metadata"]["name"] = name
    return document


def pods(server: Cluster, namespace: str) -> list[dict[str, Any]]:
    """The pods of a namespace."""
    return server.items(f"/api/v1/namespaces/{namespace}/pods")


def three_pods(server: Cluster, namespace: str) -> list[dict[str, Any]]:
    """The head and both hosts, as soon as all are bound to a node."""
    return server.until(
        lambda: bound if len(bound := _bound(pods(server, namespace))) == 3 else [],
        60,
        "head and two workers are on a node",
    )


def _bound(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pod for pod in listed if pod["spec"].get("nodeName")]


def test_a_rayjob_becomes_pods_through_the_real_kuberay(api_server: Cluster, namespace: str) -> None:
    api_server.expect("POST", RAYJOBS.format(namespace) + "?fieldValidation=Strict", rayjob())
    made = three_pods(api_server, namespace)
    kinds = sorted(pod["metadata"]["labels"]["ray.io/node-type"] for pod in made)
    assert kinds == ["head", "worker", "worker"]
    assert {pod["status"]["phase"] for pod in made} == {"Pending"}


@SHOWN_BY_THE_OPERATORS
def test_the_statuses_a_test_writes_reach_kuberay(api_server: Cluster, namespace: str) -> None:
    api_server.expect("POST", RAYJOBS.format(namespace), rayjob())
    for pod in three_pods(api_server, namespace):
        api_server.run_pod(namespace, pod["metadata"]["name"])
    clusters = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
    api_server.until(
        lambda: api_server.items(clusters)[0].get("status", {}).get("readyWorkerReplicas") == 2,
        30,
        "KubeRay counts two ready workers",
    )
    (head,) = (pod for pod in pods(api_server, namespace) if pod["metadata"]["labels"]["ray.io/node-type"] == "head")
    ended = api_server.end_pod(namespace, head["metadata"]["name"], 137, "OOMKilled")
    assert ended["status"]["phase"] == "Failed"
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_deleted_pods_go_when_they_are_buried(api_server: Cluster, namespace: str) -> None:
    api_server.expect("POST", RAYJOBS.format(namespace), rayjob())
    names = {pod["metadata"]["name"] for pod in three_pods(api_server, namespace)}
    api_server.expect("DELETE", RAYJOBS.format(namespace) + "/real")
    dying = api_server.until(
        lambda: (listed := pods(api_server, namespace)) and all("deletionTimestamp" in p["metadata"] for p in listed)
    )
    assert dying
    buried = api_server.bury_pods(namespace)
    assert set(buried) == names
    assert not pods(api_server, namespace)


@SHOWN_BY_THE_OPERATORS
def test_everything_goes_on_after_a_restart_of_the_api_server(api_server: Cluster, namespace: str) -> None:
    api_server.restart()
    api_server.expect("POST", RAYJOBS.format(namespace), rayjob())
    assert len(three_pods(api_server, namespace)) == 3


@SHOWN_BY_THE_OPERATORS
def test_nothing_becomes_of_a_rayjob_while_kuberay_is_down(api_server: Cluster, namespace: str) -> None:
    with api_server.without_kuberay():
        api_server.expect("POST", RAYJOBS.format(namespace), rayjob())
        log = api_server.folder / "log" / "kuberay-operator.log"
        assert namespace not in log.read_text()
        assert not pods(api_server, namespace)
    assert three_pods(api_server, namespace)


def test_a_user_without_rights_is_refused(api_server: Cluster, namespace: str) -> None:
    api_server.kubectl("get", "pods", "-n", namespace)
    with pytest.raises(FailedError, match="cannot list resource"):
        api_server.kubectl("get", "pods", "-n", namespace, f"--kubeconfig={api_server.kubeconfig('dev')}")
    token = api_server.token(namespace, "default")
    status, _ = api_server.request("GET", f"/api/v1/namespaces/{namespace}/pods", token=token)
    assert status == 403


def test_a_made_up_node_takes_pods_that_want_it(api_server: Cluster, namespace: str) -> None:
    api_server.add_node("big", {"nvidia.com/gpu": "16"}, {"size": "big"})
    try:
        gpus = {"resources": {"limits": {"nvidia.com/gpu": "16"}}}
        pod = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "one", "image": "none", **gpus}]}}
        api_server.expect("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
        (one,) = api_server.until(lambda: _bound(pods(api_server, namespace)))
        assert one["spec"]["nodeName"] == "big"
    finally:
        api_server.remove_node("big")


def test_a_killed_session_leaves_nothing_running() -> None:
    script = (
        "import os, signal\nfrom tests.cluster.launch import cluster\n"
        "with cluster('api') as running:\n"
        "    print(running.folder, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    folder = Path(killed.stdout.strip())
    assert folder.parent.name.startswith(PREFIX), killed.stderr
    while running := commands_naming(str(folder)):
        time.sleep(0.1)
    assert not running
    remove_leftovers()
    assert not folder.exists()


def commands_naming(text: str) -> list[str]:
    """The command lines of this machine that mention a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except OSError:  # it has ended meanwhile
            continue
    return [command for command in found if text in command]
