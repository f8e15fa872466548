"""How attempts fail and what follows, with the real API server and KubeRay: many jobs at once with one operator."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from rlhf_api.exit_codes import ExitCode
from rlhf_operator.evidence import CLASSES
from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import Document, Jobs, is_head
from tests.cluster.stage import Lives, small_job, stage

AT_ONCE = 6


class Hands(NamedTuple):
    """What a case does something with."""

    lives: Lives

    @property
    def jobs(self) -> Jobs:
        return self.lives.jobs

    def ends(self, job: str, code: int) -> None:
        """The trainer says that it has failed, and so does Ray."""
        self.lives.kubelets.trainer(job).fails(1, code, "X", f"exit {code}")
        self.ray_fails(job, f"Job entrypoint command failed with exit code {code}")

    def ray_fails(self, job: str, message: str) -> None:
        self.jobs.set_rayjob(job, 1, jobDeploymentStatus="Failed", jobStatus="FAILED", message=message)

    def pod(self, job: str, *, head: bool) -> Document:
        """Of the first attempt."""
        return next(pod for pod in self.jobs.pods(job, 1) if is_head(pod) is head)

    def disrupt(self, job: str, reason: str, *, head: bool = False) -> None:
        """Somebody says why he is about to end a pod."""
        name = self.pod(job, head=head)["metadata"]["name"]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "played"}
        # Without a time the cluster takes it for one that was never carried out, and takes it back.
        condition["lastTransitionTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.jobs.server.set_pod_status(self.jobs.namespace, name, {"conditions": [condition]})

    def take(self, job: str, *, head: bool) -> None:
        """A pod is gone without a trace, and not in the second in which the cluster became whole."""
        time.sleep(1)
        name = self.pod(job, head=head)["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.jobs.namespace}/pods/{name}?gracePeriodSeconds=0"
        self.jobs.server.expect("DELETE", path)

    def end_pod(self, job: str, reason: str, *, head: bool = False) -> None:
        name = self.pod(job, head=head)["metadata"]["name"]
        self.jobs.server.end_pod(self.jobs.namespace, name, 137, reason)


class Case(NamedTuple):
    """A failure: how it comes about, and why it is told to be."""

    reason: str
    happens: Callable[[Hands, str], None]
    policy: Document | None = None
    action: str = ""
    """Empty is the default of the reason."""
    rule: str | None = None
    in_the_end: str = ""
    """Reason of the condition Failed; empty is what follows from the action."""


def exits(code: int) -> Callable[[Hands, str], None]:
    return lambda hands, job: hands.ends(job, code)


def disrupted(reason: str) -> Callable[[Hands, str], None]:
    return lambda hands, job: hands.disrupt(job, reason)


def nothing(_: Hands, __: str) -> None:
    """Time passes."""


def rule(action: str, **match: Any) -> Document:
    return {"failureRules": [{"name": "mine", "action": action, **match}]}


CASES = {
    "user-code": Case("UserCode", exits(ExitCode.USER_CODE)),
    "data": Case("Data", exits(ExitCode.DATA)),
    "spec": Case("Spec", exits(ExitCode.SPEC)),
    "internal": Case("Internal", exits(ExitCode.INTERNAL)),
    "environment": Case("Environment", exits(ExitCode.ENVIRONMENT)),
    "no-program": Case("Environment", lambda hands, job: hands.ray_fails(job, "failed with exit code 127")),
    "oom-told": Case("OutOfMemory", exits(ExitCode.OUT_OF_MEMORY)),
    "oom-killed": Case("OutOfMemory", lambda hands, job: hands.end_pod(job, "OOMKilled", head=True)),
    "numerics": Case("Numerics", exits(ExitCode.NUMERICS)),
    "killed": Case("Unknown", lambda hands, job: hands.ray_fails(job, "failed with exit code 137")),
    "node-lost": Case("NodeLost", disrupted("DeletionByTaintManager")),
    "preempted": Case("Preempted", disrupted("PreemptionByScheduler")),
    "evicted": Case("Evicted", disrupted("EvictionByEvictionAPI")),
    "pressure": Case("Evicted", lambda hands, job: hands.disrupt(job, "TerminationByKubelet", head=True)),
    "head-lost": Case("HeadLost", lambda hands, job: hands.take(job, head=True)),
    "worker-lost": Case("WorkerLost", lambda hands, job: hands.take(job, head=False)),
    "hang": Case("Hang", nothing, {"progressDeadlineSeconds": 3}),
    "slow-start": Case(
        "StartupTimeout", nothing, {"startupDeadlineSeconds": 3, "backoffLimit": 0}, in_the_end="BackoffLimitExceeded"
    ),
    "rule-fail": Case("Internal", exits(1), rule("Fail", reasons=["Internal"]), "Fail", "mine", "FailureRule"),
    "rule-ignore": Case("UserCode", exits(ExitCode.USER_CODE), rule("Ignore", exitCodes=[7]), "Ignore", "mine"),
    "rule-remap": Case("Data", exits(ExitCode.DATA), rule("Remap", messageContains="exit 3"), "Remap", "mine"),
    "rule-of-another": Case("Data", exits(ExitCode.DATA), rule("Ignore", exitCodes=[7]), "Fail"),
    "no-more-tries": Case("Internal", exits(ExitCode.INTERNAL), {"backoffLimit": 0}, in_the_end="BackoffLimitExceeded"),
}  # fmt: skip


@pytest.fixture(scope="module")
def hands(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hands]:
    """One namespace and one operator for all cases."""
    for namespace in fresh_namespace(rlhf_server):
        with stage(rlhf_server, namespace, tmp_path_factory.mktemp("operator")) as (lives, _):
            yield Hands(lives)


@pytest.fixture(scope="module")
def ends(hands: Hands) -> Iterator[dict[str, Future[Document]]]:
    """All cases at once: the status after the failure."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {name: threads.submit(outcome, hands, name, case) for name, case in CASES.items()}


def outcome(hands: Hands, name: str, case: Case) -> Document:
    """One case: the status as soon as what follows the failure has been done."""
    jobs, trainer = hands.jobs, hands.lives.kubelets.trainer(name)
    hands.lives.apply(small_job(name, jobs.namespace, **(case.policy or {})))
    jobs.wait_for_pods(name, 1)
    if case.reason != "StartupTimeout":
        jobs.wait_for(name, "Initializing", "Running")
        jobs.train(name, trainer, step=1)
    case.happens(hands, name)
    return jobs.server.until(
        lambda: status if has_gone_on(status := jobs.status(name)) else {}, 90, f"what follows the failure of {name}"
    )


def has_gone_on(status: Document) -> bool:
    return status.get("phase") == "Failed" or (status.get("attempt", 1) > 1 and bool(status.get("rayJobName")))


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_told_and_followed_as_documented(ends: dict[str, Future[Document]], name: str) -> None:
    case, status = CASES[name], ends[name].result()
    action = case.action or CLASSES[case.reason].action
    failure, first = status["lastFailure"], status["attempts"][0]
    assert (failure["reason"], failure.get("rule"), failure["attempt"]) == (case.reason, case.rule, 1)
    assert failure["message"]
    counted = action != "Ignore"
    assert (first["outcome"], first["reason"], first["counted"]) == ("Failed", case.reason, counted)
    assert status["failedAttempts"] == counted
    last = case.in_the_end or (case.reason if action == "Fail" else "")
    assert [each["reason"] for each in status["conditions"] if each["type"] == "Failed"] == [last][: bool(last)]
    assert (status["phase"] == "Failed") == bool(last)
    assert [each["outcome"] for each in status["attempts"][1:]] == ([] if last else ["Running"])


def test_the_next_attempt_keeps_off_the_node_that_failed_it(hands: Hands) -> None:
    name, jobs = "keeps-off", hands.jobs
    jobs.server.add_node("another")
    hands.lives.apply(small_job(name, jobs.namespace))
    hands.lives.train(name)
    hands.disrupt(name, "DeletionByTaintManager")
    there = {pod["spec"]["nodeName"] for pod in jobs.wait_for_pods(name, 2)}
    bad = jobs.status(name)["attempts"][0]["node"]
    assert there == {"fake0", "another"} - {bad}
    (told,) = (each["note"] for each in jobs.events(name) if each["reason"] == "NodesAvoided")
    assert bad in told
    of_nodes = jobs.server.items("/apis/events.k8s.io/v1/namespaces/default/events")
    about = [each for each in of_nodes if each.get("related", {}).get("name") == name]
    assert [(each["regarding"]["kind"], each["regarding"]["name"]) for each in about] == [("Node", bad)]
    assert f"{jobs.namespace}/{name}" in about[0]["note"]
    jobs.delete(name)
    jobs.server.remove_node("another")


def test_pods_of_a_failed_job_stay_as_long_as_asked(hands: Hands) -> None:
    name, jobs = "kept", hands.jobs
    hands.lives.apply(small_job(name, jobs.namespace, keepPodsOnFailure=True, backoffLimit=0))
    hands.lives.train(name)
    there = {pod["metadata"]["uid"] for pod in jobs.pods(name)}
    hands.lives.fail(name)
    jobs.wait_for(name, "Failed")
    assert jobs.condition(name, "ClusterReady")["reason"] == "Kept"
    assert {pod["metadata"]["uid"] for pod in jobs.pods(name)} == there
    jobs.patch(name, {"spec": {"runPolicy": {"keepPodsOnFailure": False}}})
    hands.lives.wait_until_clear(name)
