"""Kueue's ProvisioningRequests on a cluster whose autoscaler is played: their kind, an admission check, an answer."""

from tests.cluster.client import Cluster
from tests.cluster.kueue import QUEUES
from tests.cluster.lifecycle import SECONDS, Document

GROUP = "autoscaling.x-k8s.io"
REQUESTS = f"/apis/{GROUP}/v1/namespaces/{{}}/provisioningrequests"
CHECK = "nodes-first"


def learn_requests(server: Cluster) -> None:
    """Teach a cluster the kind; Kueue looks for it when it starts. The schema is open, other than the real one."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
    words = {"plural": "provisioningrequests", "singular": "provisioningrequest", "kind": "ProvisioningRequest"}
    spec: Document = {
        "group": GROUP,
        "scope": "Namespaced",
        "names": words,
        "versions": [{"name": name, **version, "storage": name == "v1"} for name in ("v1", "v1beta1")],
    }
    annotations = {"api-approved.kubernetes.io": "unapproved, of a test"}
    metadata = {"name": f"provisioningrequests.{GROUP}", "annotations": annotations}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    server.expect("POST", path, {"metadata": metadata, "spec": spec})
    server.until(lambda: server.request("GET", REQUESTS.format("default"))[0] == 200, SECONDS, "its kind is served")


def make_check(server: Cluster) -> str:
    """Make an admission check that asks for nodes: its name."""
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": CHECK}
    made: tuple[tuple[str, str, Document], ...] = (
        ("provisioningrequestconfigs", parameters["kind"], {"provisioningClassName": f"played.{GROUP}"}),
        (
            "admissionchecks",
            "AdmissionCheck",
            {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": parameters},
        ),
    )
    for plural, kind, spec in made:
        document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": CHECK}, "spec": spec}
        server.expect("POST", f"{QUEUES}/{plural}", document)
    return CHECK


def request_of(server: Cluster, namespace: str) -> Document:
    """The first request that is not answered, as soon as it is there."""

    def unanswered() -> Document:
        listed = server.items(REQUESTS.format(namespace))
        return next((each for each in listed if not each.get("status", {}).get("conditions")), {})

    return server.until(unanswered, SECONDS, "nodes are asked for")


def answer(server: Cluster, request: Document) -> None:
    """The nodes of a request are there."""
    when = request["metadata"]["creationTimestamp"]
    conditions = [
        {"type": kind, "status": "True", "reason": "Played", "message": "played", "lastTransitionTime": when}
        for kind in ("Accepted", "Provisioned")
    ]
    path = f"{REQUESTS.format(request['metadata']['namespace'])}/{request['metadata']['name']}/status"
    server.expect("PATCH", path, {"status": {"conditions": conditions}})
