"""Jobs on a cluster with pods: applied, waited for and disturbed. For tests, `make cluster-demo` and `make accept`."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_api import kubectl_yaml
from tests.cluster.client import Cluster
from tests.cluster.processes import FailedError
from tests.cluster.settings import ROOT
from tests.patience import BUSY_FACTOR, PATIENCE_SECONDS

EXAMPLE = ROOT / "examples" / "01-helpful-ppo.yaml"
SFT, RM, PPO = NAMES = ("helpful-sft", "helpful-rm", "helpful-ppo")
JOBS = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/{}/rlhfjobs"
JOB_OF = "rlhf.hybridflow.io/job-name"
ROLE = "rlhf.hybridflow.io/role"
HEAD, WORKER = "controller", "worker"
"""Values of ROLE."""
DRIVER_LOG = "driver-log"
ENDED = ("Succeeded", "Failed")
PAUSE = "pause"
"""The process that holds a pod's namespaces; without it the kubelet would take the pod for lost."""

Document = dict[str, Any]


def example(file: Path = EXAMPLE) -> dict[str, Document]:
    """The jobs of an example, by name."""
    documents = kubectl_yaml.read(file.read_text(), f"{file.name}: ")
    return {document["metadata"]["name"]: document for document in documents}


def shortened(steps: Mapping[str, int], *, every_steps: int, rows: int = 16) -> dict[str, Document]:
    """Jobs of example 01 with fewer steps, a checkpoint every so many, and an evaluation on few rows."""
    jobs = {name: document for name, document in example().items() if name in steps}
    for name, document in jobs.items():
        spec = document["spec"]
        spec["training"]["totalSteps"] = steps[name]
        spec["checkpoint"] = {"everySteps": every_steps}
        spec["evaluation"]["data"]["limit"] = rows
        spec["runPolicy"] = {"restartBackoffSeconds": 1}
    return jobs


def apply(cluster: Cluster, namespace: str, jobs: Mapping[str, Document]) -> None:
    """All of them at once, as one file."""
    text = "---\n".join(kubectl_yaml.write(document) for document in jobs.values())
    cluster.kubectl("apply", "-n", namespace, "-f", "-", text=text)


def status(cluster: Cluster, namespace: str, name: str) -> Document:
    """The status of a job; empty before the operator has seen it."""
    found: Document = cluster.expect("GET", f"{JOBS.format(namespace)}/{name}").get("status", {})
    return found


def step(found: Document) -> int:
    """Steps done, as a status says."""
    return int(found.get("progress", {}).get("step", 0))


def saved_step(found: Document) -> int:
    """Step of the newest checkpoint, as a status says."""
    return int(found.get("checkpoint", {}).get("step", 0))


def until(
    cluster: Cluster, namespace: str, name: str, condition: Callable[[Document], object], seconds: float
) -> Document:
    """The status of a job as soon as a condition holds for it; FailedError if the job ends before.

    seconds: that its status may stay as it is, on an idle machine.
    """
    seconds = max(seconds, min(PATIENCE_SECONDS, BUSY_FACTOR * seconds))
    last, changed = Document(), time.monotonic()
    while not condition(found := status(cluster, namespace, name)):
        if found != last:
            last, changed = found, time.monotonic()
        if found.get("phase") in ENDED or time.monotonic() > changed + seconds:
            raise FailedError(f"{name} is {found.get('phase')}\n{report(cluster, namespace)}")
        time.sleep(0.2)
    return found


def succeeded(cluster: Cluster, namespace: str, name: str, seconds: float = PATIENCE_SECONDS) -> Document:
    """The status of a job that has succeeded."""
    return until(cluster, namespace, name, lambda found: found.get("phase") == "Succeeded", seconds)


def pods(cluster: Cluster, namespace: str, job: str, role: str = "") -> list[Document]:
    """The pods of a job that are there, or those of a role."""
    selector = f"{JOB_OF}={job}" + (f",{ROLE}={role}" if role else "")
    return cluster.items(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")


def head(cluster: Cluster, namespace: str, job: str) -> str:
    """Name of the head pod of a job."""
    (pod,) = pods(cluster, namespace, job, HEAD)
    return str(pod["metadata"]["name"])


def kill_driver(cluster: Cluster, namespace: str, job: str) -> None:
    """SIGKILL for the trainer's controller process; its pod and all of Ray live on."""
    (pod,) = pods(cluster, namespace, job, HEAD)
    kill(pod, lambda process: b"rlhf run" in (process / "cmdline").read_bytes().replace(b"\0", b" "))


def kill_pod(pod: Document) -> None:
    """SIGKILL for all that runs in a pod of this machine."""
    kill(pod, lambda process: (process / "comm").read_text().strip() != PAUSE)


def kill(pod: Document, which: Callable[[Path], bool]) -> None:
    """SIGKILL for some processes of a pod of this machine, which are folders of /proc."""
    uid = pod["metadata"]["uid"]
    for process in processes():
        with suppress(OSError):
            if uid in (process / "cgroup").read_text() and which(process):
                os.kill(int(process.name), signal.SIGKILL)


def processes() -> Iterator[Path]:
    """Of this machine, in all its namespaces."""
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def report(cluster: Cluster, namespace: str) -> str:
    """What a person would look at if something goes wrong."""
    said = []
    commands = (
        ("get", "rlhf,rayjobs,pods", "-o", "wide"),
        ("get", "rlhf", "-o", "yaml"),
        ("get", "events", "--sort-by=.metadata.creationTimestamp"),
        ("logs", "--selector", f"{ROLE}={HEAD}", "-c", DRIVER_LOG, "--tail=40"),
    )
    for command in commands:
        try:
            said.append(cluster.kubectl(*command, "-n", namespace))
        except FailedError as error:
            said.append(str(error))
    return "\n".join(said)
