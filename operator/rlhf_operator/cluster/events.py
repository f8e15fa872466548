"""Kubernetes events about jobs and nodes (events.k8s.io/v1); an event that comes again soon becomes a series."""

import logging
import socket
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_operator import names
from rlhf_operator.actions import Event
from rlhf_operator.cluster.client import ApiError, Client
from rlhf_operator.cluster.resources import EVENTS, JOBS, NODES
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import timestamp

logger = logging.getLogger(__name__)

SERIES: Final = timedelta(minutes=10)  # an equal event within this time joins the series
MIN_SERIES_INTERVAL: Final = timedelta(minutes=1)  # between two updates of a series, except the first update
MAX_REMEMBERED: Final = 2_000
MAX_NOTE_BYTES: Final = 1024  # the API server refuses longer notes
NODE_EVENTS_NAMESPACE: Final = "default"  # nodes have no namespace of their own


@dataclass
class _Recorded:
    """Event that was written, with the count of its series."""

    name: str
    first: datetime
    written: datetime
    count: int = 1


class EventRecorder:
    """Writer of Kubernetes events; an event that the API server refuses is only logged."""

    def __init__(self, client: Client, may_write: Callable[[], bool], clock: Callable[[], datetime]) -> None:
        self._client, self._may_write, self._clock = client, may_write, clock
        self._recorded: OrderedDict[tuple[str, Event], _Recorded] = OrderedDict()

    async def record(self, job: ObservedJob, event: Event) -> None:
        now, namespace = self._clock(), NODE_EVENTS_NAMESPACE if event.node else job.namespace
        recorded = self._recorded.get((job.uid, event))
        if recorded is None or now - recorded.written > SERIES:
            recorded = self._recorded[job.uid, event] = _Recorded(f"{job.name}.{uuid.uuid4().hex[:16]}", now, now)
            if len(self._recorded) > MAX_REMEMBERED:
                self._recorded.popitem(last=False)
            await self._write(job, "POST", EVENTS.path(namespace), _new(job, event, recorded))
            return
        recorded.count += 1
        if now - recorded.written < MIN_SERIES_INTERVAL and recorded.count > 2:
            return
        recorded.written = now
        series = {"series": {"count": recorded.count, "lastObservedTime": timestamp(now, "microseconds")}}
        await self._write(job, "PATCH", EVENTS.path(namespace, recorded.name), series)

    async def _write(self, job: ObservedJob, method: str, path: str, body: dict[str, Any]) -> None:
        try:
            await self._client.call(method, path, kind=EVENTS.plural, body=body, may=self._may_write, attempts=2)
        except ApiError as error:
            logger.warning("no event about %s/%s: %s", job.namespace, job.name, error)


def _new(job: ObservedJob, event: Event, recorded: _Recorded) -> dict[str, Any]:
    about: dict[str, Any] = {"apiVersion": JOBS.api_version, "kind": JOBS.kind}
    about |= {"namespace": job.namespace, "name": job.name, "uid": job.uid, "resourceVersion": job.resource_version}
    encoded = event.message.encode(errors="replace")
    shortened = encoded[: MAX_NOTE_BYTES - 3].decode(errors="ignore") + "..."
    # As in the kubelet's events, the uid of a node is its name.
    node = {"apiVersion": NODES.api_version, "kind": NODES.kind, "name": event.node, "uid": event.node}
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": recorded.name, "namespace": NODE_EVENTS_NAMESPACE if event.node else job.namespace},
        "eventTime": timestamp(recorded.first, "microseconds"),
        "reportingController": names.OPERATOR,
        "reportingInstance": f"{names.OPERATOR}-{socket.gethostname()}"[:128],
        "action": "Reconcile",
        "type": event.kind,
        "reason": event.reason,
        "note": event.message if len(encoded) <= MAX_NOTE_BYTES else shortened,
        **({"regarding": node, "related": about} if event.node else {"regarding": about}),
    }
