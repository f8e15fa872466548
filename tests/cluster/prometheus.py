"""A real Prometheus beside the test cluster, configured from the monitors and rules that the chart renders.

Debian's Prometheus is built without the discovery of Kubernetes: `Discovery` writes what that would find into files.
"""

import http.client
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.client import Cluster
from tests.cluster.processes import TAIL, FailedError, die_with_parent
from tests.cluster.settings import free_ports
from tests.patience import PATIENCE_SECONDS

Document = dict[str, Any]
SECONDS_TO_START = PATIENCE_SECONDS
SECONDS_BETWEEN_LOOKS = 1.0
RULES = "rules.yml"
SERVICE = "kubernetes.io/service-name"


def no_prometheus() -> str:
    """Why it cannot run here, as one sentence; empty if it can."""
    return "" if shutil.which("prometheus") and shutil.which("promtool") else "install the package prometheus"


def configuration(manifests: Sequence[Mapping[str, Any]], folder: Path) -> Document:
    """As the Prometheus operator would make it of PodMonitors and ServiceMonitors, without TLS and credentials."""
    jobs = []
    for monitor in manifests:
        if monitor["kind"] in ("PodMonitor", "ServiceMonitor"):
            endpoints = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
            jobs += [scrape_job(monitor, endpoint, folder) for endpoint in endpoints]
    return {"global": {"evaluation_interval": "5s"}, "rule_files": [RULES], "scrape_configs": jobs}


def scrape_job(monitor: Mapping[str, Any], endpoint: Mapping[str, Any], folder: Path) -> Document:
    """One endpoint of a monitor: which targets are found and kept, and their labels."""
    metadata, spec = monitor["metadata"], monitor["spec"]
    of_pods = monitor["kind"] == "PodMonitor"
    role, kind = ("pod", "pod") if of_pods else ("endpointslice", "service")
    port = "__meta_kubernetes_pod_container_port_name" if of_pods else "__meta_kubernetes_endpointslice_port_name"
    name = f"{metadata['namespace']}/{metadata['name']}"
    relabelings: list[Document] = [
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Succeeded|Failed", "action": "drop"},
        *(
            {"source_labels": [meta(f"{kind}_label", key)], "regex": re.escape(value), "action": "keep"}
            for key, value in spec["selector"]["matchLabels"].items()
        ),
        {"source_labels": [port], "regex": endpoint["port"], "action": "keep"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        {"target_label": "job", "replacement": name if of_pods else metadata["name"]},
        *(
            {"source_labels": [meta("pod_label", label)], "target_label": sanitized(label)}
            for label in spec.get("podTargetLabels", [])
        ),
    ]
    namespaces = spec.get("namespaceSelector", {}).get("matchNames", [metadata["namespace"]])
    if not spec.get("namespaceSelector", {}).get("any"):
        regex = "|".join(namespaces)
        relabelings.append({"source_labels": ["__meta_kubernetes_namespace"], "regex": regex, "action": "keep"})
    return {
        "job_name": f"{monitor['kind']}/{name}",
        "honor_labels": endpoint.get("honorLabels", False),
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["interval"],
        "file_sd_configs": [{"files": [str(folder / f"{role}.json")], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
    }


def meta(kind: str, label: str) -> str:
    """What Prometheus calls a label of an object that it has found."""
    return f"__meta_kubernetes_{kind}_{sanitized(label)}"


def sanitized(label: str) -> str:
    """As a label of Prometheus may be called."""
    return re.sub(r"\W", "_", label)


class Discovery:
    """Keeps files of the pods and endpoints of a cluster, with the labels that Prometheus' own discovery gives them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)

    def __enter__(self) -> None:
        self._look()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _keep_looking(self) -> None:
        while not self._end.wait(SECONDS_BETWEEN_LOOKS):
            with suppress(OSError, http.client.HTTPException, AssertionError):  # the server is busy
                self._look()

    def _look(self) -> None:
        pods = self._cluster.items("/api/v1/pods")
        services = self._cluster.items("/api/v1/services")
        slices = self._cluster.items("/apis/discovery.k8s.io/v1/endpointslices")
        by_name = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in services}
        found = {
            "pod": [target for pod in pods for target in targets_of_pod(pod)],
            "endpointslice": [target for each in slices for target in targets_of_slice(each, by_name)],
        }
        for role, targets in found.items():
            file = self._folder / f"{role}.json"
            file.with_suffix(".new").write_text(json.dumps(targets))
            file.with_suffix(".new").rename(file)


def targets_of_pod(pod: Mapping[str, Any]) -> Iterator[Document]:
    """One for each port of its containers."""
    metadata, status = pod["metadata"], pod["status"]
    labels = {
        "__meta_kubernetes_namespace": metadata["namespace"],
        "__meta_kubernetes_pod_name": metadata["name"],
        "__meta_kubernetes_pod_phase": status["phase"],
        **{meta("pod_label", name): value for name, value in metadata.get("labels", {}).items()},
    }
    containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    for port in (port for each in containers for port in each.get("ports", ()) if "podIP" in status):
        name = {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
        yield {"targets": [f"{status['podIP']}:{port['containerPort']}"], "labels": {**labels, **name}}


def targets_of_slice(
    found: Mapping[str, Any], services: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[Document]:
    """One for each port of its endpoints."""
    namespace, name = found["metadata"]["namespace"], found["metadata"].get("labels", {}).get(SERVICE, "")
    service = services.get((namespace, name), {"metadata": {}})
    labels = {
        "__meta_kubernetes_namespace": namespace,
        **{meta("service_label", key): value for key, value in service["metadata"].get("labels", {}).items()},
    }
    for endpoint in found.get("endpoints") or ():
        pod = {"__meta_kubernetes_pod_name": endpoint.get("targetRef", {}).get("name", "")}
        for port in found.get("ports") or ():
            own = {"__meta_kubernetes_endpointslice_port_name": port.get("name", "")}
            yield {"targets": [f"{endpoint['addresses'][0]}:{port['port']}"], "labels": {**labels, **pod, **own}}


class Prometheus:
    """The HTTP API of one that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer; FailedError with what it complains about."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise FailedError(f"{path} {parameters}: {error.read().decode()}") from None

    def ready(self) -> bool:
        """Whether it answers queries."""
        with suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
            return True
        return False

    def course(self, query: str, start: float, end: float, step: float) -> list[Document]:
        """The series of a query from start to end, at every step, in seconds."""
        found: list[Document] = self.get("query_range", query=query, start=start, end=end, step=step)["result"]
        return found

    def value(self, query: str) -> float | None:
        """The only value of a query now; None where there is none."""
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def targets(self) -> list[tuple[str, str, str]]:
        """(job, pod, health) of what is scraped now."""
        active = self.get("targets", state="active")["activeTargets"]
        return sorted((each["labels"]["job"], each["labels"].get("pod", ""), each["health"]) for each in active)


@contextmanager
def prometheus(manifests: Sequence[Mapping[str, Any]], cluster: Cluster, folder: Path) -> Iterator[Prometheus]:
    """One that runs meanwhile and sees a cluster, on a free port of this machine, with its data in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    (rule,) = (each for each in manifests if each["kind"] == "PrometheusRule")
    (folder / RULES).write_text(yaml.safe_dump(rule["spec"]))
    config.write_text(yaml.safe_dump(configuration(manifests, folder)))
    (port,) = free_ports(1)
    options = (
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["prometheus", *options],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            preexec_fn=die_with_parent,  # noqa: PLW1509 the child does nothing else before it is replaced
        )
    try:
        running, end = Prometheus(port), time.monotonic() + SECONDS_TO_START
        while not running.ready():
            if process.poll() is not None or time.monotonic() > end:
                raise FailedError(f"Prometheus does not start\n{log.read_text(errors='replace')[-TAIL:]}")
            time.sleep(0.1)
        with Discovery(cluster, folder):
            yield running
    finally:
        process.terminate()
        process.wait()
