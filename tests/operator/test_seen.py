"""Reading Kubernetes' objects: never an error, whatever stands in them; and what is kept of them is right."""

import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_api.status import Status
from rlhf_operator import names
from rlhf_operator.cluster import seen
from rlhf_operator.cluster.cache import Cache, claims_of, inputs_of
from rlhf_operator.cluster.client import Listing

KEYS = [
    *("metadata", "spec", "status", "labels", "name", "namespace", "uid", "resourceVersion", "creationTimestamp"),
    *("deletionTimestamp", "deletionGracePeriodSeconds", "ownerReferences", "controller", "kind", "conditions", "type"),
    *(
        "containerStatuses",
        "initContainerStatuses",
        "state",
        "lastState",
        "terminated",
        "waiting",
        "running",
        "exitCode",
    ),
    *("reason", "message", "phase", "podIP", "taints", "allocatable", "accessModes", "attempt", "attempts", "progress"),
    *("lastTransitionTime", "terminationGracePeriodSeconds", "models", "uri", "suspend", names.ATTEMPT, names.JOB_NAME),
]
VALUES = [
    *("True", "False", "Ready", "PodScheduled", "Evicted", "job://x", "pvc://c/p", "RayJob", "RLHFJob"),
    "2026-01-31T12:00:00Z",
]
VALUES += ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", "12:00", "²", "-1", "9" * 5000, "Running", "\ud800"]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(VALUES)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=40,
)
objects = st.dictionaries(st.sampled_from(KEYS), anything, max_size=6)


@settings(max_examples=150, deadline=None)
@given(objects)
def test_no_object_is_too_strange_to_be_read(document: dict[str, Any]) -> None:
    seen.job(document)
    seen.rayjob(document, "uid")
    seen.pod(document)
    seen.node(document)
    seen.claim(document, "uid")
    seen.quota(document)
    cache = Cache()
    for kind in ("jobs", "rayjobs", "pods", "nodes", "claims", "quotas"):
        cache.put(kind, document)
        cache.remove(kind, document)


@settings(max_examples=150, deadline=None)
@given(anything)
def test_a_status_that_was_read_can_be_written_and_read_again(document: object) -> None:
    status = seen.status(document)
    assert seen.status(json.loads(json.dumps(status.document()))) == status


def test_a_field_that_cannot_be_read_costs_no_other() -> None:
    document = {"phase": "Running", "attempt": 3, "progress": {"step": "many"}, "unheardOf": 1, "activeSeconds": 2**70}
    assert seen.status(document) == Status(phase="Running", attempt=3)


def pod(**status: Any) -> dict[str, Any]:
    labels = {names.ATTEMPT: "2", names.ROLE: "worker", names.POOL: "all", names.JOB_NAME: "a", names.JOB_UID: "u"}
    metadata = {"namespace": "n", "name": "a-a2-x", "uid": "p", "labels": labels, "resourceVersion": "5"}
    metadata["creationTimestamp"] = "2026-01-31T12:00:00Z"
    return {"metadata": metadata, "spec": {"nodeName": "node", "terminationGracePeriodSeconds": 300}, "status": status}


def test_a_pod_that_is_told_to_end_has_been_so_since_the_beginning_of_its_grace() -> None:
    document = pod(phase="Running")
    document["metadata"] |= {"deletionTimestamp": "2026-01-31T12:10:00Z", "deletionGracePeriodSeconds": 600}
    found = seen.pod(document)
    assert found.deleting_since == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert found.grace_seconds == 600
    assert seen.pod(pod()).grace_seconds == 300


def test_a_pod_tells_why_it_ended() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": "killed"}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-31T12:01:00Z"}
    found = seen.pod(
        pod(
            phase="Failed",
            reason="Evicted",
            podIP="10.0.0.1",
            conditions=[disrupted, unready, {"type": "PodScheduled", "status": "False", "message": "no room"}],
            initContainerStatuses=[{"name": "wait", "state": {"waiting": waiting}, "lastState": {"terminated": ended}}],
            containerStatuses=[{"name": "ray-worker", "ready": False, "state": {"terminated": ended}}],
        )
    )
    assert (found.attempt, found.role, found.pool, found.node, found.ip) == (2, "worker", "all", "node", "10.0.0.1")
    assert (found.reason, found.disruption, found.unschedulable) == ("Evicted", "PreemptionByScheduler", "no room")
    assert found.not_ready_since == datetime(2026, 1, 31, 12, 1, tzinfo=UTC)
    init, worker = found.containers
    assert (init.waiting_reason, init.exit_code) == ("CrashLoopBackOff", 137)
    assert (worker.exit_code, worker.ended_reason, worker.ended_message) == (137, "OOMKilled", "killed")


def test_only_the_controlling_owner_owns_a_rayjob() -> None:
    owners = [{"kind": "RLHFJob", "name": "a", "uid": "u"}]
    document = {"metadata": {"name": "a-a1", "labels": {names.ATTEMPT: "1"}, "ownerReferences": owners}}
    assert not seen.rayjob(document, "u").owned
    document["metadata"]["ownerReferences"] = [{**owners[0], "controller": True}]
    assert seen.rayjob(document, "u").owned
    assert not seen.rayjob(document, "other").owned
    assert not seen.rayjob({}, "").owned


def job(name: str, version: int = 1, uid: str = "", phase: str = "", **models: str) -> dict[str, Any]:
    spec = {"models": {role: {"uri": uri} for role, uri in models.items()}}
    metadata = {"namespace": "n", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase} if phase else {}}


def test_a_job_names_its_inputs_and_claims() -> None:
    spec = job("a", actor="job://x", reward="job://y/model", critic="pvc://c/path")["spec"]
    spec["checkpoint"] = {"storage": "pvc://store"}
    spec["runtime"] = {"env": [{"name": "X", "value": "pvc://nothing/x"}]}
    assert inputs_of(spec) == {"x", "y"}
    assert claims_of("a", spec) == {"c", "store", "a-output"}


def test_a_change_of_a_job_is_news_for_all_that_read_it_even_through_others() -> None:
    cache = Cache()
    cache.put("jobs", job("c", actor="job://b"))
    cache.put("jobs", job("b", actor="job://a"))
    cache.put("jobs", job("other"))
    assert cache.put("jobs", job("a")) == {("n", "a"), ("n", "b"), ("n", "c")}
    assert cache.put("jobs", job("a", 2)) == {("n", "a")}
    assert cache.put("jobs", job("a", 3, phase="Succeeded")) == {("n", "a"), ("n", "b"), ("n", "c")}
    assert cache.put("jobs", job("a", 3, phase="Succeeded")) == set()
    assert cache.remove("jobs", job("a", 4)) == {("n", "a"), ("n", "b"), ("n", "c")}


def test_jobs_that_read_each_other_do_not_hang_the_operator() -> None:
    cache = Cache()
    cache.put("jobs", job("a", actor="job://b"))
    assert cache.put("jobs", job("b", actor="job://a")) == {("n", "a"), ("n", "b")}


def test_an_earlier_version_never_replaces_a_later_one() -> None:
    cache = Cache()
    cache.put("jobs", job("a", 10, phase="Running"))
    assert cache.put("jobs", job("a", 9, phase="Pending")) == set()
    entry = cache.jobs.get(("n", "a"))
    assert entry
    assert entry.value.status.phase == "Running"


def test_what_was_deleted_does_not_come_back_but_its_successor_does() -> None:
    cache = Cache()
    cache.put("jobs", job("a", 10))
    cache.remove("jobs", job("a", 11))
    cache.put("jobs", job("a", 10))
    assert cache.jobs.get(("n", "a")) is None
    cache.put("jobs", job("a", 12, uid="second"))
    cache.remove("jobs", job("a", 13))
    assert cache.jobs.get(("n", "a"))


def test_a_list_removes_what_it_lacks_but_not_what_is_younger() -> None:
    cache = Cache()
    cache.put("pods", pod())
    younger = pod()
    younger["metadata"] |= {"name": "a-a2-y", "uid": "q", "resourceVersion": "30"}
    cache.put("pods", younger)
    assert cache.put_list("pods", Listing(items=(), version=20), cache.keys("pods", None)) == {("n", "a")}
    assert [key for key, _ in cache.pods.under("n", "a")] == [("n", "a-a2-y")]


def test_what_nothing_depends_on_is_no_news() -> None:
    cache = Cache()
    assert cache.put("pods", pod()) == {("n", "a")}
    again = pod()
    again["metadata"] |= {"resourceVersion": "6", "annotations": {"x": "y"}}
    assert cache.put("pods", again) == set()
    node = {"metadata": {"name": "node", "uid": "x", "resourceVersion": "7"}, "status": {"allocatable": {"cpu": "4"}}}
    cache.put("jobs", job("m", 8, phase="Mapping"))
    cache.put("jobs", job("r", 8, phase="Running"))
    assert cache.put("nodes", node) == {("n", "a"), ("n", "m")}
    claim = {"metadata": {"namespace": "n", "name": "r-output", "uid": "k", "resourceVersion": "9"}}
    assert cache.put("claims", claim) == {("n", "r")}
