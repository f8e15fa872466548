"""Drives jobs through their lives on level api: the test is the kubelet, Ray and the trainer; all else is real."""

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from rlhf_api import kubectl_yaml
from tests.cluster.client import Cluster
from tests.cluster.settings import ROOT
from tests.patience import PATIENCE_SECONDS

JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/{}/rlhfjobs"
RAYJOBS = "/apis/ray.io/v1/namespaces/{}/rayjobs"
PODS = "/api/v1/namespaces/{}/pods"
STATUS_PORT = 8490
SECONDS = PATIENCE_SECONDS
"""For anything that should happen; the machine may be busy."""

Document = dict[str, Any]


def example(number: int, namespace: str) -> list[Document]:
    """The jobs of an example."""
    (file,) = (ROOT / "examples").glob(f"{number:02}-*.yaml")
    return documents(file, namespace)


def documents(file: Path, namespace: str) -> list[Document]:
    """The jobs of a file, in a namespace."""
    made = kubectl_yaml.read(file.read_text(), f"{file}: ")
    for each in made:
        each["metadata"]["namespace"] = namespace
    return made


class Trainer:
    """The side-car of a head pod, which says what a test wants it to; at an address of the loopback of its own."""

    def __init__(self) -> None:
        self.ip = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}.{secrets.randbelow(250) + 2}"
        self.document: Document = {}
        self.requests = 0
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                trainer.requests += 1
                body = json.dumps(trainer.document).encode()
                self.send_response(200 if self.path == "/status.json" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = _listening(self.ip, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def starts(self, attempt: int) -> None:
        """It runs and has written nothing yet."""
        self.document = {"attempt": attempt, "status": {}, "complete": False, "exitCode": None}

    def trains(self, attempt: int, step: int, total: int = 10, checkpoint: int = 0) -> None:
        """So many steps are done."""
        self.document = {
            "attempt": attempt,
            "status": running_status(step, total, checkpoint),
            "complete": False,
            "exitCode": None,
        }

    def succeeds(self, attempt: int, total: int = 10) -> None:
        """It has ended well."""
        status = {
            **running_status(total, total, total),
            "phase": "Succeeded",
            "output": {"uri": "file:///rlhf/output/model"},
        }
        self.document = {"attempt": attempt, "status": status, "complete": True, "exitCode": 0}

    def fails(self, attempt: int, code: int, reason: str, message: str) -> None:
        """It has ended with an exit code."""
        failure = {"reason": reason, "exitCode": code, "message": message}
        status = {**running_status(3, 10, 2), "phase": "Failed", "lastFailure": failure}
        self.document = {"attempt": attempt, "status": status, "complete": True, "exitCode": code}

    def is_told_to_end(self, attempt: int, step: int, total: int = 10) -> None:
        """It has saved a checkpoint and ended because of SIGTERM."""
        status = {**running_status(step, total, step), "phase": "Stopped"}
        self.document = {"attempt": attempt, "status": status, "complete": True, "exitCode": 143}


def _listening(ip: str, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """As soon as no other test of this machine has the port on all addresses."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return ThreadingHTTPServer((ip, STATUS_PORT), handler)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def running_status(step: int, total: int, checkpoint: int) -> Document:
    """What the trainer writes after a step."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    progress = {"step": step, "totalSteps": total, "stage": "SFT", "stepSeconds": 0.5, "lastStepTime": now}
    status: Document = {
        "phase": "Running",
        "progress": progress,
        "metrics": [{"name": "loss/sft", "value": f"{1 / (step + 1):.4f}"}],
    }
    if checkpoint:
        uri = f"file:///rlhf/output/checkpoints/step-{checkpoint:06}"
        status["checkpoint"] = {"step": checkpoint, "uri": uri, "time": now}
    return status


class Jobs:
    """The jobs of a namespace, and what belongs to them."""

    def __init__(self, server: Cluster, namespace: str) -> None:
        self.server, self.namespace = server, namespace

    def apply(self, *jobs: Mapping[str, Any]) -> None:
        """Make jobs, as a user would."""
        for job in jobs:
            self.server.expect("POST", JOBS.format(self.namespace), job)

    def patch(self, name: str, change: Mapping[str, Any]) -> None:
        """A merge patch by the user."""
        self.server.expect("PATCH", f"{JOBS.format(self.namespace)}/{name}", change)

    def delete(self, name: str) -> None:
        """As `kubectl delete` does."""
        self.server.expect("DELETE", f"{JOBS.format(self.namespace)}/{name}")

    def get(self, name: str) -> Document:
        """The whole object."""
        job: Document = self.server.expect("GET", f"{JOBS.format(self.namespace)}/{name}")
        return job

    def status(self, name: str) -> Document:
        """Empty before the first pass."""
        status: Document = self.get(name).get("status", {})
        return status

    def phase(self, name: str) -> str:
        return str(self.status(name).get("phase", ""))

    def condition(self, name: str, kind: str) -> Document:
        """Empty where there is none."""
        conditions: list[Document] = self.status(name).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_for(self, name: str, *phases: str) -> Document:
        """The status, as soon as the job is in one of the phases."""
        return self.server.until(
            lambda: status if (status := self.status(name)).get("phase") in phases else {},
            SECONDS,
            f"{name} is {' or '.join(phases)}",
        )

    def rayjobs(self, name: str) -> list[Document]:
        """Those of a job."""
        selector = f"?labelSelector=rlhf.hybridflow.io/job-name={name}"
        return self.server.items(RAYJOBS.format(self.namespace) + selector)

    def set_rayjob(self, name: str, attempt: int, **status: str) -> None:
        """Write the status of an attempt's RayJob, as KubeRay would."""
        path = f"{RAYJOBS.format(self.namespace)}/{name}-a{attempt}/status"
        self.server.expect("PATCH", path, {"status": status})

    def pods(self, name: str, attempt: int | None = None) -> list[Document]:
        """Those of a job."""
        selector = f"?labelSelector=rlhf.hybridflow.io/job-name={name}"
        selector += f",rlhf.hybridflow.io/attempt={attempt}" if attempt else ""
        return self.server.items(PODS.format(self.namespace) + selector)

    def wait_for_pods(self, name: str, attempt: int, count: int = 2) -> list[Document]:
        """As soon as so many are there and on a node."""

        def bound() -> list[Document]:
            found = [pod for pod in self.pods(name, attempt) if pod["spec"].get("nodeName")]
            return found if len(found) == count else []

        try:
            return self.server.until(bound, SECONDS, f"{count} pods of {name} are on a node")
        except AssertionError as error:
            claims = self.server.items(f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims")
            seen = {"job": self.status(name), "rayjobs": self.rayjobs(name), "pods": self.pods(name), "claims": claims}
            raise AssertionError(f"{error}\n{json.dumps(seen, indent=1)}") from None

    def run_pods(self, name: str, attempt: int, trainer: Trainer, count: int = 2) -> None:
        """All pods of an attempt run; the head has the trainer's address."""
        for pod in self.wait_for_pods(name, attempt, count):
            self.server.run_pod(self.namespace, pod["metadata"]["name"], trainer.ip if is_head(pod) else "127.0.0.1")

    def bury_pods_until_gone(self, name: str) -> None:
        """End the pods that are told to, as kubelets would, until none is left."""

        def gone() -> bool:
            self.server.bury_pods(self.namespace)
            return not self.pods(name)

        self.server.until(gone, SECONDS, f"all pods of {name} are gone")

    def events(self, name: str) -> list[Document]:
        """About a job."""
        listed = self.server.items(f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")
        return [
            each for each in listed if each["regarding"].get("name") == name and each["regarding"]["kind"] == "RLHFJob"
        ]

    # A life in steps; each returns when the operator has come along.

    def provision(self, name: str, attempt: int = 1) -> None:
        """Its RayJob is there, and pods of it on a node."""
        self.wait_for(name, "Provisioning", "Initializing")
        self.wait_for_pods(name, attempt)

    def initialize(self, name: str, trainer: Trainer, attempt: int = 1) -> None:
        """All pods run, the trainer has begun."""
        trainer.starts(attempt)
        self.run_pods(name, attempt, trainer)
        self.set_rayjob(name, attempt, jobDeploymentStatus="Running", jobStatus="RUNNING")
        self.wait_for(name, "Initializing")

    def train(self, name: str, trainer: Trainer, step: int, attempt: int = 1, checkpoint: int = 0) -> Document:
        """So many steps are done: the status that says so."""
        trainer.trains(attempt, step, checkpoint=checkpoint)
        return self.server.until(
            lambda: status if (status := self.status(name)).get("progress", {}).get("step") == step else {},
            SECONDS,
            f"{name} has done {step} steps",
        )

    def succeed(self, name: str, trainer: Trainer, attempt: int = 1) -> Document:
        """The trainer and Ray have ended well: the final status."""
        trainer.succeeds(attempt)
        self.set_rayjob(name, attempt, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        return self.wait_for(name, "Succeeded")


def is_head(pod: Document) -> bool:
    """Whether it is the pod of the controller."""
    return bool(pod["metadata"]["labels"]["rlhf.hybridflow.io/role"] == "controller")


@contextmanager
def trainers(count: int) -> Iterator[list[Trainer]]:
    """Several, for several jobs at once."""
    made = [Trainer() for _ in range(count)]
    for each in made:
        each.__enter__()
    try:
        yield made
    finally:
        for each in made:
            each.__exit__()
