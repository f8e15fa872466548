"""A real Kueue beside a cluster of level api: its own manifests and certificates, and its controller as a process."""

import base64
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.build import built
from tests.cluster.client import Cluster
from tests.cluster.lifecycle import SECONDS, Document
from tests.cluster.processes import Processes
from tests.cluster.settings import free_ports

NAMESPACE = "kueue-system"
SERVICE = {"name": "kueue-webhook-service", "namespace": NAMESPACE}
CERTIFICATE = f"/api/v1/namespaces/{NAMESPACE}/secrets/kueue-webhook-server-cert"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Secret": f"/api/v1/namespaces/{NAMESPACE}/secrets",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}
"""What is used of Kueue's manifests; the rest is for a Kueue in a pod."""
WEBHOOKS_OF = {"kueue.x-k8s.io", "ray.io"}
QUEUES = "/apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = QUEUES + "/namespaces/{}/workloads"
PODS_OF_A_JOB = 2
PRIORITIES = {"low": 1, "high": 100}


@contextmanager
def kueue(server: Cluster) -> Iterator[None]:
    """Kueue runs meanwhile, for RayJobs only; there are the flavor `any` and the priority classes of PRIORITIES."""
    folder = server.folder / "kueue"
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    processes = Processes(folder, built(("kueue",)))
    webhooks, health = free_ports(2)
    _install(server, processes.programs / "kueue-config", webhooks)
    config = folder / "config.yaml"
    config.write_text(json.dumps(_configuration(certificates, webhooks, health)))
    processes.start("kueue", f"--config={config}", f"--kubeconfig={server.kubeconfig('admin')}")
    try:
        processes.until("Kueue's certificate", lambda: _mount(server, certificates))
        processes.until("Kueue", lambda: _is_ready(health))
        _offer(server)
        yield
        processes.check()
    finally:
        processes.stop()


def make_queue(server: Cluster, namespace: str, name: str, *checks: str, cohort: str = "") -> str:
    """A LocalQueue with room for the pods of one job at a time; higher priority goes first.

    checks: names of admission checks; cohort: queues that lend each other what they do not use.
    """
    group = f"{namespace}-{name}"
    amounts = {"cpu": "10k", "memory": "1Pi", "pods": str(PODS_OF_A_JOB)}
    resources = [{"name": each, "nominalQuota": amount} for each, amount in amounts.items()]
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any" if cohort else "Never"},
        **({"cohortName": cohort} if cohort else {}),
        "resourceGroups": [{"coveredResources": list(amounts), "flavors": [{"name": "any", "resources": resources}]}],
        **({"admissionChecksStrategy": {"admissionChecks": [{"name": each} for each in checks]}} if checks else {}),
    }
    _make(server, "clusterqueues", "ClusterQueue", group, spec=spec)
    _make(server, f"namespaces/{namespace}/localqueues", "LocalQueue", name, spec={"clusterQueue": group})
    return name


def workload_of(server: Cluster, namespace: str, rayjob: str) -> Document:
    """Kueue's Workload of a RayJob; empty where there is none."""
    listed = server.items(WORKLOADS.format(namespace))
    return next((each for each in listed if each["metadata"]["ownerReferences"][0]["name"] == rayjob), {})


def _install(server: Cluster, config: Path, port: int) -> None:
    text = server.kubectl("kustomize", config / "default")
    documents = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each["kind"] in PATHS]
    for each in sorted(documents, key=lambda document: list(PATHS).index(document["kind"])):
        if "webhooks" in each:
            each["webhooks"] = [one for one in each["webhooks"] if _groups(one) <= WEBHOOKS_OF]
        for client in _clients(each):
            client["service"]["port"] = port
        server.expect("POST", PATHS[each["kind"]], each)
    # No Service has an endpoint here. The API server takes this one for another name of the loopback, and checks that
    # the certificate is for the Service.
    outside = {"metadata": SERVICE, "spec": {"type": "ExternalName", "externalName": "127.0.0.1"}}
    server.expect("POST", f"/api/v1/namespaces/{NAMESPACE}/services", outside)


def _groups(webhook: Document) -> set[str]:
    return {group for rule in webhook["rules"] for group in rule["apiGroups"]}


def _clients(document: Document) -> list[Document]:
    """How the API server is to reach Kueue for a definition or a webhook configuration."""
    conversion = document.get("spec", {}).get("conversion", {}).get("webhook")
    return [each["clientConfig"] for each in [*document.get("webhooks", []), *([conversion] if conversion else [])]]


def _configuration(certificates: Path, webhooks: int, health: int) -> Document:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["ray.io/rayjob"]},
        "featureGates": {"VisibilityOnDemand": False},  # its server writes to the root of the machine
    }


def _mount(server: Cluster, folder: Path) -> bool:
    """What a kubelet does with the Secret in which Kueue writes its certificate; False as long as that is empty."""
    data: dict[str, Any] = server.expect("GET", CERTIFICATE).get("data") or {}
    for name in ("tls.key", "tls.crt") if "tls.crt" in data else ():
        (folder / name).write_bytes(base64.b64decode(data[name]))
    return "tls.crt" in data


def _is_ready(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)


def _offer(server: Cluster) -> None:
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "any"}}
    # The API server may learn of a webhook's certificate a little later than Kueue.
    server.until(lambda: server.request("POST", f"{QUEUES}/resourceflavors", flavor)[0] in (201, 409), SECONDS, "Kueue")
    for name, value in PRIORITIES.items():
        _make(server, "workloadpriorityclasses", "WorkloadPriorityClass", name, value=value, description="of a test")


def _make(server: Cluster, path: str, kind: str, name: str, **content: Any) -> None:
    document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, **content}
    server.expect("POST", f"{QUEUES}/{path}", document)
