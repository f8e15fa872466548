"""Nothing that users write into specs, or that stands in the status of children, stops the operator or other jobs."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from tests.api.cases import RIGHT, made
from tests.cluster.api.test_the_server_judges_as_validate_does import CREATED, as_kubectl_sends
from tests.cluster.client import Cluster
from tests.cluster.kubelets import Kubelets
from tests.cluster.lifecycle import JOBS, PODS, RAYJOBS, Document
from tests.cluster.operator_process import operator
from tests.cluster.stage import ROOM_FOR_ALL, played, small_job

SEED = 11
AT_ONCE = 6
RUBBISH_EVERY = 0.05
WORDS = ("", "Running", "Failed", "SUCCEEDED", "FAILED", "Evicted", "exit code 99999999", "x" * 3000, "Ünï' \" {")
TIMES = ("2026-01-31T12:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z")
STATES: tuple[Document, ...] = (
    {"waiting": {"reason": "ImagePullBackOff", "message": "x" * 2000}},
    {"waiting": {"reason": "CreateContainerConfigError", "message": "not found"}},
    {"terminated": {"exitCode": -1, "reason": "OOMKilled"}},
    {"terminated": {"exitCode": 2147483647}},
    {},
)


SHAPE = {"hiddenSize": 64, "numHiddenLayers": 2, "numAttentionHeads": 4, "intermediateSize": 128, "vocabSize": 512}
"""Of every model: nothing is placed on GPUs, nor need pods read, where the operator knows it."""
TOO_MUCH = {"the most slots"}
"""KubeRay would make 100 000 pods of it."""


def random_spec(dice: random.Random, name: str) -> Document:
    """A right document of some algorithm, with what makes up to three others special."""
    base = dice.choice(sorted({case.base for case in RIGHT.values()}))
    others = [case.overrides for name, case in RIGHT.items() if case.base == base and name not in TOO_MUCH]
    chosen = dice.sample(others, k=min(dice.randrange(4), len(others)))
    overrides = tuple(each for part in chosen for each in part if not each.startswith("metadata."))
    document: Document = as_kubectl_sends(made(base, overrides))
    document["metadata"] = {"name": name}
    for model in filter(None, document["spec"]["models"].values()):
        model["shape"] = SHAPE
    document["spec"]["runPolicy"] = {**(document["spec"].get("runPolicy") or {}), "restartBackoffSeconds": 0}
    return document


def rubbish_of_rayjob(dice: random.Random) -> Document:
    status: Document = {key: dice.choice(WORDS) for key in ("jobDeploymentStatus", "message", "reason", "jobId")}
    status["jobStatus"] = dice.choice(("", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"))
    status["failed"] = dice.choice((0, 3, 2**31 - 1))
    status["startTime"] = dice.choice(TIMES)
    return status


def rubbish_of_pod(dice: random.Random) -> Document:
    kinds = ("Ready", "PodScheduled", "DisruptionTarget", "example.com/Odd")
    conditions = [
        {
            "type": kind,
            "status": dice.choice(("True", "False", "Unknown")),
            "reason": "Odd",
            "message": dice.choice(WORDS),
        }
        for kind in dice.sample(kinds, k=2)
    ]
    container = {"name": "ray-head", "image": "", "imageID": "", "ready": False, "restartCount": 2**31 - 1}
    return {
        "phase": dice.choice(("Pending", "Running", "Failed", "Succeeded", "Unknown")),
        "reason": dice.choice(WORDS),
        "message": dice.choice(WORDS),
        "podIP": dice.choice(("127.0.0.1", "::1", None)),
        "conditions": conditions,
        "containerStatuses": [{**container, "state": dice.choice(STATES)}],
    }


def rubbish_of_trainer(dice: random.Random) -> Document:
    deep: Any = "deep"
    for _ in range(200):
        deep = [deep]
    values: tuple[Any, ...] = (None, -1, 10**40, "text", [], {}, deep, {"step": -5}, {"phase": "Succeeded"})
    fields = ("attempt", "status", "complete", "exitCode")
    return {field: dice.choice((1, True, 0, *values)) for field in fields}


class Vandal:
    """Writes rubbish into the status of everything that belongs to other jobs than the ordinary one."""

    def __init__(self, server: Cluster, namespace: str, kubelets: Kubelets, seed: int) -> None:
        self._server, self._namespace, self._kubelets = server, namespace, kubelets
        self._dice = random.Random(seed)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.taken: dict[str, int] = {RAYJOBS: 0, PODS: 0}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        kinds: dict[str, Callable[[random.Random], Document]] = {RAYJOBS: rubbish_of_rayjob, PODS: rubbish_of_pod}
        while not self._end.is_set():
            for path, rubbish in kinds.items():
                for each in self._server.items(path.format(self._namespace) + "?limit=40"):
                    self._spoil(path, each["metadata"], rubbish)

    def _spoil(self, path: str, metadata: Document, rubbish: Callable[[random.Random], Document]) -> None:
        job = metadata.get("labels", {}).get("rlhf.hybridflow.io/job-name", "")
        if not job.startswith("fuzz-") or self._end.wait(RUBBISH_EVERY):
            return
        target = f"{path.format(self._namespace)}/{metadata['name']}/status"
        status, _ = self._server.request("PATCH", target, {"status": rubbish(self._dice)})
        self.taken[path] += status < 300
        self._kubelets.trainer(job).document = rubbish_of_trainer(self._dice)


def storm(server: Cluster, namespace: str, folder: Path, count: int) -> None:
    """So many random jobs and rubbish about all of them, and one ordinary job that succeeds."""
    dice = random.Random(SEED)
    specs = [random_spec(dice, f"fuzz-{number}") for number in range(count)]
    with (
        operator(server, namespace, folder, **ROOM_FOR_ALL) as process,
        played(server, namespace) as lives,
    ):
        server.offer_volumes(count)
        lives.apply(small_job("ordinary", namespace))
        lives.jobs.wait_for_pods("ordinary", 1)  # from KubeRay, whom the others keep busy
        with ThreadPoolExecutor(AT_ONCE) as threads:
            path = JOBS.format(namespace)
            codes = list(threads.map(lambda spec: server.request("POST", path, spec)[0], specs))
        assert codes.count(CREATED) > count / 2
        with Vandal(server, namespace, lives.kubelets, SEED) as vandal:
            assert lives.through("ordinary")["attempt"] == 1
            server.until(lambda: min(vandal.taken.values()) >= count // 2, 60, "rubbish has been taken")
            server.until(
                lambda: all(job.get("status", {}).get("phase") for job in server.items(path)),
                60 + count,
                "each job has been looked at",
            )
        process.wait_until_ready()
        assert process.get("/healthz") is not None
        assert "Traceback" not in process.log()


def test_random_specs_and_statuses_stop_nobody(rlhf_server: Cluster, namespace: str, tmp_path: Path) -> None:
    storm(rlhf_server, namespace, tmp_path, 30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_random_specs_and_statuses_stop_nobody(
    rlhf_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    storm(rlhf_server, namespace, tmp_path, 300)
