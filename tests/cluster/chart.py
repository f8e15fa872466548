"""The chart in a test cluster with pods: every image is this machine's own environment."""

import json
from collections.abc import Mapping
from typing import Any

from tests.cluster.client import Cluster
from tests.cluster.processes import FailedError
from tests.cluster.settings import NODE_NET, ROOT

CHART = ROOT / "helm" / "rlhf-operator"
SMALL = CHART / "examples" / "small.yaml"
"""A head and a worker with two slots fit a node of two CPUs, beside the operator."""
RELEASE, NAMESPACE = "rlhf-operator", "rlhf-system"
IMAGE = "localhost/hostroot"
TAG = "test"
SECONDS_TO_INSTALL = 120

VALUES: Mapping[str, Any] = {
    "image": {"repository": IMAGE, "tag": TAG, "pullPolicy": "Never"},
    "trainer": {
        "image": f"{IMAGE}:{TAG}",
        "pullPolicy": "Never",
        "gracePeriodSeconds": 60,
        "statusIntervalSeconds": 1,
    },
    "jobNetworkPolicy": {"kubeRay": [{"ipBlock": {"cidr": NODE_NET}}]},  # it is no pod here
}
"""Over SMALL, on this machine; what is run is in the folders that the cluster mounts into every container."""


def install(cluster: Cluster, values: Mapping[str, Any] | None = None, *, namespace: str = NAMESPACE) -> str:
    """Install the chart, or upgrade it, and wait until the operator is ready: helm's notes.

    The values come over those of SMALL and VALUES.
    FailedError with the operator's last words if it does not get ready.
    """
    files = [SMALL]
    for number, each in enumerate((VALUES, values or {})):
        files.append(cluster.folder / f"values-{number}.json")
        files[-1].write_text(json.dumps(each))
    given = [word for file in files for word in ("--values", file)]
    wait = ["--wait", "--timeout", f"{SECONDS_TO_INSTALL}s"]
    try:
        return helm_upgrade(cluster, namespace, *given, *wait)
    except FailedError as error:
        raise FailedError(f"{error}\n{last_words(cluster, namespace)}") from None


def helm_upgrade(cluster: Cluster, namespace: str, *options: object) -> str:
    """`helm upgrade --install` of the chart; a CRD that a test has applied before becomes the release's own."""
    own = ["--namespace", namespace, "--create-namespace", "--take-ownership"]
    return cluster.helm("upgrade", "--install", RELEASE, CHART, *own, *options)


def uninstall(cluster: Cluster, *, namespace: str = NAMESPACE) -> None:
    """Take the release away, if it is there; CRD and jobs stay."""
    cluster.helm("uninstall", RELEASE, "--namespace", namespace, "--wait", "--ignore-not-found")


def last_words(cluster: Cluster, namespace: str) -> str:
    """State and log of the operator's pods."""
    selector = ("--namespace", namespace, "--selector", f"app.kubernetes.io/instance={RELEASE}")
    said = []
    for command in (("describe", "pods"), ("logs", "--tail=50", "--prefix")):
        try:
            said.append(cluster.kubectl(*command, *selector))
        except FailedError as error:
            said.append(str(error))
    return "\n".join(said)
