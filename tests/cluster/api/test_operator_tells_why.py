"""What keeps the pods of a job from being made is said: in a condition, an event and the column REASON."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests.cluster.client import Cluster
from tests.cluster.conftest import fresh_namespace
from tests.cluster.lifecycle import RAYJOBS, SECONDS, Document, Jobs
from tests.cluster.stage import Lives, small_job, stage

LIMITS = {"limits": [{"type": "Container", "max": {"memory": "100Mi"}}]}
HOST = {"runtime": {"controller": {"template": {"spec": {"hostNetwork": True}}}}}
NOBODY = {"runtime": {"serviceAccountName": "nobody"}}
READ = {"models": {"actor": {"uri": "hf://nobody/nothing"}}, **NOBODY}


class Case(NamedTuple):
    """What stands in the way, and how it is told."""

    reason: str
    words: str
    spec: Document = {}  # noqa: RUF012 of a tuple
    there: tuple[str, Document] | None = None
    """Plural and spec of what the namespace has; its labels where there is no plural."""
    condition: str = "ClusterReady"


CASES = {
    "full-quota": Case("QuotaExceeded", "limited: pods=1", {}, ("resourcequotas", {"hard": {"pods": "1"}})),
    "no-service": Case("QuotaExceeded", "services=0", {}, ("resourcequotas", {"hard": {"services": "0"}})),
    "limits": Case("PodsRefused", "maximum memory usage per Container is 100Mi", {}, ("limitranges", LIMITS)),
    "security": Case("PodsRefused", "hostNetwork", HOST, ("", {"pod-security.kubernetes.io/enforce": "restricted"})),
    "account": Case("PodsRefused", 'serviceaccount "nobody" not found', NOBODY),
    "reader": Case("PodsRefused", 'serviceaccount "nobody" not found', READ, condition="Mapped"),
}

ENFORCED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
LATE = {
    "account": ("POST", "/api/v1/namespaces/{}/serviceaccounts", {"metadata": {"name": "nobody"}}),
    "limits": ("DELETE", "/api/v1/namespaces/{}/limitranges/limits", None),
    "security": ("PATCH", "/api/v1/namespaces/{}", ENFORCED),
}
"""Requests by which a platform team mends the namespace of a case: (method, path, body)."""


@contextmanager
def namespaces(server: Cluster, number: int) -> Iterator[list[str]]:
    """So many new ones."""
    made = [fresh_namespace(server) for _ in range(number)]
    yield [next(each) for each in made]
    for each in made:
        next(each, None)


@pytest.fixture(scope="module")
def told(rlhf_server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Jobs]]:
    """A namespace for each case, with a job that is hindered; one operator for all of them."""
    with namespaces(rlhf_server, len(CASES)) as names:
        places = {case: Jobs(rlhf_server, name) for case, name in zip(CASES, names, strict=True)}
        for case, jobs in places.items():
            hinder(jobs, case)
        rlhf_server.offer_volumes(len(CASES))
        folder = tmp_path_factory.mktemp("operator")
        with stage(rlhf_server, names[0], folder, namespaces=names) as (_, process):
            for case, jobs in places.items():
                job = small_job(case, jobs.namespace)
                job["spec"].update(CASES[case].spec)
                jobs.apply(job)
            yield places
            assert "Traceback" not in process.log()


def hinder(jobs: Jobs, case: str) -> None:
    """Puts into the namespace of a case what stands in the way of its job, and waits until it does."""
    if (there := CASES[case].there) is None:
        return
    plural, spec = there
    if not plural:
        jobs.server.expect("PATCH", f"/api/v1/namespaces/{jobs.namespace}", {"metadata": {"labels": spec}})
        return
    path = f"/api/v1/namespaces/{jobs.namespace}/{plural}"
    jobs.server.expect("POST", path, {"metadata": {"name": case}, "spec": spec})
    if plural == "resourcequotas":
        jobs.server.until(
            lambda: jobs.server.expect("GET", f"{path}/{case}")["status"].get("used"), SECONDS, "the quota"
        )


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_in_condition_event_and_column(told: dict[str, Jobs], case: str) -> None:
    jobs, expected = told[case], CASES[case]

    def condition() -> Any:
        found = jobs.condition(case, expected.condition)
        return found if found.get("reason") == expected.reason else {}

    message = jobs.server.until(condition, SECONDS, f"{expected.condition} says {expected.reason}")["message"]
    assert expected.words in message
    assert jobs.status(case)["reason"] == expected.reason
    events = jobs.server.until(
        lambda: [each for each in jobs.events(case) if each["reason"] == expected.reason], SECONDS, "the event"
    )
    assert [(each["type"], each["note"]) for each in events] == [("Warning", message)]
    assert expected.reason in jobs.server.kubectl("get", "rlhf", case, "-n", jobs.namespace, "-o", "wide")


def test_without_kuberay_it_is_said_and_no_pods_are_left(rlhf_server: Cluster, namespace: str, tmp_path: Any) -> None:
    with stage(rlhf_server, namespace, tmp_path) as (lives, _):
        lives.apply(small_job("deleted", namespace))
        lives.train("deleted")
        with rlhf_server.without_kuberay():
            lives.jobs.delete("deleted")
            rlhf_server.until(lambda: not lives.jobs.pods("deleted"), SECONDS, "no pod is left")
            assert rlhf_server.items(RAYJOBS.format(namespace)), "KubeRay has let it go"
            lives.apply(small_job("deleted", namespace), small_job("new", namespace, startupDeadlineSeconds=1))
            conflict = wait_for(lives, "deleted", "Accepted", "NameConflict")
            assert "see whether KubeRay runs" in conflict
            assert "RayJob new-a1" in wait_for(lives, "new", "ClusterReady", "KubeRayAway")
            assert lives.jobs.status("new")["reason"] == "KubeRayAway"
            lives.jobs.patch("new", {"spec": {"runPolicy": {"startupDeadlineSeconds": 600}}})
        assert lives.through("new")["attempt"] == 1
        lives.through("deleted")


def test_the_same_attempt_goes_on_when_the_namespace_is_mended(told: dict[str, Jobs]) -> None:
    """KubeRay tries again after about as long as it has tried so far."""
    for case, (method, path, body) in LATE.items():
        wait_until_told(told[case], case, "ClusterReady", "; the attempt waits until 20")
        told[case].server.expect(method, path.format(told[case].namespace), body)
    for case in LATE:
        told[case].wait_for_pods(case, 1)
        status = told[case].status(case)
        assert (status["attempt"], status["failedAttempts"]) == (1, 0)


def test_a_quota_too_small_for_all_pods_fails_the_job(told: dict[str, Jobs]) -> None:
    status = told["full-quota"].wait_for("full-quota", "Failed")
    assert (status["reason"], len(status["attempts"])) == ("QuotaTooSmall", 1)
    assert "the whole job needs more pods than that" in status["lastFailure"]["message"]


def wait_until_told(jobs: Jobs, job: str, kind: str, words: str) -> None:
    """Until a condition says this."""
    jobs.server.until(lambda: words in jobs.condition(job, kind).get("message", ""), SECONDS, f"{job} says {words}")


def wait_for(lives: Lives, job: str, kind: str, reason: str) -> str:
    """The message of a condition, as soon as it has a reason."""

    def condition() -> Any:
        return found if (found := lives.jobs.condition(job, kind)).get("reason") == reason else {}

    return str(lives.jobs.server.until(condition, SECONDS, f"{kind} of {job} has the reason {reason}")["message"])
