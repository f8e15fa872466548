"""The chart in a test cluster with pods; images are this machine's own environment, or built (`install_built`)."""

import json
from collections.abc import Mapping
from typing import Any

from images import build as images
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
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
"""Of a namespace: the API server refuses pods that ask for more than this profile allows."""

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


def install_built(cluster: Cluster, values: Mapping[str, Any] | None = None) -> str:
    """Install the chart under the restricted profile with the image of the operator, and return its reference.

    The image is built if it is not there; is on node 0, and so is the operator. CannotBuildError if that fails.
    """
    archive = images.archive(images.IMAGES["operator"])
    reference = images.IMAGES["operator"].reference
    cluster.import_image(archive, 0)
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})  # again is no harm
    cluster.expect("PATCH", f"/api/v1/namespaces/{NAMESPACE}", RESTRICTED)
    repository, _, tag = reference.rpartition(":")
    own = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "nodeSelector": {"kubernetes.io/hostname": "node0"},
    }
    install(cluster, {**own, **(values or {})})
    return reference


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
