"""What a test does with a running cluster."""

import hashlib
import http.client
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster.credentials import kubeconfig
from tests.cluster.node_files import CTR, SNAPSHOTTER, SOCKET
from tests.cluster.processes import output_of
from tests.cluster.settings import Settings
from tests.patience import BUSY_FACTOR, PATIENCE_SECONDS

T = TypeVar("T")

CONTENT_TYPES = {"PATCH": "application/merge-patch+json"}
NODE_RESOURCES = {"cpu": "64", "memory": "512Gi", "pods": "250", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"}
WATCH_SECONDS = 2
IDLE_CONNECTION_CLOSED = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError)


class Cluster:
    """A cluster that runs in a folder. Everything is done as the administrator unless a token says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings.load(folder)
        self.programs = Path(self.settings.programs)
        self.states: list[Callable[[], str]] = []
        """What else tests stand on; each says how it is when a wait has been in vain."""
        self._local = threading.local()

    # Programs

    def kubectl(self, *arguments: object, text: str | None = None) -> str:
        """Run kubectl with `text` as its input: what it printed; FailedError with its complaint."""
        program = self.programs / "kubectl"
        return output_of(program, *arguments, text=text, environment=self.environment())

    def helm(self, *arguments: object) -> str:
        """Run helm: what it printed; FailedError with its complaint."""
        return output_of(self.programs / "helm", *arguments, environment=self.environment())

    def environment(self) -> dict[str, str]:
        """Variables with which kubectl and helm work on this cluster only, and keep nothing in the home."""
        homes = {f"HELM_{kind}_HOME": str(self.folder / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        admin = str(self.folder / "admin.kubeconfig")
        return {"KUBECONFIG": admin, "KUBECACHEDIR": str(self.folder / "kubectl-cache"), **homes}

    def kubeconfig(self, user_or_token: str) -> Path:
        """The kubeconfig of a user of `settings.USERS` (`admin`; `dev` has no rights) or of whom a token stands for."""
        if user_or_token in self.settings.tokens:
            return self.folder / f"{user_or_token}.kubeconfig"
        path = self.folder / f"{hashlib.sha256(user_or_token.encode()).hexdigest()[:16]}.kubeconfig"
        authority = (self.folder / "pki/ca.crt").read_bytes()
        path.write_text(kubeconfig(self.settings.url, user_or_token, authority))
        return path

    def token(self, namespace: str, service_account: str) -> str:
        """A token of a service account, for an hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return str(self.expect("POST", path, body)["status"]["token"])

    # Requests

    def request(
        self, method: str, path: str, body: object = None, content_type: str | None = None, token: str | None = None
    ) -> tuple[int, Any]:
        """Ask the API server over this thread's own connection: the status and the document (or text)."""
        data = None if body is None else json.dumps(body)
        headers = {
            "Authorization": f"Bearer {token or self.settings.tokens['admin']}",
            "Content-Type": content_type or CONTENT_TYPES.get(method, "application/json"),
            "Accept": "application/json",
        }
        try:
            answer = self._send(method, path, data, headers)
        except IDLE_CONNECTION_CLOSED:  # by a server that was restarted; a new connection is not idle
            answer = self._send(method, path, data, headers)
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text

    def _send(self, method: str, path: str, data: str | None, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            trust = ssl.create_default_context(cafile=str(self.folder / "pki/ca.crt"))
            port = self.settings.ports["server"]
            connection = http.client.HTTPSConnection(self.settings.ip, port, timeout=65, context=trust)
            self._local.connection = connection
        try:
            connection.request(method, path, data, dict(headers))
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            connection.close()
            self._local.connection = None
            raise

    def expect(self, method: str, path: str, body: object = None, content_type: str | None = None) -> Any:
        """The document that answers a request; AssertionError if it is refused."""
        status, document = self.request(method, path, body, content_type)
        assert status < 300, f"{method} {path}: {status} {document}"
        return document

    def items(self, path: str) -> list[dict[str, Any]]:
        """The items of a list, `/api/v1/namespaces/x/pods?labelSelector=...`."""
        listed: list[dict[str, Any]] = self.expect("GET", path)["items"]
        return listed

    def watch(self, path: str, version: str, seconds: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(ADDED, MODIFIED, DELETED or ERROR, object) after a version, until the server ends it in so many seconds."""
        trust = ssl.create_default_context(cafile=str(self.folder / "pki/ca.crt"))
        port = self.settings.ports["server"]
        connection = http.client.HTTPSConnection(self.settings.ip, port, timeout=seconds + 20, context=trust)
        headers = {"Authorization": f"Bearer {self.settings.tokens['admin']}", "Accept": "application/json"}
        try:
            connection.request(
                "GET", f"{path}?watch=1&timeoutSeconds={seconds}&resourceVersion={version}", None, headers
            )
            answer = connection.getresponse()
            assert answer.status == http.HTTPStatus.OK, f"watch of {path}: {answer.status}"
            for line in answer:
                event = json.loads(line)
                yield event["type"], event["object"]
        finally:
            connection.close()

    def follow(self, path: str, saw: Callable[[str, dict[str, Any]], None], end: threading.Event) -> None:
        """Tell of every version of the objects of a list (LISTED, ADDED, MODIFIED or DELETED) until the end."""
        version = ""
        while not end.wait(0.05):
            # A server that is away is looked for again; one that is killed may have sent a part of a line (ValueError).
            with suppress(OSError, http.client.HTTPException, AssertionError, ValueError):
                if not version:
                    listed = self.expect("GET", path)
                    for each in listed["items"]:
                        saw("LISTED", each)
                    version = listed["metadata"]["resourceVersion"]
                for kind, each in self.watch(path, version, WATCH_SECONDS):
                    if kind == "ERROR":  # the version is too old
                        version = ""
                        break
                    saw(kind, each)
                    version = each["metadata"]["resourceVersion"]

    def until(self, condition: Callable[[], T], seconds: float = PATIENCE_SECONDS, what: str = "") -> T:
        """Wait until a condition gives something true, and return that; no connection counts as false.

        seconds: what it takes at most on an idle machine; a busy one gets BUSY_FACTOR as many.
        """
        seconds = max(seconds, min(PATIENCE_SECONDS, BUSY_FACTOR * seconds))
        end = time.monotonic() + seconds
        last: object = None
        pause = 0.05
        while time.monotonic() < end:
            with suppress(OSError, http.client.HTTPException):
                last = outcome = condition()
                if outcome:
                    return outcome
            time.sleep(pause)
            pause = min(1.5 * pause, 0.4)  # a server that many ask all the time has no time for what they wait for
        raise AssertionError(
            f"not within {seconds:.0f} s: {what or condition} (last: {last!r}){self._ended_programs()}"
            + "".join(f"\n{state()}" for state in self.states)
        )

    def _ended_programs(self) -> str:
        return "".join(f"\n{path.parent.name}: {path.read_text()}" for path in self.folder.glob("node*/ended.log"))

    # The programs of the cluster

    def order(self, verb: str, program: str) -> None:
        """Have a program of the control plane stopped or started, and wait until that is done."""
        plane = self.folder if self.settings.level == "api" else self.folder / "node0"
        file = plane / "orders" / f"{verb}-{program}"
        file.touch()
        self.until(lambda: not file.exists(), 20, f"{verb} {program}")

    def restart(self) -> None:
        """Kill the API server and start it again; returns when it answers."""
        with self.without("kube-apiserver"):
            pass

    @contextmanager
    def without(self, program: str) -> Iterator[None]:
        """The API server or its etcd is killed and away meanwhile; afterwards the API server answers again."""
        self.order("stop", program)
        try:
            yield
        finally:
            self.order("start", program)
            self.until(lambda: self.request("GET", "/readyz")[0] == 200, 60, "the API server answers")

    def stop_kuberay(self) -> None:
        """Kill KubeRay."""
        self.order("stop", "kuberay-operator")

    def start_kuberay(self) -> None:
        """Start KubeRay after stop_kuberay."""
        self.order("start", "kuberay-operator")

    @contextmanager
    def without_kuberay(self) -> Iterator[None]:
        """KubeRay is down meanwhile."""
        self.stop_kuberay()
        try:
            yield
        finally:
            self.start_kuberay()

    # Nodes and pods

    def add_node(
        self, name: str, resources: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        """A made-up node (level api); `resources` over NODE_RESOURCES, both with strings as values."""
        own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        metadata = {"name": name, "labels": {**own, **(labels or {})}}
        self.expect("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        amounts = {**NODE_RESOURCES, **(resources or {})}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "MadeUp"}
        condition = {**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [condition]}
        self.expect("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})
        self.expect("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # not-ready, from admission

    def remove_node(self, name: str) -> None:
        """Take a made-up node away; its pods are collected like those of a lost node."""
        self.request("DELETE", f"/api/v1/nodes/{name}")

    def set_pod_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> dict[str, Any]:
        """Merge into a pod's status, as a kubelet would: the pod."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        pod: dict[str, Any] = self.expect("PATCH", path, {"status": dict(status)})
        return pod

    def run_pod(self, namespace: str, name: str, ip: str = "127.0.0.1") -> dict[str, Any]:
        """All containers of a pod run and are ready."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pod = self.expect("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        done = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
        init = pod["spec"].get("initContainers", [])
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": now,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "initContainerStatuses": [_container(each, done, True) for each in init],
            "containerStatuses": [_container(each, {"running": {"startedAt": now}}, True) for each in _containers(pod)],
        }
        return self.set_pod_status(namespace, name, status)

    def end_pod(
        self, namespace: str, name: str, exit_code: int = 0, reason: str = "", message: str = ""
    ) -> dict[str, Any]:
        """All containers of a pod ended with a code; Succeeded if it is 0, else Failed."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pod = self.expect("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        why = reason or ("Error" if exit_code else "Completed")
        ended = {"exitCode": exit_code, "reason": why, "message": message, "startedAt": now, "finishedAt": now}
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "conditions": [
                {"type": kind, "status": "False", "lastTransitionTime": now} for kind in ("ContainersReady", "Ready")
            ],
            "containerStatuses": [_container(each, {"terminated": ended}, False) for each in _containers(pod)],
        }
        return self.set_pod_status(namespace, name, status)

    def bury_pods(self, namespace: str) -> list[str]:
        """Finish the deletion of pods that wait for a kubelet that is not there: their names."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        dying = [pod["metadata"]["name"] for pod in self.items(path) if "deletionTimestamp" in pod["metadata"]]
        for name in dying:
            self.request("DELETE", f"{path}/{name}?gracePeriodSeconds=0")
        return dying

    def logs(self, namespace: str, pod: str, container: str) -> str:
        """What a container has printed (level pods)."""
        return self.kubectl("logs", "-n", namespace, pod, "-c", container)

    # Volumes

    def offer_volumes(self, count: int = 1, size: str = "20Gi") -> list[Path]:
        """Volumes that claims of the default storage class `shared` are bound to, for any user: their folders here."""
        meta = {"name": "shared", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
        shared = {"metadata": meta, "provisioner": "kubernetes.io/no-provisioner", "reclaimPolicy": "Retain"}
        self.request("POST", "/apis/storage.k8s.io/v1/storageclasses", shared)  # again is no harm
        folders = [self.folder / "volumes" / f"volume-{secrets.token_hex(4)}" for _ in range(count)]
        for folder in folders:
            folder.mkdir(parents=True)
            folder.chmod(0o777)  # hostPath knows no fsGroup
            spec = {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
                "storageClassName": "shared",
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
            }
            self.expect("POST", "/api/v1/persistentvolumes", {"metadata": {"name": folder.name}, "spec": spec})
        return folders

    def folder_of_claim(self, namespace: str, claim: str) -> Path:
        """Where this machine has what is on a claim; waits until the claim is bound."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
        volume = self.until(lambda: self.expect("GET", path)["spec"].get("volumeName"), 30, f"{claim} is bound")
        return self.folder / "volumes" / str(volume)

    # Namespaces

    def make_namespace(self, name: str) -> None:
        """A namespace in which pods can be made."""
        self.expect("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.until(lambda: self.request("GET", account)[0] == 200, 30, f"{name} has a service account")

    def drop_namespace(self, name: str) -> None:
        """Delete a namespace, without waiting for more than its claims: they would take the next test's volumes."""
        path = f"/api/v1/namespaces/{name}"
        taken = (200, 202, 404, 409)  # a busy server may refuse it at first
        self.until(lambda: self.request("DELETE", path)[0] in taken, what=f"{name} is to go")
        if self.settings.level == "api":
            self.request("DELETE", f"{path}/pods?gracePeriodSeconds=0")
            claims = f"{path}/persistentvolumeclaims"
            self.request("DELETE", claims)
            self.until(lambda: not self.items(claims), what=f"{name} has no claims")

    # Real nodes (level pods)

    def nodes_pids(self) -> dict[str, dict[str, int]]:
        """For each real node: the process to kill, and its PID 1."""
        pids: dict[str, dict[str, int]] = json.loads((self.folder / "nodes.json").read_text())
        return pids

    def kill_node(self, index: int) -> None:
        """Node and containers are gone at once; node 0 has the control plane and must stay."""
        assert index, "node 0 has the control plane"
        os.kill(self.nodes_pids()[f"node{index}"]["kill"], 9)

    def start_node(self, index: int) -> None:
        """Start a killed node again; returns when it is ready."""
        (self.folder / f"start-node{index}").touch()
        self.until(lambda: self.node_is_ready(f"node{index}"), 90, f"node{index} is ready again")

    def import_image(self, archive: Path, *nodes: int) -> None:
        """Nodes have an image from now on, until they are killed."""
        command = (CTR, "-a", SOCKET, "-n", "k8s.io", "images", "import", "--snapshotter", SNAPSHOTTER, archive)
        for index in nodes:
            output_of("nsenter", "-t", self.nodes_pids()[f"node{index}"]["init"], "-m", *command)

    def node_is_ready(self, name: str) -> bool:
        """True if a node's Ready condition is."""
        conditions = self.expect("GET", f"/api/v1/nodes/{name}")["status"].get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = pod["spec"]["containers"]
    return listed


def _container(container: Mapping[str, Any], state: Mapping[str, Any], ready: bool) -> dict[str, Any]:
    name, image = container["name"], container["image"]
    identity = {"name": name, "image": image, "imageID": "made-up", "containerID": f"made-up://{name}"}
    return {**identity, "ready": ready, "started": ready, "restartCount": 0, "state": dict(state)}
