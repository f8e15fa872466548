"""What a live read asks of the API server: no more than can matter, for a list by label is a look at everything."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from rlhf_operator import names
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.cluster.client import FORBIDDEN, INVALID, ApiError, Client
from rlhf_operator.cluster.discovery import Offer
from rlhf_operator.cluster.heartbeats import Heartbeats
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.cluster.resources import JOBS, Resource
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, Snapshot

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def job(status: Document) -> Document:
    metadata = {"namespace": "n", "name": "a", "uid": "u", "resourceVersion": "5", "generation": 1}
    return {"metadata": metadata, "spec": {}, "status": status}


def measured_job(name: str, namespace: str, *steps: int) -> Document:
    """Another job, each of whose attempts was measured after so many steps, or never (0)."""
    attempts = [
        {"attempt": number, "startTime": "2026-01-31T12:00:00Z", "slots": 1, "outcome": "Failed"}
        | ({"measured": {"step": step, "stepSeconds": 1.5}} if step else {})
        for number, step in enumerate(steps, 1)
    ]
    made = job({"attempts": attempts})
    return {
        **made,
        "metadata": {**made["metadata"], "name": name, "namespace": namespace, "uid": f"{namespace}-{name}"},
    }


def rayjob(version: str) -> Document:
    owner = {"kind": "RLHFJob", "name": "a", "uid": "u", "controller": True}
    labels = {names.JOB_NAME: "a", names.ATTEMPT: "1"}
    metadata = {"namespace": "n", "name": "a-a1", "uid": "r", "resourceVersion": version}
    return {"metadata": {**metadata, "labels": labels, "ownerReferences": [owner]}}


class Server:
    """Answers for one job and its RayJobs, and remembers the questions."""

    def __init__(self, status: Document, *rayjobs: Document) -> None:
        self.status, self.rayjobs = status, rayjobs
        self.asked: list[str] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> Document | None:
        self.asked.append(f"get {resource.plural} {name}")
        if resource is JOBS:
            return job(self.status)
        assert namespace == "n"
        return None

    async def list(self, resource: Resource, namespace: str | None, selector: str = "") -> Listing:
        assert namespace == "n"
        assert f"{names.JOB_NAME}=a" in selector
        self.asked.append(f"list {resource.plural}")
        return Listing(items=self.rayjobs if resource.plural == "rayjobs" else (), version=9)


class WithoutEvents(Server):
    """Answers a question about events with an error."""

    code = FORBIDDEN

    async def list(self, resource: Resource, namespace: str | None, selector: str = "", fields: str = "") -> Listing:
        if fields:
            raise ApiError(self.code, "no events")
        return await super().list(resource, namespace, selector)


def looked(server: Server, cache: Cache, *, fresh: bool = True) -> Snapshot:
    async def look() -> Snapshot:
        heartbeats = Heartbeats(lambda: NOW)
        offer = Offer(capabilities=frozenset({"kuberay"}), kinds=())
        client = cast("Client", cast("Any", server))
        observer = Observer(client, cache, heartbeats, Settings(), lambda _: None)
        observer.offer = offer
        try:
            seen = await observer.observe(("n", "a"), fresh=fresh, since=NOW)
        finally:
            await heartbeats.close()
        assert seen is not None
        return seen

    return asyncio.run(look())


def test_a_job_that_never_had_an_attempt_costs_no_list() -> None:
    server = Server({})
    assert not looked(server, Cache()).rayjobs
    assert server.asked[0] == "get rlhfjobs a"
    assert not [each for each in server.asked if each.startswith("list")]


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_job_that_had_one_is_listed_whatever_the_cache_knows(is_cached: bool) -> None:
    server, cache = Server({"attempt": 1}, rayjob("8")), Cache()
    if is_cached:
        cache.put("rayjobs", rayjob("7"))
    assert [each.name for each in looked(server, cache).rayjobs] == ["a-a1"]
    assert [each for each in server.asked if each.startswith("list")] == ["list pods", "list rayjobs"]


def test_a_job_of_lost_status_is_listed_by_its_attempt() -> None:
    server, cache = Server({}, rayjob("8")), Cache()
    cache.put("rayjobs", rayjob("7"))
    assert [each.name for each in looked(server, cache).rayjobs] == ["a-a1"]
    assert "list rayjobs" in server.asked


def test_events_are_read_only_where_the_operator_may() -> None:
    waiting = {**rayjob("8"), "status": {"jobDeploymentStatus": "Initializing"}}
    server = WithoutEvents({"attempt": 1}, waiting)
    assert looked(server, Cache()).complaint == ""
    server.code = INVALID
    with pytest.raises(ApiError, match="no events"):
        looked(server, Cache())


def test_what_others_hold_on_a_node_counts_and_not_its_own() -> None:
    cache = Cache()
    cache.put("jobs", job({"attempt": 1}))
    labels = {names.JOB_NAME: "a", names.JOB_UID: "u", names.ATTEMPT: "1"}
    requests = {"resources": {"requests": {"nvidia.com/gpu": "2"}}}
    for name, own in (("mine", labels), ("other", {})):
        metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": "3", "labels": own}
        cache.put("pods", {"metadata": metadata, "spec": {"nodeName": "node", "containers": [requests]}})
    assert looked(Server({"attempt": 1}), cache, fresh=False).taken == {"node": {"nvidia.com/gpu": 2}}


def test_what_other_jobs_of_the_namespace_measured_is_seen() -> None:
    cache = Cache()
    for other in (
        measured_job("b", "n", 7, 12, 0),
        measured_job("c", "n", 0),
        measured_job("d", "other", 7),
        measured_job("e", "n", 9),
    ):
        cache.put("jobs", other)
    measured = [each.measured for each in looked(Server({}), cache).measured]
    assert sorted(each.step for each in measured if each) == [9, 12]
