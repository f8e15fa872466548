"""The operator with the real API server and the real KubeRay: lives of jobs, and an operator that is killed in them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.client import Cluster
from tests.cluster.lifecycle import Jobs, Trainer, example, is_head
from tests.cluster.operator_process import OperatorProcess, operator

JOB = "helpful-sft"


@pytest.fixture
def jobs(rlhf_server: Cluster, namespace: str) -> Jobs:
    rlhf_server.offer_volumes()
    made = Jobs(rlhf_server, namespace)
    made.apply(example(1, namespace)[0])
    return made


@pytest.fixture
def running_operator(rlhf_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operator(rlhf_server, namespace, tmp_path) as process:
        yield process


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as made:
        yield made


@pytest.mark.usefixtures("running_operator")
def test_a_job_goes_through_all_phases_to_its_end(jobs: Jobs, trainer: Trainer) -> None:
    jobs.provision(JOB)
    (rayjob,) = jobs.rayjobs(JOB)
    (owner,) = rayjob["metadata"]["ownerReferences"]
    assert owner["uid"] == jobs.get(JOB)["metadata"]["uid"]
    jobs.initialize(JOB, trainer)
    status = jobs.train(JOB, trainer, step=3, checkpoint=2)
    assert status["phase"] == "Running"
    assert status["checkpoint"]["step"] == 2
    (head,) = filter(is_head, jobs.pods(JOB))
    assert status["headPod"] == head["metadata"]["name"]
    final = jobs.succeed(JOB, trainer)
    assert final["progress"]["step"] == 10
    assert final["output"]["uri"].startswith(f"pvc://{JOB}-output/")
    jobs.bury_pods_until_gone(JOB)
    jobs.server.until(lambda: not jobs.rayjobs(JOB), 60, "the RayJob is deleted")
    assert jobs.status(JOB) == final
    job = jobs.get(JOB)
    assert "finalizers" not in job["metadata"]
    assert "annotations" not in job["metadata"]
    events = [(each["reason"], each["note"]) for each in jobs.events(JOB)]
    assert {"Mapped", "Provisioning", "Running", "Succeeded"} <= dict(events).keys()
    assert len(events) == len(set(events))


@pytest.mark.usefixtures("running_operator")
def test_the_status_loses_what_no_longer_holds(jobs: Jobs, trainer: Trainer) -> None:
    jobs.provision(JOB)
    jobs.initialize(JOB, trainer)
    assert "stepSeconds" in jobs.train(JOB, trainer, step=3)["progress"]
    trainer.trains(1, 4)
    del trainer.document["status"]["progress"]["stepSeconds"]
    jobs.server.until(lambda: jobs.status(JOB)["progress"]["step"] == 4)
    assert "stepSeconds" not in jobs.status(JOB)["progress"]


def test_an_operator_that_is_killed_in_every_phase_goes_on(
    jobs: Jobs, trainer: Trainer, running_operator: OperatorProcess
) -> None:
    def kill_and_start() -> None:
        running_operator.kill()
        running_operator.start()

    kill_and_start()
    jobs.provision(JOB)
    kill_and_start()
    jobs.initialize(JOB, trainer)
    kill_and_start()
    jobs.train(JOB, trainer, step=3, checkpoint=2)
    running_operator.kill()
    trainer.succeeds(1)
    jobs.set_rayjob(JOB, 1, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    running_operator.start()
    final = jobs.wait_for(JOB, "Succeeded")
    kill_and_start()
    jobs.bury_pods_until_gone(JOB)
    jobs.server.until(lambda: not jobs.rayjobs(JOB), 60, "the RayJob is deleted")
    assert jobs.status(JOB) == final
    assert final["attempt"] == 1
    assert final["progress"]["step"] == 10


@pytest.mark.usefixtures("running_operator")
def test_a_suspended_job_frees_its_pods_and_goes_on_as_the_next_attempt(jobs: Jobs, trainer: Trainer) -> None:
    jobs.provision(JOB)
    jobs.initialize(JOB, trainer)
    jobs.train(JOB, trainer, step=4, checkpoint=4)
    jobs.patch(JOB, {"spec": {"suspend": True}})
    jobs.wait_for(JOB, "Suspending")
    trainer.is_told_to_end(1, step=5)
    jobs.bury_pods_until_gone(JOB)
    suspended = jobs.wait_for(JOB, "Suspended")
    assert not jobs.rayjobs(JOB)
    assert suspended["checkpoint"]["step"] >= 4
    jobs.patch(JOB, {"spec": {"suspend": False}})
    jobs.wait_for_pods(JOB, 2)
    jobs.initialize(JOB, trainer, attempt=2)
    jobs.train(JOB, trainer, step=7, attempt=2)
    final = jobs.succeed(JOB, trainer, attempt=2)
    assert [each["outcome"] for each in final["attempts"]] == ["Suspended", "Succeeded"]
    assert final["failedAttempts"] == 0


def test_sigterm_ends_the_operator_in_order(running_operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.provision(JOB)
    assert running_operator.stop() == 0
    path = f"/apis/coordination.k8s.io/v1/namespaces/{jobs.namespace}/leases/rlhf-operator"
    assert not jobs.server.expect("GET", path)["spec"].get("holderIdentity")
    assert "Traceback" not in running_operator.log()
