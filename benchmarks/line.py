"""Cost of a long queue of jobs for the operator: passes, status writes and CPU time, on its real work queue.

    python benchmarks/line.py [--jobs N] [--room M]

Reconciler with its concurrency, work queue, cache, observer, applier and decisions are the operator's. API server,
KubeRay and scheduler are played in this process (tests/operator/shared_cluster.py): their CPU time counts, too. N jobs
of three sizes and three namespaces are submitted at once; M nodes have room for a job of the smallest size each. Then
all jobs that have nodes end, again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests is not installed

from rlhf_api.names import API_VERSION, KIND
from rlhf_operator import names
from rlhf_operator.cluster.apply import Applier
from rlhf_operator.cluster.cache import Key, KindName
from rlhf_operator.cluster.client import CONFLICT, NOT_FOUND, ApiError, Client
from rlhf_operator.cluster.discovery import Offer
from rlhf_operator.cluster.events import EventRecorder
from rlhf_operator.cluster.observe import Observer
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.cluster.resources import Resource
from rlhf_operator.metrics import Result
from rlhf_operator.reconcile.decide import decide
from rlhf_operator.reconciler import Reconciler
from rlhf_operator.times import ServerClock
from tests.operator.shared_cluster import Document, NoHeartbeats, SharedCluster, node, spec

WATCH_SECONDS = 0.005
"""Seconds until a watch brings a change."""
QUIET_SECONDS = 2.5
"""Seconds without a pass after which the operator is at rest."""
TABLES: Mapping[str, KindName] = {"rlhfjobs": "jobs", "rayjobs": "rayjobs", "persistentvolumeclaims": "claims"}
NAMESPACES = ("red", "green", "blue")


class Silent(NoHeartbeats):
    """No head pod is ever asked, and none is remembered."""

    def forget_all_but(self, *_: object) -> None:
        """Nothing is known."""


class PlayedServer(Client):
    """API server in this process: it keeps versions, and refuses a write that is based on an old one."""

    def __init__(self, cluster: Operated) -> None:
        self.cluster, self.clock = cluster, ServerClock()

    async def call(self, method: str, path: str, *, kind: str, **given: Any) -> Document:
        await asyncio.sleep(0)
        table, (namespace, name) = TABLES.get(kind.removesuffix("/status")), _named(path)
        body = given.get("body")
        if table is None:
            return dict(body or {})
        objects = self.cluster.objects[table]
        if method == "POST":
            assert body
            return self._make(table, {**body, "metadata": {**body["metadata"], "namespace": namespace}})
        if (before := objects.get((namespace, name))) is None:
            raise ApiError(NOT_FOUND, path)
        if method == "GET":
            return before
        if method == "DELETE":
            self.cluster.delete_rayjob(namespace, name)
            return {}
        assert body
        if body["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
            raise ApiError(CONFLICT, path)
        self.cluster.counts["writes"] += 1
        self.cluster.put(table, {**before, "status": _without_nulls(body["status"])})
        return objects[namespace, name]

    def _make(self, table: KindName, manifest: Document) -> Document:
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        if key in self.cluster.objects[table]:
            raise ApiError(CONFLICT, f"{key} exists")
        self.cluster.counts["begun"] += table == "rayjobs"
        self.cluster.put(table, {**manifest, "metadata": self.cluster.metadata(manifest["metadata"])})
        return self.cluster.objects[table][key]

    async def list(
        self, resource: Resource, namespace: str | None, selector: str = "", _fields: str = "", _slim: Any = None
    ) -> Listing:
        await asyncio.sleep(0)
        job = dict(each.split("=") for each in selector.split(",") if each).get(names.JOB_NAME)
        table: Any = resource.plural
        items = [
            each
            for key, each in self.cluster.objects.get(table, {}).items()
            if key[0] == namespace and each["metadata"].get("labels", {}).get(names.JOB_NAME) == job
        ]
        return Listing(items=tuple(items), version=self.cluster.version)


class Operated(SharedCluster):
    """A played cluster with the operator's own reconciler beside it."""

    def start_operator(self) -> None:
        """Make cache, observer and reconciler; nobody leads yet."""
        super().start_operator()
        self.counts: Counter[str] = Counter()
        self.last_pass = time.monotonic()
        silent: Any = Silent()
        server = PlayedServer(self)
        self.observer = Observer(server, self.cache, silent, self.settings, self.notify)
        self.observer.offer = Offer(capabilities=self.capabilities, kinds=())
        events = EventRecorder(server, lambda: True, lambda: self.now)
        self.reconciler = Reconciler(
            decide,
            observer=self.observer,
            applier=Applier(server, self.cache, events, lambda: True, self.notify),
            reconciled=self.count,
            clock=lambda: datetime.now(UTC),
        )

    def notify(self, keys: set[Key]) -> None:
        self.reconciler.enqueue(keys)

    def count(self, result: Result, _seconds: float) -> None:
        self.counts["passes"] += 1
        self.counts[result] += 1
        self.last_pass = time.monotonic()

    def put(self, kind: KindName, document: Mapping[str, Any]) -> None:
        made = self.store(kind, document)
        self._later(lambda: self.cache.put(kind, made))

    def remove(self, kind: KindName, document: Document) -> None:
        del self.objects[kind][document["metadata"].get("namespace", ""), document["metadata"]["name"]]
        self._later(lambda: self.cache.remove(kind, document))

    def _later(self, change: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nodes that were there before the operator
            change()
        else:
            loop.call_later(WATCH_SECONDS, lambda: self.notify(change()))

    async def rest(self) -> None:
        """Let the operator, KubeRay and the scheduler work until nobody has anything to do."""
        self.last_pass = time.monotonic()
        while time.monotonic() - self.last_pass < QUIET_SECONDS or len(self.reconciler.queue):
            while self.make_pods() or self.schedule():
                pass
            await asyncio.sleep(0.02)


def _named(path: str) -> tuple[str, str]:
    """Return (namespace, name) of a path of the API; the name is empty in that of a collection."""
    parts = path.split("/namespaces/")[1].split("/")
    return parts[0], parts[2] if len(parts) > 2 else ""


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


async def measure(jobs: int, room: int) -> None:
    """Print what the operator does while jobs join the line, and while the line drains."""
    cluster = Operated([node(f"node-{number}", 2.05) for number in range(room)])
    leading = asyncio.create_task(cluster.reconciler.lead())
    while not cluster.reconciler.leads:  # noqa: ASYNC110 it is a plain value
        await asyncio.sleep(0.01)
    begun = time.process_time()
    cluster.now = datetime.now(UTC)
    for number in range(jobs):
        name, namespace = f"job-{number:05}", NAMESPACES[number % 3]
        cluster.homes[name] = namespace
        metadata = cluster.metadata({"name": name, "namespace": namespace, "generation": 1})
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec(number % 3 + 1)}
        cluster.put("jobs", document)
    await cluster.rest()
    report("joining", cluster.counts, jobs, time.process_time() - begun)
    rounds = 0
    while cluster.end_one():
        while cluster.end_one():
            pass
        await cluster.rest()
        rounds += 1
    report(f"joining and draining in {rounds} rounds", cluster.counts, jobs, time.process_time() - begun)
    leading.cancel()
    assert cluster.counts["begun"] >= jobs, f"each job has begun, some again after they gave room: {cluster.counts}"


def report(what: str, counts: Counter[str], jobs: int, seconds: float) -> None:
    each = ", ".join(f"{counts[name] / jobs:.1f} {name}" for name in ("passes", "stale", "error", "writes"))
    print(f"{what}: {each}, {1000 * seconds / jobs:.0f} ms of CPU a job", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a long line of jobs costs the operator.")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--room", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(measure(options.jobs, options.room))


if __name__ == "__main__":
    main()
