"""Reading Kubernetes' objects: never an error, whatever stands in them; and what is kept of them is right."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_api.status import Status
from rlhf_operator import names
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.cache import Cache, Key, KindName
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.snapshot import ObservedJob, ObservedQuota, claims_named, inputs_of
from tests.each import each_case

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
    *("nodeName", "containers", "initContainers", "resources", "requests", "memory", "nvidia.com/gpu", "overhead"),
    *("lastTransitionTime", "terminationGracePeriodSeconds", "models", "uri", "suspend", names.ATTEMPT, names.JOB_NAME),
]
VALUES = [
    *("True", "False", "Ready", "PodScheduled", "Evicted", "job://x", "pvc://c/p", "RayJob", "RLHFJob"),
    "2026-01-31T12:00:00Z",
]
VALUES += ["1", "2Gi", "1e999"]
VALUES += ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", "12:00", "²", "-1", "9" * 5000, "Running", "\ud800"]
CONDITION = {"status": "True"}
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(VALUES)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=40,
)
objects = st.dictionaries(st.sampled_from(KEYS), anything, max_size=6)


@settings(max_examples=60, deadline=None)
@given(objects)
def test_no_object_is_too_strange_to_be_read(document: dict[str, Any]) -> None:
    parse.job(document)
    parse.parse_rayjob(document, "uid")
    parse.pod(document)
    parse.pod(parse.slim_pod(document))
    parse.node(document)
    parse.quota(document)
    cache = Cache()
    for kind in ("jobs", "rayjobs", "pods", "nodes", "claims", "quotas", "priorities"):
        cache.put(kind, document)
        cache.remove(kind, document)


@settings(max_examples=60, deadline=None)
@given(anything)
def test_a_status_that_was_read_can_be_written_and_read_again(document: object) -> None:
    status = parse.status(document)
    assert parse.status(json.loads(json.dumps(status.document()))) == status


def test_a_field_that_cannot_be_read_costs_no_other() -> None:
    document = {"phase": "Running", "attempt": 3, "progress": {"step": "many"}, "unheardOf": 1, "activeSeconds": 2**70}
    assert parse.status(document) == Status(phase="Running", attempt=3)


def pod(**status: Any) -> dict[str, Any]:
    labels = {names.ATTEMPT: "2", names.ROLE: "worker", names.JOB_NAME: "a", names.JOB_UID: "u"}
    metadata = {"namespace": "n", "name": "a-a2-x", "uid": "p", "labels": labels, "resourceVersion": "5"}
    metadata["creationTimestamp"] = "2026-01-31T12:00:00Z"
    return {"metadata": metadata, "spec": {"nodeName": "node", "terminationGracePeriodSeconds": 300}, "status": status}


def test_a_pod_told_to_end_ends_since_its_grace_began() -> None:
    document = pod(phase="Running")
    document["metadata"] |= {"deletionTimestamp": "2026-01-31T12:10:00Z", "deletionGracePeriodSeconds": 600}
    found = parse.pod(document)
    assert found.deleting_since == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert found.grace_seconds == 600
    assert parse.pod(pod()).grace_seconds == 300


def test_a_pod_tells_why_it_ended() -> None:
    ended = {"exitCode": 137, "reason": "OOMKilled"}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-31T12:01:00Z"}
    found = parse.pod(
        pod(
            phase="Failed",
            reason="Evicted",
            podIP="10.0.0.1",
            conditions=[disrupted, unready, {"type": "PodScheduled", "status": "False", "message": "no room"}],
            initContainerStatuses=[{"name": "wait", "state": {"waiting": waiting}, "lastState": {"terminated": ended}}],
            containerStatuses=[{"name": "ray-worker", "ready": False, "state": {"terminated": ended}}],
        )
    )
    assert (found.attempt, found.role, found.node, found.ip) == (2, "worker", "node", "10.0.0.1")
    assert (found.reason, found.disruption, found.unschedulable) == ("Evicted", "PreemptionByScheduler", "no room")
    assert found.not_ready_since == datetime(2026, 1, 31, 12, 1, tzinfo=UTC)
    init, worker = found.containers
    assert (init.waiting_reason, init.exit_code) == ("CrashLoopBackOff", 137)
    assert (worker.exit_code, worker.ended_reason) == (137, "OOMKilled")


@pytest.mark.parametrize(("reason", "silent"), [({}, True), ({"reason": "ContainersNotReady"}, False)])
def test_a_kubelet_gives_a_reason_the_control_plane_none(reason: dict[str, str], silent: bool) -> None:
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-31T12:01:00Z", **reason}
    since = datetime(2026, 1, 31, 12, 1, tzinfo=UTC)
    assert parse.pod(pod(phase="Running", conditions=[unready])).silent_since == (since if silent else None)
    assert parse.pod(pod(phase="Failed", conditions=[unready])).silent_since is None
    node = parse.node({"metadata": {"name": "n"}, "status": {"conditions": [unready]}})
    assert (node.ready, node.not_ready_since) == (False, since)


@each_case(
    ("role", "reason", "kept"),
    [
        (names.READER, "Completed", "m" * 4096),
        (names.WORKER, "Completed", ""),
        (names.SANDBOX, "Error", ""),  # code of the model may have written them
        (names.SANDBOX, "StartError", "m" * 4096),
    ],
)
def test_last_words_are_kept_unless_others_may_write_them(role: str, reason: str, kept: str) -> None:
    ended = {"exitCode": 0, "reason": reason, "message": "m" * 5000}
    document = pod(phase="Succeeded", containerStatuses=[{"name": "main", "state": {"terminated": ended}}])
    document["metadata"]["labels"][names.ROLE] = role
    (container,) = parse.pod(document).containers
    assert container.last_words == kept


def test_only_the_controlling_owner_owns_a_rayjob() -> None:
    owners = [{"kind": "RLHFJob", "name": "a", "uid": "u"}]
    document = {"metadata": {"name": "a-a1", "labels": {names.ATTEMPT: "1"}, "ownerReferences": owners}}
    assert not parse.parse_rayjob(document, "u").owned
    document["metadata"]["ownerReferences"] = [{**owners[0], "controller": True}]
    assert parse.parse_rayjob(document, "u").owned
    assert not parse.parse_rayjob(document, "other").owned
    assert not parse.parse_rayjob({}, "").owned


@each_case(
    ("told", "reserved", "evicted", "message"),
    [
        ({}, False, "", ""),
        ({"QuotaReserved": ("False", "Pending")}, False, "", "QuotaReserved says Pending"),
        ({"QuotaReserved": ("True", "QuotaReserved")}, True, "", "QuotaReserved says QuotaReserved"),
        (
            {"QuotaReserved": ("True", "QuotaReserved"), "Evicted": ("True", "Preempted")},
            True,
            "Preempted",
            "Evicted says Preempted",
        ),
        (
            {"QuotaReserved": ("False", "Pending"), "Evicted": ("True", "Preempted")},
            False,
            "Preempted",
            "Evicted says Preempted",
        ),
        (
            {"QuotaReserved": ("True", "QuotaReserved"), "Evicted": ("False", "QuotaReserved")},
            True,
            "",
            "QuotaReserved says QuotaReserved",
        ),
        ({"Finished": ("True", "Failed")}, True, "", ""),
        (
            {"QuotaReserved": ("False", "Finished"), "Finished": ("True", "Failed")},
            True,
            "",
            "QuotaReserved says Finished",
        ),
        ({"QuotaReserved": ("False", "Pending"), "Finished": ("False", "x")}, False, "", "QuotaReserved says Pending"),
    ],
)
def test_a_quota_is_held_until_kueue_has_it_back(
    told: dict[str, tuple[str, str]], reserved: bool, evicted: str, message: str
) -> None:
    found = [
        {"type": kind, "status": status, "reason": why, "message": f"{kind} says {why}"}
        for kind, (status, why) in told.items()
    ]
    assert parse.quota({"status": {"conditions": found}}) == ObservedQuota(
        reserved=reserved, evicted=evicted, message=message
    )


def job(name: str, version: int = 1, uid: str = "", phase: str = "", **models: str) -> dict[str, Any]:
    spec = {"models": {role: {"uri": uri} for role, uri in models.items()}}
    metadata = {"namespace": "n", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase} if phase else {}}


def test_a_job_names_its_inputs_and_claims() -> None:
    spec = job("a", actor="job://x", reward="job://y", critic="pvc://c/path")["spec"]
    spec["data"] = {"train": {"mix": [{"uri": "job://d"}]}, "pretrain": {"uri": "job://p"}}
    spec["evaluation"] = {"data": {"sets": [{"uri": "job://e"}]}}
    spec["checkpoint"] = {"storage": "pvc://store"}
    arguments = {"table": "pvc://answers/t.json", "teacher": "job://z"}
    spec["models"]["reward"]["sum"] = [{"reward": {"entrypoint": "m:f", "arguments": arguments}}]
    spec["runtime"] = {"env": [{"name": "X", "value": "pvc://nothing/x"}]}
    assert inputs_of(spec) == {"x", "y", "d", "p", "e"}
    assert claims_named(spec) == {"c", "store"}


def test_a_change_of_a_job_is_news_for_all_its_readers() -> None:
    cache = Cache()
    cache.put("jobs", job("c", actor="job://b"))
    cache.put("jobs", job("b", actor="job://a"))
    cache.put("jobs", job("other", phase="Running"))
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


def test_what_was_deleted_stays_away_but_its_successor() -> None:
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
    assert [key for key, _ in cache.pods.find("n", "a")] == [("n", "a-a2-y")]


@each_case(
    ("document", "size"),
    [
        ({"status": {"capacity": {"storage": "2Gi"}}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}, "2Gi"),
        ({"spec": {"resources": {"requests": {"storage": "1Gi"}}}}, "1Gi"),
        ({"status": {"capacity": {"storage": "much"}}}, ""),
        ({}, ""),
    ],
)
def test_a_claim_has_what_it_was_given_or_asks_for(document: dict[str, Any], size: str) -> None:
    assert parse.claim({"metadata": {"name": "c"}, **document}).size == size


@pytest.mark.parametrize(
    ("kind", "name", "idle", "news"),
    [
        ("claims", "a-output", {"phase": "Bound"}, None),
        ("rayjobs", "a-a1", {"jobId": "a-a1", "reason": "AppFailed"}, {"jobStatus": "FAILED"}),
        ("quotas", "a-a1", CONDITION | {"type": "Admitted"}, CONDITION | {"type": "QuotaReserved"}),
    ],
)
def test_what_nobody_reads_is_no_news(
    kind: KindName, name: str, idle: dict[str, Any], news: dict[str, Any] | None
) -> None:
    cache = Cache()
    cache.put("jobs", job("a"))
    labels = {names.JOB_NAME: "a", names.ATTEMPT: "1"}
    owner = {"kind": "RayJob", "name": "a-a1", "uid": "r", "controller": True}
    metadata = {"namespace": "n", "name": name, "uid": "x", "labels": labels, "ownerReferences": [owner]}

    def put(kind: KindName, version: int, status: dict[str, Any]) -> set[Key]:
        whole = {"conditions": [status]} if "type" in status else status
        return cache.put(kind, {"metadata": {**metadata, "resourceVersion": str(version)}, "status": whole})

    put("rayjobs", 1, {})
    put(kind, 2, {})
    assert put(kind, 3, idle) == set()
    assert news is None or put(kind, 4, news) == {("n", "a")}


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


def test_a_claim_that_outlives_its_job_says_whose_it_was() -> None:
    def seen(**metadata: Any) -> tuple[bool, str]:
        cache = Cache()
        cache.put(
            "claims",
            {"metadata": {"namespace": "n", "name": "a-output", "uid": "k", "resourceVersion": "9", **metadata}},
        )
        (claim,) = (entry.value for _, entry in cache.claims)
        return claim.owned, claim.kept_for

    labels = {names.MANAGED_BY: names.OPERATOR, names.JOB_NAME: "a"}
    assert seen(labels=labels) == (False, "a")
    assert seen(labels=labels, ownerReferences=[{"kind": "RLHFJob", "uid": "older"}]) == (False, "")
    consumer = {"kind": "RLHFJob", "name": "b", "uid": "another"}
    assert seen(labels=labels, ownerReferences=[consumer]) == (False, "")
    assert seen(labels=labels, deletionTimestamp="2026-01-31T12:00:00Z") == (False, "")
    assert seen(labels={names.JOB_NAME: "a"}) == (False, "")


def test_a_claim_belongs_to_the_job_that_writes_to_it() -> None:
    owners = [{"kind": "RLHFJob", "name": name, "uid": f"uid of {name}"} for name in ("b", "a")]
    metadata = {"namespace": "n", "name": "a-output", "uid": "k", "resourceVersion": "9", "ownerReferences": owners}
    cache = Cache()
    cache.put("claims", {"metadata": metadata})
    assert [entry.owner for _, entry in cache.claims] == ["uid of a"]


def test_a_claim_says_its_maker_and_its_size() -> None:
    labels = {names.JOB_UID: "of a job"}
    claim = {"metadata": {"labels": labels}, "status": {"capacity": {"storage": "5Gi"}}}
    assert (parse.claim(claim).maker, parse.claim(claim).size) == ("of a job", "5Gi")
    nominal = {"labels": labels, "annotations": {names.SIZE_IS_NOMINAL: "true"}}
    assert parse.claim({**claim, "metadata": nominal}).size == ""


def holding(name: str, version: int, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    """A pod of somebody else on a node."""
    metadata = {"namespace": "x", "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"nodeName": "node", **spec}, "status": {"phase": phase}}


def container(gpu: str = "0", **requests: str) -> dict[str, Any]:
    return {"resources": {"requests": {"nvidia.com/gpu": gpu, **requests}}}


def test_a_pod_holds_its_containers_sum_or_an_earlier_one() -> None:
    before = [container(memory="9Gi"), {**container(memory="1Gi"), "restartPolicy": "Always"}]
    document = holding(
        "a",
        1,
        containers=[container(gpu="2", memory="4Gi", cpu="8"), container(gpu="1", memory="1.5Gi")],
        initContainers=before,
        overhead={"memory": "1Mi"},
    )
    assert parse.pod(document).requests == {"nvidia.com/gpu": 3, "memory": 9 * 2**30 + 2**20, "cpu": 8000}
    document["spec"]["initContainers"] = before[::-1]  # the sidecar runs beside the container after it
    assert parse.pod(document).requests == {"nvidia.com/gpu": 3, "memory": 10 * 2**30 + 2**20, "cpu": 8000}
    document["spec"]["initContainers"] = before[1:]
    assert parse.pod(document).requests == {"nvidia.com/gpu": 3, "memory": 6.5 * 2**30 + 2**20, "cpu": 8000}
    document["status"]["phase"] = "Succeeded"
    assert parse.pod(document).requests == {}


def test_what_all_pods_of_a_node_hold_is_known() -> None:
    cache = Cache()
    two = [container(gpu="2", memory="1Gi")]
    assert cache.put("pods", holding("a", 1, containers=two)) == set()
    cache.put("pods", holding("b", 2, containers=two))
    assert cache.pods.requested == {"node": {"nvidia.com/gpu": 4, "memory": 2**31}}
    cache.put("pods", holding("a", 3, phase="Failed", containers=two))
    assert cache.pods.requested == {"node": {"nvidia.com/gpu": 2, "memory": 2**30}}
    cache.remove("pods", holding("b", 4, containers=two))
    cache.put("pods", holding("waits", 5, containers=two, nodeName=None))
    assert cache.pods.requested == {}
    cache.put("pods", holding("c", 6, containers=two))
    cache.put_list("pods", Listing(items=(), version=7), cache.keys("pods", None))
    assert cache.pods.requested == {}


def test_of_a_pod_that_is_of_no_job_little_is_kept() -> None:
    containers = [{"name": "x", "image": "y", "env": [{"name": "Z", "value": "secret"}], **container(gpu="2")}]
    document = holding("a", 1, containers=containers, volumes=[{"name": "data"}])
    document["status"] |= {"podIP": "10.0.0.1", "containerStatuses": [{"name": "x", "state": {"running": {}}}]}
    slim = parse.slim_pod(document)
    assert parse.slim_pod(slim) == slim
    assert not {"secret", "data", "10.0.0.1"} & set(json.dumps(slim).replace('"', " ").split())
    assert parse.pod(slim).requests == parse.pod(document).requests == {"nvidia.com/gpu": 2}
    assert (parse.pod(slim).node, parse.pod(slim).phase) == ("node", "Running")
    document["metadata"]["labels"] = {names.JOB_NAME: "j"}
    assert parse.slim_pod(document) is document


def test_a_pods_end_is_explained_after_kuberay_took_it() -> None:
    cache, labels = Cache(), {names.JOB_NAME: "j", names.JOB_UID: "u", names.ATTEMPT: "2"}

    def job(attempt: int, version: int, uid: str = "u") -> ObservedJob:
        metadata = {"namespace": "n", "name": "j", "uid": uid, "resourceVersion": str(version)}
        cache.put("jobs", {"metadata": metadata, "status": {"attempt": attempt}})
        entry = cache.jobs.get(("n", "j"))
        assert entry is not None
        return entry.value

    job(2, 1)
    killed = {"name": names.WORKER_CONTAINER, "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}

    def pod(name: str, version: int, **status: object) -> dict[str, object]:
        metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": str(version), "labels": labels}
        return {"metadata": metadata, "status": status}

    for name in ("victim", "healthy"):
        cache.put("pods", pod(name, 1, phase="Running"))
    cache.put("pods", pod("victim", 2, phase="Failed", containerStatuses=[killed]))
    cache.remove("pods", pod("healthy", 3))
    cache.put_list("pods", Listing(items=(), version=4), cache.keys("pods", None))
    (fallen,) = cache.lost_pods(job(2, 5))
    assert (fallen.name, fallen.containers[0].ended_reason) == ("victim", "OOMKilled")
    assert cache.lost_pods(job(3, 6)) == ()
    labels[names.ATTEMPT] = "3"
    for name, version in (("later", 7), ("too-late", 9)):
        cache.put("pods", pod(name, version, phase="Failed", reason="Evicted"))
        cache.remove("pods", pod(name, version + 1))
    assert [each.name for each in cache.lost_pods(job(3, 11))] == ["later", "too-late"]


def test_dead_pods_of_a_deleted_job_say_nothing_of_the_next() -> None:
    cache = Cache()
    owner = {"namespace": "n", "name": "j", "uid": "old", "resourceVersion": "1"}
    cache.put("jobs", {"metadata": owner, "status": {"attempt": 1}})
    labels = {names.JOB_NAME: "j", names.JOB_UID: "old", names.ATTEMPT: "1"}
    old = cache.jobs.get(("n", "j"))
    assert old is not None
    for name, is_told in (("before", 1), ("after", 0)):
        metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": "2", "labels": labels}
        pod = {"metadata": metadata, "status": {"phase": "Failed", "reason": "Evicted"}}
        cache.put("pods", pod)
        cache.remove("pods", pod)
        assert len(cache.lost_pods(old.value)) == is_told
        cache.remove("jobs", {"metadata": {**owner, "resourceVersion": "3"}})
        assert cache.lost_pods(old.value) == ()
    cache.put("jobs", {"metadata": {**owner, "uid": "new", "resourceVersion": "9"}, "status": {"attempt": 1}})
    job = cache.jobs.get(("n", "j"))
    assert job is not None
    assert cache.lost_pods(job.value) == ()


def of_owners(spec: dict[str, Any], *owners: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    managed = [{"operation": operation, "fieldsV1": {"f:spec": fields}} for operation, fields in owners]
    return parse.job({"metadata": {"managedFields": managed}, "spec": spec}).lost_fields


def test_a_field_with_an_owner_that_is_gone_is_lost() -> None:
    defaults: dict[str, Any] = {"f:hostNetwork": {}, "f:tolerations": {}, "f:nodeSelector": {}}
    chosen: dict[str, Any] = {"f:nodeSelector": {".": {}, "f:pool": {}}, "f:topologyKey": {}, "f:image": {}}
    assert of_owners({"runtime": {}}, ("Update", {"f:runtime": defaults})) == ()
    assert of_owners({"runtime": {"image": "a"}}, ("Update", {"f:runtime": chosen})) == (
        "spec.runtime.nodeSelector",
        "spec.runtime.topologyKey",
    )
    applied = of_owners({"runtime": {}}, ("Apply", {"f:runtime": {"f:tolerations": {}}}))
    assert applied == ("spec.runtime.tolerations",)


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ({"tolerations": [{"operator": "Exists"}], "hostNetwork": True}, ("hostNetwork", "tolerations")),
        ({"tolerations": [], "hostNetwork": False, "nodeSelector": {}}, ()),
        ({}, ()),
    ],
)
def test_what_kubectl_has_applied_tells_a_value_from_a_default(written: dict[str, Any], lost: tuple[str, ...]) -> None:
    owned: dict[str, Any] = {"f:hostNetwork": {}, "f:tolerations": {}, "f:nodeSelector": {}}
    managed = [{"operation": "Update", "fieldsV1": {"f:spec": {"f:runtime": owned}}}]
    applied = {parse.LAST_APPLIED: json.dumps({"spec": {"runtime": written}})}
    document = {"metadata": {"managedFields": managed, "annotations": applied}, "spec": {"runtime": {}}}
    assert parse.job(document).lost_fields == tuple(f"spec.runtime.{field}" for field in lost)
    document["metadata"] = {"managedFields": managed, "annotations": {parse.LAST_APPLIED: "["}}
    assert parse.job(document).lost_fields == ()


def test_a_lost_field_of_a_list_is_told_with_the_entrys_name() -> None:
    owned: dict[str, Any] = {
        "f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}}, 'k:{"name":"B"}': {"f:gone": {}}}
    }
    assert of_owners({"env": [{"name": "A"}]}, ("Update", owned)) == ("spec.env.A.value",)
