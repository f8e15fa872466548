"""Handlers of kopf's watches: each event updates the cache, and enqueues the jobs that it concerns.

Only low-level event handlers are used. With them kopf writes neither finalizers nor annotations.
"""

from __future__ import annotations

import itertools
from typing import Any

import kopf

from rlhf_operator.cluster.cache import Cache
from rlhf_operator.cluster.discovery import Kind
from rlhf_operator.reconciler import Reconciler


class NoDifferences(kopf.DiffBaseStorage):
    """Storage that copies nothing: kopf would copy each object twice to find differences, which nothing uses."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def watch(kind: Kind, cache: Cache, reconciler: Reconciler, registry: kopf.OperatorRegistry) -> None:
    """Register a handler for the events of a kind of object."""
    resource = kind.resource

    @kopf.on.event(resource.group, resource.version, resource.plural, id=kind.name, registry=registry)
    async def saw(event: Any, **_: Any) -> None:
        change = cache.remove if event["type"] == "DELETED" else cache.put
        reconciler.enqueue(change(kind.name, event["object"]))
        # An object from a list has no type: at the start, and again after a watch was lost.
        if event["type"] is None:
            reconciler.relist()


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it writes nothing, scans for no other kinds, and waits long for the API server."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = NoDifferences()
    made.scanning.disabled = True
    made.peering.standalone = True
    made.networking.connect_timeout = 10
    made.networking.request_timeout = 60
    made.networking.enforce_retry_after = True
    # An API server that is down for an hour is waited for.
    made.networking.error_backoffs = tuple(itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(10, 360)))
    made.watching.inactivity_timeout = 70
    made.watching.chunk_size = 100
    made.queueing.idle_timeout = 1
    made.process.ultimate_exiting_timeout = 20
    return made
