"""The Plan that `reconcile.decide` returns: the status to write, then the actions, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlhf_api.status import Status

Manifest = Mapping[str, Any]
"""A whole Kubernetes object as JSON types."""


@dataclass(frozen=True, kw_only=True)
class ReadLive:
    """Read the objects live and decide again: the next step cannot be undone, and the cache may be stale.

    It stands alone in a plan; the status is not written.
    """

    why: str
    alone: bool = False
    """No other job may reserve room until this pass has ended."""


@dataclass(frozen=True, kw_only=True)
class Create:
    """Make an object unless it exists; one of that name that is not the job's is a NameConflict on the next pass."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Delete an object of the job's namespace, if it still has this uid."""

    kind: Literal["RayJob", "Pod", "RLHFJob"]
    """RayJob: an attempt, its cluster and pods with it. Pod: its node is gone. RLHFJob: its time to live is over."""
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class SetOwner:
    """Have a claim that was made for the job deleted with it (`owned`), or left when the job is deleted.

    Where the API server refuses that, the next pass tries again.
    """

    claim: str
    owned: bool


Action: TypeAlias = ReadLive | Create | Delete | SetOwner


@dataclass(frozen=True, kw_only=True)
class Event:
    """A Kubernetes event about the job, or a node; one a change, never one a step."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    node: str = ""
    """The node that it is about, instead of the job."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Write the status if it differs, on condition of the resource version that was seen; only then do the rest."""

    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds until the passing of time alone may change the answer; None if only an event can."""
