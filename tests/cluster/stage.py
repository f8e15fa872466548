"""All that a life needs: an operator, kubelets and trainers that are played, and a witness; with small jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.client import Cluster
from tests.cluster.kubelets import Kubelets
from tests.cluster.lifecycle import SECONDS, Document, Jobs, example
from tests.cluster.operator_process import OperatorProcess, operator
from tests.cluster.witness import witness

SMALL = {"cpu": "10m", "memory": "256Mi"}
ROOM_FOR_ALL: dict[str, Any] = {
    "controller": SMALL,
    "worker": SMALL,
    "sharedMemory": "1Mi",
    "gracePeriodSeconds": 30,
}
"""Settings with which a node takes hundreds of pods."""


def small_job(name: str, namespace: str, **policy: object) -> Document:
    """Two pods, two slots; it is tried again at once."""
    made = example(1, namespace)[0]
    made["metadata"]["name"] = name
    made["spec"]["resources"] = {"device": "CPU", "slotsPerNode": 2}  # the node has GPUs for few jobs
    made["spec"]["runPolicy"] = {"restartBackoffSeconds": 0, **policy}
    return made


class Lives:
    """Jobs that are played, each step by hand."""

    def __init__(self, jobs: Jobs, kubelets: Kubelets) -> None:
        self.jobs, self.kubelets = jobs, kubelets

    def apply(self, *jobs: Document) -> None:
        """With a volume for each."""
        self.jobs.server.offer_volumes(len(jobs))
        self.jobs.apply(*jobs)

    def train(self, name: str, attempt: int = 1) -> None:
        """As soon as its pods run, it makes steps and a checkpoint."""
        trainer = self.kubelets.trainer(name)
        self.jobs.wait_for_pods(name, attempt)
        self.jobs.server.until(lambda: trainer.document.get("attempt") == attempt, SECONDS, f"{name} runs")
        self.jobs.train(name, trainer, 3 * attempt, attempt, checkpoint=2 * attempt)

    def fail(self, name: str, attempt: int = 1) -> None:
        """The trainer ends with exit code 1."""
        self.kubelets.trainer(name).fails(attempt, 1, "Internal", "played")
        self.jobs.set_rayjob(name, attempt, jobDeploymentStatus="Failed", jobStatus="FAILED", message="exit code 1")

    def succeed(self, name: str, attempt: int = 1) -> Document:
        """The final status, with nothing left of what the job ran on."""
        final = self.jobs.succeed(name, self.kubelets.trainer(name), attempt)
        self.wait_until_clear(name)
        return final

    def wait_until_clear(self, name: str) -> None:
        """Neither RayJob nor pod is there."""
        self.jobs.server.until(
            lambda: not self.jobs.rayjobs(name) and not self.jobs.pods(name), SECONDS, f"nothing is left of {name}"
        )

    def through(self, name: str) -> Document:
        """The final status of a life without trouble."""
        self.train(name)
        return self.succeed(name)

    def through_a_failure(self, name: str) -> Document:
        """The final status of a life of two attempts."""
        self.train(name)
        self.fail(name)
        self.train(name, 2)
        return self.succeed(name, 2)


def has_failed_once(final: Document) -> bool:
    """Whether a final status has lost nothing of what was before."""
    outcomes = [(each["outcome"], each.get("reason")) for each in final["attempts"]]
    return (
        outcomes == [("Failed", "Internal"), ("Succeeded", None)]
        and (final["failedAttempts"], final["attempt"], final["progress"]["step"]) == (1, 2, 10)
        and bool(final["lastFailure"]["attempt"] == 1)
    )


@contextmanager
def played(server: Cluster, namespace: str) -> Iterator[Lives]:
    """Kubelets and a witness, but no operator."""
    with witness(server, namespace), Kubelets(server, namespace) as kubelets:
        yield Lives(Jobs(server, namespace), kubelets)


@contextmanager
def stage(
    server: Cluster, namespace: str, folder: Path, user: str | Path = "admin", **settings: Any
) -> Iterator[tuple[Lives, OperatorProcess]]:
    """Everything, for one namespace."""
    with (
        operator(server, namespace, folder, user, **{**ROOM_FOR_ALL, **settings}) as process,
        played(server, namespace) as lives,
    ):
        yield lives, process
