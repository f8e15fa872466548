"""The operator with the real API server and the real KubeRay: lives of jobs, and an operator that is killed in them."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import SECONDS, Jobs, Trainer, example, is_head
from tests.cluster.operator_process import OperatorProcess, operator
from tests.cluster.stage import small_job

JOB = "helpful-sft"


@pytest.fixture
def jobs(rlhf_server: Cluster, namespace: str) -> Jobs:
    """With one job, and no operator yet."""
    made = Jobs(rlhf_server, namespace)
    begin(made, JOB)
    return made


def begin(jobs: Jobs, name: str) -> None:
    """Makes a job and a volume for it."""
    made = example(1, jobs.namespace)[0]
    made["metadata"]["name"] = name
    jobs.server.offer_volumes()
    jobs.apply(made)


@pytest.fixture(scope="module")
def operated(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """One namespace and one operator for the tests that leave it in peace."""
    for namespace in fresh_namespace(rlhf_server):
        with operator(rlhf_server, namespace, tmp_path_factory.mktemp("operator")):
            yield Jobs(rlhf_server, namespace)


@pytest.fixture
def job(operated: Jobs) -> Iterator[str]:
    """Name of a new one, deleted afterwards."""
    name = f"job-{secrets.token_hex(2)}"
    begin(operated, name)
    yield name
    operated.delete(name)


@pytest.fixture
def running_operator(rlhf_server: Cluster, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operator(rlhf_server, namespace, tmp_path) as process:
        yield process


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as made:
        yield made


def test_a_job_goes_through_all_phases_to_its_end(operated: Jobs, job: str, trainer: Trainer) -> None:
    operated.provision(job)
    (rayjob,) = operated.rayjobs(job)
    (owner,) = rayjob["metadata"]["ownerReferences"]
    assert owner["uid"] == operated.get(job)["metadata"]["uid"]
    operated.initialize(job, trainer)
    status = operated.train(job, trainer, step=3, checkpoint=2)
    assert status["phase"] == "Running"
    assert status["checkpoint"]["step"] == 2
    (head,) = filter(is_head, operated.pods(job))
    assert status["headPod"] == head["metadata"]["name"]
    final = operated.succeed(job, trainer)
    assert final["progress"]["step"] == 10
    assert final["output"]["uri"].startswith(f"pvc://{job}-output/")
    operated.bury_pods_until_gone(job)
    operated.server.until(lambda: not operated.rayjobs(job), 60, "the RayJob is deleted")
    assert operated.status(job) == final
    metadata = operated.get(job)["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    events = [(each["reason"], each["note"]) for each in operated.events(job)]
    assert {"Mapped", "Provisioning", "Running", "Succeeded"} <= dict(events).keys()
    assert len(events) == len(set(events))


def test_the_status_loses_what_no_longer_holds(operated: Jobs, job: str, trainer: Trainer) -> None:
    operated.provision(job)
    operated.initialize(job, trainer)
    assert "stepSeconds" in operated.train(job, trainer, step=3)["progress"]
    trainer.trains(1, 4)
    del trainer.document["status"]["progress"]["stepSeconds"]
    operated.server.until(lambda: operated.status(job)["progress"]["step"] == 4)
    assert "stepSeconds" not in operated.status(job)["progress"]


def test_a_job_is_predicted_as_one_with_its_models_measured(operated: Jobs, trainer: Trainer) -> None:
    first, second = (f"measured-{secrets.token_hex(2)}" for _ in range(2))
    operated.server.offer_volumes(2)
    operated.apply(small_job(first, operated.namespace))
    operated.provision(first)
    operated.initialize(first, trainer)
    operated.train(first, trainer, step=7)
    seconds = 3 * operated.status(first)["mapping"]["predictedStepSeconds"]
    pace = {"stepSeconds": seconds, "phases": [{"phase": "update", "seconds": seconds}]}
    trainer.trains(1, 8)
    trainer.document["status"]["progress"]["pace"] = pace
    (attempt,) = operated.server.until(
        lambda: [each for each in operated.status(first)["attempts"] if "measured" in each], SECONDS, "it is measured"
    )
    status = operated.status(first)
    assert (attempt["measured"]["step"], status["progress"]["pace"]) == (8, pace)
    assert status["mapping"]["measuredStepSeconds"] == seconds
    operated.apply(small_job(second, operated.namespace))
    operated.wait_for(second, "Provisioning")
    assert operated.status(second)["mapping"]["predictedStepSeconds"] == pytest.approx(seconds)
    for each in (first, second):
        operated.delete(each)
        operated.bury_pods_until_gone(each)


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


def test_a_suspended_job_frees_its_pods_and_goes_on(operated: Jobs, job: str, trainer: Trainer) -> None:
    operated.provision(job)
    operated.initialize(job, trainer)
    operated.train(job, trainer, step=4, checkpoint=4)
    operated.patch(job, {"spec": {"suspend": True}})
    operated.wait_for(job, "Suspending")
    trainer.is_told_to_end(1, step=5)
    operated.bury_pods_until_gone(job)
    suspended = operated.wait_for(job, "Suspended")
    assert not operated.rayjobs(job)
    assert suspended["checkpoint"]["step"] >= 4
    operated.patch(job, {"spec": {"suspend": False}})
    operated.wait_for_pods(job, 2)
    operated.initialize(job, trainer, attempt=2)
    operated.train(job, trainer, step=7, attempt=2)
    final = operated.succeed(job, trainer, attempt=2)
    assert [each["outcome"] for each in final["attempts"]] == ["Suspended", "Succeeded"]
    assert final["failedAttempts"] == 0


def test_sigterm_ends_the_operator_in_order(running_operator: OperatorProcess, jobs: Jobs) -> None:
    jobs.provision(JOB)
    assert running_operator.stop() == 0
    path = f"/apis/coordination.k8s.io/v1/namespaces/{jobs.namespace}/leases/rlhf-operator"
    assert not jobs.server.expect("GET", path)["spec"].get("holderIdentity")
    assert "Traceback" not in running_operator.log()
