"""Jobs in a queue of the real Kueue: they wait for their quota, give it back, and lose it to one that matters more."""

from collections.abc import Iterator

import pytest

from rlhf_operator import names
from tests.cluster.build import KUEUE_GROUPS
from tests.cluster.capabilities import api_cannot_run
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace, learn_rlhfjobs, need, need_programs
from tests.cluster.kueue import kueue, make_queue, workload_of
from tests.cluster.launch import cluster
from tests.cluster.lifecycle import PODS, SECONDS, Document
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.provisioning import answer, learn_requests, make_check, request_of
from tests.cluster.stage import Lives, small_job, stage

GROWS = {"name": "grows", "matchLabels": {"pool": "grows"}, "max": 1, "cpu": "1"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """One of its own: every RayJob passes through Kueue's webhooks."""
    need(api_cannot_run())
    need_programs(KUEUE_GROUPS)
    with cluster("api") as running:
        learn_requests(running)
        with kueue(running):
            learn_rlhfjobs(running)
            yield running


@pytest.fixture(scope="module")
def played(server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lives, OperatorProcess]]:
    """One namespace and one operator for all tests of this file."""
    for namespace in fresh_namespace(server):
        with stage(server, namespace, tmp_path_factory.mktemp("operator"), nodeGroups=[GROWS]) as (lives, process):
            yield lives, process
            assert "Traceback" not in process.log()


@pytest.fixture
def lives(played: tuple[Lives, OperatorProcess]) -> Lives:
    return played[0]


@pytest.fixture
def queue(lives: Lives, request: pytest.FixtureRequest) -> str:
    """With room for one job."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:40].strip("-")
    return make_queue(lives.jobs.server, lives.jobs.namespace, name)


def queued_job(lives: Lives, name: str, queue: str, priority: str = "low") -> Document:
    job = small_job(name, lives.jobs.namespace)
    job["metadata"]["labels"] = {names.QUEUE: queue, names.QUEUE_PRIORITY: priority}
    return job


def unplaceable_job(lives: Lives, name: str, queue: str, **policy: object) -> Document:
    """Kueue has room for its worker, and no node has."""
    job = queued_job(lives, name, queue)
    job["spec"]["runtime"] = {"worker": {"cpu": "1000"}}
    job["spec"]["runPolicy"].update(policy)
    return job


def wait_for_head(lives: Lives, name: str) -> str:
    """The head pod, as soon as the status names it."""
    jobs = lives.jobs
    jobs.wait_for(name, "Provisioning")
    return jobs.server.until(lambda: str(jobs.status(name).get("headPod", "")), SECONDS, f"the head of {name} is seen")


def wait_until_queued(lives: Lives, name: str) -> Document:
    """The status, as soon as Kueue has told why the job has to wait."""

    def waiting() -> Document:
        status, told = lives.jobs.status(name), lives.jobs.condition(name, "QuotaReserved").get("message", "")
        return status if status.get("phase") == "Queued" and "insufficient unused quota" in told else {}

    status = lives.jobs.server.until(waiting, SECONDS, f"{name} is told that there is no room")
    condition = lives.jobs.condition(name, "QuotaReserved")
    assert (condition["status"], condition["reason"]) == ("False", "Pending")
    assert not lives.jobs.pods(name)
    (rayjob,) = lives.jobs.rayjobs(name)
    assert rayjob["spec"]["suspend"] is True
    return status


def wait_until_out_of_the_queue(lives: Lives, rayjob: str) -> None:
    server, namespace = lives.jobs.server, lives.jobs.namespace
    server.until(lambda: not workload_of(server, namespace, rayjob), SECONDS, f"{rayjob} is in no queue")


def column(lives: Lives, name: str, title: str) -> str:
    """What kubectl shows of a job."""
    arguments = ("get", "rlhfjob", name, "--namespace", lives.jobs.namespace, "--output", "wide")
    head, row = lives.jobs.server.kubectl(*arguments).splitlines()
    return row[head.index(title) :].split()[0]


def test_a_job_waits_until_the_one_before_it_has_succeeded(lives: Lives, queue: str) -> None:
    lives.apply(queued_job(lives, "first", queue))
    lives.train("first")
    assert lives.jobs.condition("first", "QuotaReserved")["status"] == "True"
    lives.apply(queued_job(lives, "second", queue))
    assert wait_until_queued(lives, "second")["queue"] == queue
    assert (column(lives, "second", "PHASE"), column(lives, "second", "QUEUE")) == ("Queued", queue)
    lives.succeed("first")
    final = lives.through("second")
    assert [(each["attempt"], each["outcome"]) for each in final["attempts"]] == [(1, "Succeeded")]
    wait_until_out_of_the_queue(lives, "second-a1")


def test_a_suspended_job_leaves_the_queue(lives: Lives, queue: str) -> None:
    lives.apply(queued_job(lives, "running", queue))
    lives.train("running")
    for name in ("asleep", "next"):
        lives.apply(queued_job(lives, name, queue))
        wait_until_queued(lives, name)
    lives.jobs.patch("asleep", {"spec": {"suspend": True}})
    lives.jobs.wait_for("asleep", "Suspended")
    wait_until_out_of_the_queue(lives, "asleep-a1")
    lives.succeed("running")
    lives.through("next")
    assert (lives.jobs.phase("asleep"), lives.jobs.rayjobs("asleep")) == ("Suspended", [])
    lives.jobs.patch("asleep", {"spec": {"suspend": False}})
    lives.train("asleep", 2)
    final = lives.succeed("asleep", 2)
    assert [each["outcome"] for each in final["attempts"]] == ["Suspended", "Succeeded"]


def test_a_preempted_job_goes_on_when_there_is_room_again(lives: Lives, queue: str) -> None:
    lives.apply(queued_job(lives, "minor", queue))
    lives.train("minor")
    lives.apply(queued_job(lives, "major", queue, "high"))
    lives.train("major")
    wait_until_queued(lives, "minor")
    status = lives.jobs.status("minor")
    preempted, waiting = status["attempts"]
    assert (preempted["outcome"], preempted["reason"], preempted["counted"]) == ("Failed", "Preempted", False)
    assert "Kueue took the quota away: Preempted to accommodate a workload" in preempted["message"]
    assert (waiting["attempt"], waiting["outcome"], status["failedAttempts"]) == (2, "Running", 0)
    lives.succeed("major")
    lives.train("minor", 2)
    final = lives.succeed("minor", 2)
    assert [each["outcome"] for each in final["attempts"]] == ["Failed", "Succeeded"]
    assert (final["failedAttempts"], final["lastFailure"]["reason"]) == (0, "Preempted")


def test_a_queue_takes_back_what_another_has_borrowed(lives: Lives) -> None:
    server, namespace = lives.jobs.server, lives.jobs.namespace
    ours, theirs = (make_queue(server, namespace, name, cohort="teams") for name in ("ours", "theirs"))
    for name in ("own", "borrows"):
        lives.apply(queued_job(lives, name, ours))
        lives.train(name)
    lives.apply(queued_job(lives, "later", ours))
    wait_until_queued(lives, "later")
    lives.apply(queued_job(lives, "owner", theirs))
    lives.train("owner")
    taken = next(name for name in ("own", "borrows") if len(lives.jobs.status(name)["attempts"]) == 2)
    wait_until_queued(lives, taken)
    finals = [lives.succeed("owner")]
    lives.train("later")  # its RayJob is older than that of the second attempt
    finals.append(lives.succeed("later"))
    lives.train(taken, 2)
    finals += [lives.succeed(taken, 2), lives.succeed("borrows" if taken == "own" else "own")]
    assert [each["failedAttempts"] for each in finals] == [0, 0, 0, 0]


def test_a_job_preempted_early_waits_for_its_old_pods(lives: Lives, queue: str) -> None:
    lives.apply(unplaceable_job(lives, "partial", queue))
    path = f"{PODS.format(lives.jobs.namespace)}/{wait_for_head(lives, 'partial')}"
    lives.jobs.server.expect("PATCH", path, {"metadata": {"finalizers": ["test.invalid/slow-to-end"]}})
    lives.apply(queued_job(lives, "urgent", queue, "high"))
    lives.train("urgent")
    lives.jobs.wait_for("partial", "Queued")
    lives.jobs.server.until(
        lambda: lives.jobs.condition("partial", "QuotaReserved")["reason"] == "Preempted", SECONDS, "it says why"
    )
    lives.succeed("urgent")
    lives.jobs.server.until(
        lambda: "earlier admission" in lives.jobs.condition("partial", "QuotaReserved")["message"],
        SECONDS,
        "it is admitted beside its old head",
    )
    lives.jobs.server.until(lambda: len(lives.jobs.pods("partial", 1)) == 3, SECONDS, "it has its new pods")
    lives.jobs.server.expect("PATCH", path, {"metadata": {"finalizers": None}})
    status = lives.jobs.wait_for("partial", "Provisioning", "Restarting")
    assert (status["phase"], status["attempt"], status["failedAttempts"]) == ("Provisioning", 1, 0)


def test_a_job_that_fails_early_is_not_taken_for_waiting(played: tuple[Lives, OperatorProcess], queue: str) -> None:
    lives, process = played
    lives.apply(unplaceable_job(lives, "never-whole", queue, backoffLimit=0))
    wait_for_head(lives, "never-whole")
    process.kill()
    lives.jobs.set_rayjob("never-whole", 1, jobDeploymentStatus="Failed", jobStatus="FAILED", message="exit code 1")

    def kueue_has_finished() -> bool:
        workload = workload_of(lives.jobs.server, lives.jobs.namespace, "never-whole-a1")
        conditions = {each["type"]: each["status"] for each in workload["status"]["conditions"]}
        return (conditions.get("Finished"), conditions["QuotaReserved"]) == ("True", "False")

    lives.jobs.server.until(kueue_has_finished, SECONDS, "Kueue has taken the quota back")
    process.start()
    status = lives.jobs.wait_for("never-whole", "Failed", "Queued")
    assert (status["phase"], status["attempts"][0]["outcome"]) == ("Failed", "Failed")


def test_nodes_are_asked_for_before_pods_are_made(lives: Lives) -> None:
    server, namespace = lives.jobs.server, lives.jobs.namespace
    queue = make_queue(server, namespace, "nodes-first", make_check(server))
    job = queued_job(lives, "provisioned", queue)
    template = {"spec": {"nodeSelector": {"pool": "grows"}}}
    job["spec"]["runtime"] = {"worker": {"cpu": "1", "template": template}}
    lives.apply(job)
    request = request_of(server, namespace)

    def told() -> Document:
        found = lives.jobs.condition("provisioned", "QuotaReserved")
        return found if "admission check nodes-first is pending" in found.get("message", "") else {}

    condition = server.until(told, SECONDS, "the job says what it waits for")
    assert (condition["status"], lives.jobs.phase("provisioned")) == ("False", "Queued")
    assert not lives.jobs.pods("provisioned")
    server.add_node("grows-0", {"cpu": "1"}, {"pool": "grows"})
    try:
        answer(server, request)
        final = lives.through("provisioned")
    finally:
        server.remove_node("grows-0")
    assert [each["outcome"] for each in final["attempts"]] == ["Succeeded"]
