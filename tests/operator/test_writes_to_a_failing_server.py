"""What is written to an API server that fails, refuses and is changed by others; the server here is a small one."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from rlhf_api.status import Attempt, Progress, Status
from rlhf_operator import names
from rlhf_operator.actions import Create, Delete, Event, Plan, Resize, SetOwner
from rlhf_operator.cluster import parse
from rlhf_operator.cluster.apply import Applier, RefusedError, StaleError, with_nulls
from rlhf_operator.cluster.cache import Cache, Key
from rlhf_operator.cluster.client import ApiError, Client, NoClusterError, NotLeadingError
from rlhf_operator.cluster.events import EventRecorder
from rlhf_operator.cluster.resources import JOBS, PODS
from rlhf_operator.reconciler import Reconciler
from rlhf_operator.snapshot import ObservedJob, Snapshot
from rlhf_operator.times import ServerClock
from tests.cluster.credentials import kubeconfig

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
JOB = "/apis/rlhf.hybridflow.io/v1alpha1/namespaces/n/rlhfjobs/a"
RAYJOBS = "/apis/ray.io/v1/namespaces/n/rayjobs"
DELETE_RAYJOB = Delete(kind="RayJob", name="a-a1", uid="r")
DELETE_POD = Delete(kind="Pod", name="p", uid="q")
DELETE_JOB = Delete(kind="RLHFJob", name="a", uid="uid-a")
EVENTS = "/apis/events.k8s.io/v1/namespaces/n/events"


class Server:
    """Answers (code, document, headers) in the order in which a test wants them; 200 and {} when it wants nothing."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], list[tuple[int, Any, dict[str, str]]]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.queries: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.at_once = self.most_at_once = 0
        self.slow = ""

    def will(self, method: str, path: str, code: int, document: Any = None, **headers: str) -> None:
        self.answers.setdefault((method, path), []).append((code, {} if document is None else document, headers))

    async def answer(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        text = await request.text()
        await asyncio.sleep(1.0 if request.method == self.slow else 0.002)
        self.at_once -= 1
        self.requests.append((request.method, request.path, yaml.safe_load(text) if text else None))
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers["Authorization"].removeprefix("Bearer "))
        planned = self.answers.get((request.method, request.path))
        code, document, headers = planned.pop(0) if planned else (200, {}, {})
        headers = {k.replace("_", "-"): v for k, v in headers.items()}
        if isinstance(document, bytes):
            return web.Response(body=document, status=code, headers=headers, content_type="application/json")
        return web.json_response(document, status=code, headers=headers)

    def asked(self, method: str) -> list[str]:
        return [path for each, path, _ in self.requests if each == method]


class Parts:
    """Client and applier on a server."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server, self.client, self.cache, self.leads = server, client, Cache(), True
        self.now = NOW
        events = EventRecorder(client, lambda: self.leads, lambda: self.now)
        self.looked_at: set[Key] = set()
        self.applier = Applier(client, self.cache, events, lambda: self.leads, self.looked_at.update)

    async def apply(self, plan: Plan) -> None:
        await self.applier.write_status(snapshot(), plan)
        await self.applier.act(snapshot(), plan)


def run(tmp_path: Path, test: Callable[[Parts], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = tmp_path / "kubeconfig"
        config.write_text(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}", "secret"))
        client = await Client.connect(config)
        try:
            await asyncio.wait_for(test(Parts(server, client)), 30)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(main())


def snapshot() -> Snapshot:
    job = ObservedJob(
        namespace="n",
        name="a",
        uid="uid-a",
        generation=1,
        resource_version="7",
        created=NOW,
        deleting=False,
        labels={},
        spec={},
        status=Status(),
    )
    return Snapshot(job=job, watching_since=NOW)


def rayjob(owner: str) -> dict[str, Any]:
    owners = [{"kind": "RLHFJob", "name": "a", "uid": owner, "controller": True}]
    labels = {names.JOB_NAME: "a", names.ATTEMPT: "1"}
    metadata = {"name": "a-a1", "namespace": "n", "uid": "r", "resourceVersion": "3", "labels": labels}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {**metadata, "ownerReferences": owners}}


def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("GET", JOB, 429, Retry_After="7")
        parts.server.will("GET", JOB, 503)
        parts.server.will("GET", JOB, 200, {"kind": "RLHFJob"})
        assert await parts.client.call("GET", JOB, kind="rlhfjobs") == {"kind": "RLHFJob"}
        assert 7 <= pauses[0] <= 10.5
        assert len(pauses) == 2

    run(tmp_path, test)


def test_an_error_that_stays_is_told_in_a_sentence(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        for _ in range(9):
            parts.server.will("GET", JOB, 500, {"message": "etcd is gone"})
        with pytest.raises(ApiError, match="500: etcd is gone") as told:
            await parts.client.call("GET", JOB, kind="rlhfjobs")
        assert told.value.passing
        assert len(parts.server.requests) == 5
        parts.server.will("GET", "/x", 404, {"message": "no x"})
        with pytest.raises(ApiError, match="no x"):
            await parts.client.call("GET", "/x", kind="x")
        assert len(parts.server.requests) == 6
        assert len(pauses) == 4

    run(tmp_path, test)


def test_a_list_that_grows_too_old_between_pages_begins_anew(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        path = PODS.path("n")
        one, two = {"metadata": {"name": "1"}}, {"metadata": {"name": "2"}}
        parts.server.will("GET", path, 200, {"items": [one], "metadata": {"continue": "c", "resourceVersion": "5"}})
        parts.server.will("GET", path, 410)
        parts.server.will("GET", path, 200, {"items": [one, two], "metadata": {"resourceVersion": "9"}})
        found = await parts.client.list(PODS, "n", "x=y")
        assert [each["metadata"]["name"] for each in found.items] == ["1", "2"]
        assert found.version == 9
        assert all(query["labelSelector"] == "x=y" for query in parts.server.queries)
        assert [query.get("continue") for query in parts.server.queries] == [None, "c", None]

    run(tmp_path, test)


def test_a_list_of_jobs_tells_what_an_upgrade_has_dropped(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        managed = [{"operation": "Update", "fieldsV1": {"f:spec": {"f:gone": {}}}}]
        for resource, lost in ((JOBS, ("spec.gone",)), (PODS, ())):
            item = {"metadata": {"name": "a", "managedFields": managed}, "spec": {}}
            parts.server.will("GET", resource.path("n"), 200, {"items": [item], "metadata": {}})
            (found,) = (await parts.client.list(resource, "n")).items
            assert parse.job(found).lost_fields == lost

    run(tmp_path, test)


UNREADABLE = [b"<html>a proxy's page</html>", b"", b"[]", b'{"items": [\xff']


@pytest.mark.parametrize("body", UNREADABLE, ids=["html", "nothing", "a list", "no text"])
def test_an_answer_that_cannot_be_read_is_no_empty_list(tmp_path: Path, pauses: list[float], body: bytes) -> None:
    async def test(parts: Parts) -> None:
        path = PODS.path("n")
        for _ in range(5):
            parts.server.will("GET", path, 200, body)
        with pytest.raises(ApiError, match="an answer that cannot be read") as told:
            await parts.client.list(PODS, "n")
        assert told.value.status == 0
        assert told.value.passing
        assert len(pauses) == 4
        parts.server.will("GET", path, 200, body)
        parts.server.will("GET", path, 200, {"items": [{"metadata": {"name": "1"}}]})
        assert len((await parts.client.list(PODS, "n")).items) == 1
        parts.server.will("GET", path, 200, {"error": "of a proxy"})
        with pytest.raises(ApiError, match="the answer is no list"):
            await parts.client.list(PODS, "n")
        parts.server.will("GET", path, 403, body)
        with pytest.raises(ApiError, match="403"):
            await parts.client.list(PODS, "n")

    run(tmp_path, test)


class Clumsy:
    """An observer that does not understand what it lists, at first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def sync(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def test_whatever_is_listed_does_not_end_the_operator(pauses: list[float]) -> None:
    observer: Any = Clumsy(RecursionError(), ValueError("of a version"), ApiError(0, "nobody there"))
    unused: Any = None
    parts: dict[str, Any] = {"applier": unused, "reconciled": unused}
    engine = Reconciler(unused, observer=observer, clock=ServerClock().now, **parts)
    asyncio.run(engine.sync())
    assert pauses == [0.5, 1.0, 2.0]
    assert engine.unready() is None


def test_requests_at_once_have_a_limit(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        await asyncio.gather(*(parts.client.find(f"/{number}", "x") for number in range(60)))
        assert 1 < parts.server.most_at_once <= 16

    run(tmp_path, test)


def test_a_replica_that_no_longer_leads_writes_nothing(tmp_path: Path, pauses: list[float]) -> None:
    async def test(parts: Parts) -> None:
        parts.leads = False
        actions = (
            Create(manifest=rayjob("uid-a")),
            DELETE_RAYJOB,
            DELETE_POD,
        )
        for action in (*actions, DELETE_JOB):
            with pytest.raises(NotLeadingError):
                await parts.apply(Plan(status=Status(), actions=(action,)))
        event = Event(kind="Normal", reason="Running", message="it runs")
        for plan in (Plan(status=Status(phase="Failed")), Plan(status=Status(), events=(event,))):
            with pytest.raises(NotLeadingError):
                await parts.apply(plan)
        assert not parts.server.requests
        assert not pauses

    run(tmp_path, test)


def test_leadership_is_asked_before_every_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(parts: Parts) -> None:
        async def lose(_: float) -> None:
            parts.leads = False

        parts.server.will("PATCH", f"{JOB}/status", 500)
        monkeypatch.setattr("rlhf_operator.cluster.client.asyncio.sleep", lose)
        with pytest.raises(NotLeadingError):
            await parts.apply(Plan(status=Status(phase="Failed")))
        assert len(parts.server.asked("PATCH")) <= 1

    run(tmp_path, test)


@pytest.mark.parametrize("code", [404, 409])
def test_nothing_is_done_for_a_job_that_has_changed(tmp_path: Path, code: int) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("PATCH", f"{JOB}/status", code)
        plan = Plan(status=Status(phase="Provisioning"), actions=(Create(manifest=rayjob("uid-a")),))
        with pytest.raises(StaleError):
            await parts.apply(plan)
        ((method, _, body),) = parts.server.requests
        assert method == "PATCH"
        assert body["metadata"] == {"resourceVersion": "7"}

    run(tmp_path, test)


def test_a_status_that_has_not_changed_is_not_written(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        await parts.apply(Plan(status=Status()))
        assert not parts.server.requests

    run(tmp_path, test)


def test_a_written_status_is_seen_by_the_next_pass(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        metadata = {"name": "a", "namespace": "n", "uid": "uid-a", "resourceVersion": "8"}
        parts.server.will("PATCH", f"{JOB}/status", 200, {"metadata": metadata, "status": {"phase": "Failed"}})
        await parts.apply(Plan(status=Status(phase="Failed")))
        entry = parts.cache.jobs.get(("n", "a"))
        assert entry
        assert (entry.value.resource_version, entry.value.status.phase) == ("8", "Failed")

    run(tmp_path, test)


def test_jobs_that_wait_are_looked_at_when_this_one_ends(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        spec = {"models": {"reward": {"uri": "job://a"}}}
        reader = {"metadata": {"name": "b", "namespace": "n", "uid": "uid-b", "resourceVersion": "5"}, "spec": spec}
        parts.cache.put("jobs", reader)
        metadata = {"name": "a", "namespace": "n", "uid": "uid-a", "resourceVersion": "8"}
        written = {"metadata": metadata, "status": {"phase": "Succeeded"}}
        parts.server.will("PATCH", f"{JOB}/status", 200, written)
        await parts.apply(Plan(status=Status(phase="Succeeded")))
        assert parts.looked_at == {("n", "b")}
        assert parts.cache.put("jobs", written) == set(), "the watch brings it too, and it is nothing new"

    run(tmp_path, test)


def test_what_is_unset_is_taken_out_of_the_stored_status() -> None:
    attempt = Attempt(attempt=1, start_time="2026-01-01T00:00:00Z", slots=2)
    progress = Progress(step=1, total_steps=2, stage="SFT")
    patch = with_nulls(Status(phase="Running", progress=progress, attempts=(attempt,)))
    assert patch["attempts"] == [attempt.model_dump(mode="json", by_alias=True, exclude_none=True)]
    assert patch["output"] is None
    assert patch["progress"]["stepSeconds"] is None
    assert patch["progress"]["step"] == 1
    assert patch["conditions"] == []


def test_a_rayjob_that_is_the_jobs_own_is_taken(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("POST", RAYJOBS, 409)
        parts.server.will("GET", f"{RAYJOBS}/a-a1", 200, rayjob("uid-a"))
        await parts.apply(Plan(status=Status(), actions=(Create(manifest=rayjob("uid-a")),)))
        assert parts.cache.rayjobs.get(("n", "a-a1"))

    run(tmp_path, test)


def test_somebody_elses_object_ends_the_pass_with_a_word(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("POST", RAYJOBS, 409)
        parts.server.will("GET", f"{RAYJOBS}/a-a1", 200, rayjob("another"))
        actions = (Create(manifest=rayjob("uid-a")), DELETE_POD)
        with pytest.raises(RefusedError, match="belongs to somebody else"):
            await parts.apply(Plan(status=Status(), actions=actions))
        assert not parts.server.asked("DELETE")
        assert parts.server.requests[-1][2]["reason"] == "NameConflict"

    run(tmp_path, test)


def test_a_write_that_is_cancelled_when_the_lease_is_lost_ends(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.slow = "DELETE"
        event = Event(kind="Normal", reason="Failed", message="it has ended")
        task = asyncio.create_task(parts.apply(Plan(status=Status(), actions=(DELETE_POD,), events=(event,))))
        await asyncio.sleep(0.2)
        parts.leads = False
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled(), "else the worker would go on, and the replica would not end"
        assert parts.server.asked("POST") == []

    run(tmp_path, test)


def test_a_refused_object_is_told_with_the_servers_own_words(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("POST", RAYJOBS, 403, {"message": "exceeded quota: gpus"})
        with pytest.raises(RefusedError, match="exceeded quota") as told:
            await parts.apply(Plan(status=Status(), actions=(Create(manifest=rayjob("uid-a")),)))
        assert told.value.refusal.reason == "CreateRefused"
        assert "exceeded quota: gpus" in parts.server.requests[-1][2]["note"]

    run(tmp_path, test)


@pytest.mark.parametrize("code", [200, 404])
def test_only_what_was_seen_is_deleted(tmp_path: Path, code: int) -> None:
    async def test(parts: Parts) -> None:
        pod, job = "/api/v1/namespaces/n/pods/p", JOB
        for path in (f"{RAYJOBS}/a-a1", pod, job):
            parts.server.will("DELETE", path, code)
        actions = (
            DELETE_RAYJOB,
            DELETE_POD,
            DELETE_JOB,
        )
        await parts.apply(Plan(status=Status(), actions=actions))
        bodies = [body for _, _, body in parts.server.requests]
        assert [each["preconditions"]["uid"] for each in bodies] == ["r", "q", "uid-a"]
        assert bodies[0]["propagationPolicy"] == "Foreground"
        assert bodies[1]["gracePeriodSeconds"] == 0

    run(tmp_path, test)


def test_a_delete_that_meets_a_conflict_is_not_taken_for_done(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("DELETE", f"{RAYJOBS}/a-a1", 409)
        with pytest.raises(StaleError):
            await parts.apply(Plan(status=Status(), actions=(DELETE_RAYJOB, DELETE_POD)))
        assert [method for method, _, _ in parts.server.requests] == ["DELETE"]

    run(tmp_path, test)


def test_the_same_event_again_becomes_a_series(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        event = Event(kind="Warning", reason="Refused", message="no " * 1000)
        for _ in range(50):
            await parts.apply(Plan(status=Status(), events=(event,)))
        assert parts.server.asked("POST") == [EVENTS]
        (patched,) = parts.server.asked("PATCH")
        assert patched.startswith(f"{EVENTS}/a.")
        assert parts.server.requests[-1][2]["series"]["count"] == 2
        assert len(parts.server.requests[0][2]["note"]) == 1024

    run(tmp_path, test)


def test_no_event_announces_what_was_refused(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("POST", RAYJOBS, 403, {"message": "exceeded quota"})
        parts.server.will("PATCH", f"{JOB}/status", 200, {"metadata": {"name": "a", "namespace": "n", "uid": "uid-a"}})
        told = tuple(Event(kind="Normal", reason=reason, message=".") for reason in ("Mapped", "Provisioning"))
        plan = Plan(status=Status(phase="Provisioning"), actions=(Create(manifest=rayjob("uid-a")),), events=told)
        with pytest.raises(RefusedError):
            await parts.apply(plan)
        written = [body["reason"] for _, path, body in parts.server.requests if path.endswith("/events")]
        assert written == ["CreateRefused", "Mapped"]

    run(tmp_path, test)


def test_an_event_that_is_refused_stops_nothing(tmp_path: Path) -> None:
    async def test(parts: Parts) -> None:
        parts.server.will("POST", EVENTS, 403)
        event = Event(kind="Normal", reason="Running", message="it runs")
        actions = (DELETE_POD,)
        await parts.apply(Plan(status=Status(), events=(event,), actions=actions))
        assert parts.server.asked("DELETE")

    run(tmp_path, test)


def test_no_way_to_a_cluster_is_a_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(NoClusterError, match="no way to the API server"):
            await Client.connect(tmp_path / "nothing")

    asyncio.run(main())


RAY_CLUSTER = "/apis/ray.io/v1/namespaces/n/rayclusters/a-a1-x"


@pytest.mark.parametrize(("owner", "replicas", "written"), [("uid-a", 3, True), ("uid-a", 2, False), ("b", 3, False)])
def test_a_pool_is_resized_once_and_in_the_jobs_own_cluster(
    tmp_path: Path, owner: str, replicas: int, written: bool
) -> None:
    groups = [
        {"groupName": each, "replicas": replicas, "template": {"metadata": {"labels": {names.POOL: each}}}}
        for each in ("train", "writers")
    ]
    metadata = {"name": "a-a1-x", "namespace": "n", "resourceVersion": "9", "labels": {names.JOB_UID: owner}}

    async def test(parts: Parts) -> None:
        parts.server.will("GET", RAY_CLUSTER, 200, {"metadata": metadata, "spec": {"workerGroupSpecs": groups}})
        parts.server.will("PATCH", RAY_CLUSTER, 403, {"message": "you may not"})
        resize = Resize(cluster="a-a1-x", pool="writers", nodes=2, leaving=("p3",))
        await parts.apply(Plan(status=Status(), actions=(resize, DELETE_POD)))
        bodies = [body for method, _, body in parts.server.requests if method == "PATCH"]
        told = {"replicas": 2, "scaleStrategy": {"workersToDelete": ["p3"]}}
        wanted = {
            "metadata": {"resourceVersion": "9"},
            "spec": {"workerGroupSpecs": [groups[0], {**groups[1], **told}]},
        }
        assert bodies == [wanted] * written
        assert parts.server.asked("DELETE"), "a refusal stops nothing"
        events = [body["reason"] for _, path, body in parts.server.requests if path == EVENTS]
        assert events == ["PoolNotResized"] * written

    run(tmp_path, test)


CLAIM = "/api/v1/namespaces/n/persistentvolumeclaims/a-output"


def claim(*owners: str) -> dict[str, Any]:
    references = [{"uid": each} for each in owners]
    return {"metadata": {"namespace": "n", "name": "a-output", "resourceVersion": "9", "ownerReferences": references}}


def test_a_claim_changes_owner_and_keeps_the_other_owners(tmp_path: Path) -> None:
    actions = tuple(SetOwner(claim="a-output", owned=owned) for owned in (True, False, True))

    async def test(parts: Parts) -> None:
        for owners in (["theirs"], ["theirs", "uid-a"]):
            parts.server.will("GET", CLAIM, 200, claim(*owners))
            parts.server.will("PATCH", CLAIM, 200, claim())
        parts.server.will("GET", CLAIM, 404)
        await parts.apply(Plan(status=Status(), actions=actions))
        bodies = [body["metadata"] for method, _, body in parts.server.requests if method == "PATCH"]
        assert [[each["uid"] for each in body["ownerReferences"]] for body in bodies] == [
            ["theirs", "uid-a"],
            ["theirs"],
        ]
        assert {body["resourceVersion"] for body in bodies} == {"9"}, "of the claim that was seen"

    run(tmp_path, test)


def test_a_claim_that_may_not_be_changed_stops_nothing(tmp_path: Path) -> None:
    set_owner = SetOwner(claim="a-output", owned=False)
    why = "cannot set an ownerRef on a resource you can't delete"

    async def test(parts: Parts) -> None:
        parts.server.will("GET", CLAIM, 200, claim("uid-a"))
        parts.server.will("PATCH", CLAIM, 403, {"message": why})
        await parts.apply(Plan(status=Status(), actions=(set_owner, DELETE_POD)))
        assert parts.server.asked("DELETE")
        (event,) = (body for _, path, body in parts.server.requests if path == EVENTS)
        assert (event["type"], event["reason"]) == ("Warning", "ClaimNotChanged")
        assert why in event["note"]
        parts.server.will("GET", CLAIM, 200, claim("uid-a"))
        parts.server.will("PATCH", CLAIM, 409)
        with pytest.raises(StaleError):
            await parts.apply(Plan(status=Status(), actions=(set_owner,)))

    run(tmp_path, test)
