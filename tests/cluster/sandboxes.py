"""Sandboxes on real pods without a trainer: what the operator makes for a job, and a pod that is its worker."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import yaml

from rlhf_api.job import Job
from rlhf_api.status import Condition, Status
from rlhf_operator import names
from rlhf_operator.actions import ClusterAction, Create, Delete
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.client import CONFLICT, FORBIDDEN
from rlhf_operator.cluster.resources import CREATED
from rlhf_operator.reconcile.context import ReconcileContext
from rlhf_operator.reconcile.sandboxes import keep
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedRayJob, Snapshot
from rlhf_operator.times import timestamp
from tests.api.cases import made
from tests.cluster.client import Cluster
from tests.cluster.images import HOSTROOT
from tests.cluster.settings import API_SERVICE_IP, NODE_IP, ROOT
from tests.operator.rendered import THEN, snapshot

PODS = "/api/v1/namespaces/{}/pods"
RAYJOB = ROOT / "tests" / "cluster" / "rayjob.yaml"
SMALL = {"cpu": "50m", "memory": "128Mi", "seconds": 120}
SOURCES = os.pathsep.join(str(ROOT / each) for each in ("crds", "operator", "trainer_image", "examples", ""))
WORKER = "worker"
METADATA_IP, PUBLIC_IP = "169.254.169.254", "198.51.100.7"
"""Addresses that nodes have beside their own: of a cloud's metadata, and one of the internet (RFC 5737)."""
PLAYED_PORT, VICTIM_PORT = 8999, 8998
LISTEN = """
import socket, sys, threading
def echo(kind):
    with socket.socket(socket.AF_INET, kind) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((sys.argv[1], int(sys.argv[2])))
        if kind == socket.SOCK_STREAM:
            door.listen()
            while True:
                door.accept()[0].close()
        while True:
            door.sendto(*door.recvfrom(512))
threading.Thread(target=echo, args=(socket.SOCK_DGRAM,), daemon=True).start()
echo(socket.SOCK_STREAM)
"""
"""Program that takes connections at an address and a port, and sends datagrams back."""
RUN = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from rlhf_trainer.rewards.sandboxes import LostSandboxError, NoSandboxError, Sandboxes
host, command, files, count, lanes = json.load(sys.stdin)
pods = Sandboxes(host, int(sys.argv[1]), lanes, 120.0)
def run(_):
    try:
        return asdict(pods.run(command, files=files, seconds=100.0, until=time.monotonic() + 300))
    except (LostSandboxError, NoSandboxError) as error:
        return {"error": str(error)}
with ThreadPoolExecutor(lanes) as pool:
    began = time.monotonic()
    print(json.dumps([[*pool.map(run, range(count))], time.monotonic() - began]))
"""
"""Program of the worker: runs a command so many times, at most `lanes` at a time; prints results and seconds."""

Document = dict[str, Any]
CLUSTER_READY = Condition(
    type="ClusterReady",
    status="True",
    reason="AllPodsReady",
    last_transition_time=timestamp(THEN),
    observed_generation=1,
)


@dataclass(frozen=True)
class Stage:
    """A namespace with sandboxes of a job, and a worker of the job."""

    cluster: Cluster
    namespace: str
    rayjob: ObservedRayJob
    is_over: Event = field(default_factory=Event)

    def make(self, **sandbox: Any) -> None:
        """Keep sandboxes as the operator does until the stage is over, and wait for the first ones."""
        wanted = {**SMALL, **sandbox}
        job = Job.parse(made("GRPO", ("rollout.tools=['a:b']", f"sandbox={json.dumps(wanted)}")))
        status = Status(attempt=self.rayjob.attempt, conditions=(CLUSTER_READY,))
        seen = replace(snapshot(job, namespace=self.namespace).job, status=status)
        Thread(target=self._keep, args=(seen,), daemon=True).start()
        self.wait(wanted.get("warm", 8))

    def wait(self, count: int) -> None:
        """Wait until so many sandboxes run."""
        self.cluster.until(lambda: len(self.pods("Running")) == count, 90, f"{count} sandboxes run")

    def _keep(self, job: ObservedJob) -> None:
        installed = Settings(trainer_image=HOSTROOT, image_pull_policy="Never")
        while not self.is_over.wait(0.3):
            pods = tuple(parse.pod(each) for each in self.pods())
            seen = Snapshot(job=job, rayjobs=(self.rayjob,), sandboxes=pods, watching_since=THEN, fresh=True)
            found = ReconcileContext.of(seen, datetime.now(UTC), installed)
            keep(found)
            for action in found.actions:
                self._act(action)

    def _act(self, action: ClusterAction) -> None:
        if isinstance(action, Create):
            kind = CREATED[action.manifest["apiVersion"], action.manifest["kind"]]
            status, answer = self.cluster.request("POST", kind.path(self.namespace), action.manifest)
            # The objects around the pods may be there; nothing is made in a namespace that goes.
            assert status < 300 or status in (FORBIDDEN, CONFLICT), answer
        elif isinstance(action, Delete):
            self.cluster.request("DELETE", f"{PODS.format(self.namespace)}/{action.name}?gracePeriodSeconds=0")

    def pods(self, phase: str = "") -> list[Document]:
        """The sandboxes that are there, or those in a phase."""
        selector = f"?labelSelector={names.ROLE}={names.SANDBOX}"
        found = self.cluster.items(PODS.format(self.namespace) + selector)
        return [each for each in found if phase in ("", each["status"].get("phase"))]

    def start(self, name: str, command: list[str], **labels: str) -> str:
        """Start an ordinary pod, and return its address."""
        container = {
            "name": "main",
            "image": HOSTROOT,
            "command": command,
            "env": [{"name": "PYTHONPATH", "value": SOURCES}],
        }
        pod = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        self.cluster.expect("POST", PODS.format(self.namespace), pod)
        path = f"{PODS.format(self.namespace)}/{name}"
        return self.cluster.until(lambda: running_ip(self.cluster.expect("GET", path)), 60, f"{name} runs")

    def run(
        self, command: list[str], files: Mapping[str, str] | None = None, *, count: int = 1, lanes: int = 1
    ) -> tuple[list[Document], float]:
        """Run a command in sandboxes from the worker: the results, and the seconds that all took."""
        host = f"{names.sandboxes_name(self.rayjob.name)}.{self.namespace}.svc"
        words = ("exec", "-i", "-n", self.namespace, WORKER, "--", "python", "-c", RUN, names.SANDBOX_PORT)
        given = json.dumps([host, command, files or {}, count, lanes])
        found, took = json.loads(self.cluster.kubectl(*words, text=given))
        return found, took


def running_ip(pod: Document) -> str:
    """The address of a pod that runs; else empty."""
    status = pod["status"]
    return str(status.get("podIP", "")) if status.get("phase") == "Running" else ""


@contextmanager
def stage(cluster: Cluster, namespace: str) -> Iterator[Stage]:
    """Make everything but the sandboxes; their owner is a RayJob that KubeRay leaves alone."""
    document = yaml.safe_load(RAYJOB.read_text())
    seen = snapshot(Job.parse(made("GRPO"))).job
    document["spec"]["suspend"] = True
    document["metadata"]["name"] = names.rayjob_name(seen.name, 1)
    made_rayjob = cluster.expect("POST", f"/apis/ray.io/v1/namespaces/{namespace}/rayjobs", document)["metadata"]
    rayjob = ObservedRayJob(
        name=made_rayjob["name"], uid=made_rayjob["uid"], attempt=1, owned=True, created=THEN, deleting=False
    )
    found = Stage(cluster, namespace, rayjob)
    found.start(WORKER, ["sleep", "3600"], **{names.JOB_UID: seen.uid, names.ROLE: names.WORKER})
    try:
        yield found
    finally:
        found.is_over.set()


@contextmanager
def played_addresses(cluster: Cluster) -> Iterator[None]:
    """Each node has the address of a metadata service and one of the internet, and both answer."""
    with ExitStack() as stack:
        for node in cluster.nodes_pids().values():
            inside = ["nsenter", "--target", str(node["init"]), "--net"]
            for address in (METADATA_IP, PUBLIC_IP):
                subprocess.run([*inside, "ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
                listener = subprocess.Popen([*inside, sys.executable, "-c", LISTEN, address, str(PLAYED_PORT)])
                stack.callback(listener.wait)
                stack.callback(listener.kill)
        yield


def doors(victim: str, sandbox: str) -> dict[str, tuple[str, str, int]]:
    """What code in a pod must not reach, and an address of the internet; victim, sandbox: addresses of other pods."""
    return {
        "metadata": ("TCP", METADATA_IP, PLAYED_PORT),
        "API server by its Service": ("TCP", API_SERVICE_IP, 443),
        "API server": ("TCP", NODE_IP, 6443),
        "kubelet": ("TCP", NODE_IP, 10250),
        "DNS": ("UDP", NODE_IP, 53),
        "DNS by TCP": ("TCP", NODE_IP, 53),
        "pod": ("TCP", victim, VICTIM_PORT),
        "pod by UDP": ("UDP", victim, VICTIM_PORT),
        "sandbox": ("TCP", sandbox, names.SANDBOX_PORT),
        "internet": ("TCP", PUBLIC_IP, PLAYED_PORT),
    }


ESCAPE = Path(__file__).with_name("escape.py")
