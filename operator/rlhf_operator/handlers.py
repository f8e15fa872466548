"""kopf's part: it watches and keeps the watches alive. What it sees goes into the cache, and on as keys of jobs.

Only low-level event handlers are used: kopf then writes nothing, neither finalizer nor annotation.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

import kopf

from rlhf_operator.cluster.cache import KindName
from rlhf_operator.cluster.discovery import Kind
from rlhf_operator.snapshot import Document

DELETED: Final = "DELETED"
LISTED: Final = None
"""kopf's word for an object of a list: at the start, and again after a watch was lost."""

Login = Callable[[], Awaitable[kopf.ConnectionInfo]]
Start = Callable[[kopf.OperatorRegistry, kopf.OperatorSettings], Awaitable[None]]
End = Callable[[], Awaitable[None]]


class Watcher(Protocol):
    """Who is told what kopf sees."""

    def changed(self, kind: KindName, document: Document) -> None:
        """An object is there, or has changed."""

    def deleted(self, kind: KindName, document: Document) -> None:
        """An object has been deleted."""

    def relisted(self) -> None:
        """kopf had to list anew: what has been deleted meanwhile is not in the list, and no event says so."""


class NoDifferences(kopf.DiffBaseStorage):
    """Stands for what kopf would remember of an object: it copied each twice to see what nobody here asks for."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def registry(login: Login, start: Start, end: End) -> kopf.OperatorRegistry:
    """Handlers for kopf's own life: `start` before the watches, `end` after them."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.startup(registry=made)
    async def before(settings: kopf.OperatorSettings, **_: Any) -> None:
        await start(made, settings)

    @kopf.on.cleanup(registry=made)
    async def after(**_: Any) -> None:
        await end()

    return made


def watch(
    kinds: Iterable[Kind], watcher: Watcher, registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings
) -> None:
    """Adds handlers for these kinds, and their label selectors."""
    for kind in kinds:
        _watch(registry, kind, watcher)
        if kind.selector:
            resource = kind.resource
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = kind.selector


def _watch(made: kopf.OperatorRegistry, kind: Kind, watcher: Watcher) -> None:
    resource = kind.resource

    @kopf.on.event(resource.group, resource.version, resource.plural, id=kind.name, registry=made)
    async def saw(event: Any, **_: Any) -> None:
        if event["type"] == DELETED:
            watcher.deleted(kind.name, event["object"])
            return
        watcher.changed(kind.name, event["object"])
        if event["type"] is LISTED:
            watcher.relisted()


def settings() -> kopf.OperatorSettings:
    """kopf's settings: it writes nothing, does not look for other kinds, and does not give up."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.persistence.diffbase_storage = NoDifferences()
    made.scanning.disabled = True
    made.peering.standalone = True
    made.networking.connect_timeout = 10
    made.networking.request_timeout = 60
    made.networking.enforce_retry_after = True
    # An API server that is down for an hour is waited for.
    made.networking.error_backoffs = tuple(itertools.chain((1, 1, 2, 3, 5, 8, 13, 21), itertools.repeat(30, 120)))
    made.watching.inactivity_timeout = 70
    made.watching.chunk_size = 100
    made.queueing.idle_timeout = 1
    made.process.ultimate_exiting_timeout = 20
    return made
