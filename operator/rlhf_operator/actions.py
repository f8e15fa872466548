"""The Plan that `reconcile.decide` returns: the status to write, then the actions, in this order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlhf_api.status import Status

Manifest = Mapping[str, Any]
"""A whole Kubernetes object as JSON types."""


@dataclass(frozen=True, kw_only=True)
class ReadLive:
    """Request to read the job's objects from the API server and decide again; it is the only action of its plan."""

    why: str
    alone: bool = False
    """Whether no other job may reserve room on nodes until the status of the repeated decision is written."""


@dataclass(frozen=True, kw_only=True)
class Create:
    """Creation of an object unless the job owns it already; if it has another owner, NameConflict is reported."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Deletion of an object in the job's namespace, if its uid is still `uid`."""

    kind: Literal["RayJob", "Pod", "RLHFJob"]
    """Kind: the RayJob of an attempt, a Pod on a dead node or of a sandbox, or an RLHFJob after its time to live."""
    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class SetOwner:
    """Change of whether a job's own claim is deleted with the job (`owned`); a refused change is tried in each pass."""

    claim: str
    owned: bool


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Change of the number of pods of an elastic pool in its RayCluster, unless the number is set already."""

    cluster: str
    pool: str
    nodes: int
    leaving: tuple[str, ...]
    """Names of the pods that KubeRay deletes first."""


ClusterAction: TypeAlias = ReadLive | Create | Delete | SetOwner | Resize


@dataclass(frozen=True, kw_only=True)
class Event:
    """Kubernetes event about the job or a node; written once for a change, never for each step or checkpoint."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str
    node: str = ""
    """Name of the node that the event is about; empty if it is about the job."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of a reconcile pass: a new status, and actions and events that follow once it is written."""

    status: Status
    actions: tuple[ClusterAction, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds until the next pass if no event comes; None if only an event can change the decision."""
