"""Level pods does what the tests of the operator build on."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.client import Cluster
from tests.patience import PATIENCE_SECONDS

IMAGE = "localhost/hostroot:test"
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
CLAIM = {
    "metadata": {"name": "data"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


def start_pod(server: Cluster, namespace: str, command: list[str], **extra: Any) -> None:
    """A pod `one` with a restricted container that writes to the claim `data`; `extra` is more of its spec."""
    container = {
        "name": "main",
        "image": IMAGE,
        "command": command,
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": volumes, **extra}
    server.expect("POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": {"name": "one"}, "spec": spec})


def phase(server: Cluster, namespace: str, seconds: float = PATIENCE_SECONDS) -> str:
    """How the pod `one` ended."""
    path = f"/api/v1/namespaces/{namespace}/pods/one"
    ended = ("Succeeded", "Failed")
    return server.until(
        lambda: found if (found := str(server.expect("GET", path)["status"].get("phase"))) in ended else "", seconds
    )


def test_a_restricted_pod_runs_the_trainer(pods_cluster: Cluster, pods_namespace: str) -> None:
    pods_cluster.offer_volumes()
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    script = "id -u; python -c 'import rlhf_trainer.run, torch' && rlhf --help | head -3 && echo written > /data/file"
    start_pod(pods_cluster, pods_namespace, ["sh", "-c", script])
    assert phase(pods_cluster, pods_namespace) == "Succeeded", pods_cluster.logs(pods_namespace, "one", "main")
    assert pods_cluster.logs(pods_namespace, "one", "main").splitlines()[0] == "1000"
    written = pods_cluster.folder_of_claim(pods_namespace, "data") / "file"
    assert written.read_text() == "written\n"
    assert written.stat().st_uid == 1000


def test_what_containers_see_of_the_machine_cannot_be_written(pods_cluster: Cluster, pods_namespace: str) -> None:
    pods_cluster.offer_volumes()
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    folders = " ".join(pods_cluster.settings.mounts)
    script = (
        f"for folder in {folders}; do test -r $folder || exit 3; touch $folder/x 2> /dev/null && exit 4; done; true"
    )
    root = {"runAsUser": 0, "runAsNonRoot": False}
    start_pod(pods_cluster, pods_namespace, ["sh", "-c", script], securityContext=root)
    assert phase(pods_cluster, pods_namespace) == "Succeeded"
    assert not (Path(pods_cluster.settings.programs) / "x").exists()


def test_the_control_plane_is_restarted_among_running_pods(pods_cluster: Cluster, pods_namespace: str) -> None:
    pods_cluster.restart()
    pods_cluster.offer_volumes()
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    start_pod(pods_cluster, pods_namespace, ["true"])
    assert phase(pods_cluster, pods_namespace) == "Succeeded"


def test_a_killed_node_is_lost_and_comes_back(pods_cluster: Cluster, pods_namespace: str) -> None:
    pods_cluster.kill_node(1)
    pods_cluster.until(lambda: not pods_cluster.node_is_ready("node1"), 60, "node1 is lost")
    pods_cluster.start_node(1)
    pods_cluster.offer_volumes()
    pods_cluster.expect("POST", f"/api/v1/namespaces/{pods_namespace}/persistentvolumeclaims", CLAIM)
    start_pod(pods_cluster, pods_namespace, ["true"], nodeSelector={"kubernetes.io/hostname": "node1"})
    assert phase(pods_cluster, pods_namespace) == "Succeeded"


@pytest.mark.slow  # the chart is installed by the golden path
def test_helm_installs_into_the_cluster(pods_cluster: Cluster, pods_namespace: str, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: tiny, version: 0.1.0}")
    made = "{apiVersion: v1, kind: ConfigMap, metadata: {name: tiny}, data: {release: '{{ .Release.Name }}'}}"
    (tmp_path / "templates" / "made.yaml").write_text(made)
    pods_cluster.helm("install", "first", tmp_path, "-n", pods_namespace, "--wait")
    config = pods_cluster.expect("GET", f"/api/v1/namespaces/{pods_namespace}/configmaps/tiny")
    assert config["data"] == {"release": "first"}
