"""Application of plans to the cluster: each step may be repeated, and none is done for a job that has changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.status import Status
from rlhf_operator import names
from rlhf_operator.actions import Create, Delete, Event, Manifest, Plan, ReadLive, Resize, SetOwner
from rlhf_operator.cluster import parse, raw
from rlhf_operator.cluster.cache import Cache, Key, KindName
from rlhf_operator.cluster.client import CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, ApiError, Client
from rlhf_operator.cluster.events import EventRecorder
from rlhf_operator.cluster.resources import CLAIMS, CREATED, JOBS, PODS, RAYCLUSTERS, RAYJOBS, Resource
from rlhf_operator.resources import identity
from rlhf_operator.snapshot import Document, ObservedJob, Refusal, Snapshot

CACHED: Final[dict[str, KindName]] = {"rayjobs": "rayjobs", "persistentvolumeclaims": "claims", "pods": "pods"}
"""Name of the cache's table by plural name of the kind, for kinds that the operator both creates and watches."""
DELETED: Final[dict[str, tuple[Resource, dict[str, Any]]]] = {
    # Foreground: so the pods end even where KubeRay is down, and the RayJob stays until they are gone.
    "RayJob": (RAYJOBS, {"propagationPolicy": "Foreground"}),
    "Pod": (PODS, {"gracePeriodSeconds": 0}),
    "RLHFJob": (JOBS, {"propagationPolicy": "Background"}),
}
"""(resource, DeleteOptions) by kind of the object to delete."""
WRITTEN_BY: Final = {"fieldManager": names.OPERATOR}
CREATED_BY: Final = {**WRITTEN_BY, "fieldValidation": "Strict"}
"""Query parameters of a create request; with Strict, unknown fields of a user's template are refused, not dropped."""


class StaleError(Exception):
    """The job has changed since the snapshot, so it must be observed and decided anew."""


class RefusedError(Exception):
    """The API server refused an object, or an object of that name has another owner; an event reports it."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


@dataclass(frozen=True, eq=False)
class Applier:
    """Writer of plans to the cluster; raises NotLeadingError once `may_write` returns False."""

    client: Client
    cache: Cache
    events: EventRecorder
    may_write: Callable[[], bool]
    enqueue: Callable[[set[Key]], None]
    """Function called with the keys of other jobs that a write affects, as its watch event will bring nothing new."""

    async def write_status(self, snapshot: Snapshot, plan: Plan) -> None:
        """Write a plan's status if it differs from the job's. After a StaleError or ApiError no action may be done."""
        job = snapshot.job
        if plan.status != job.status:
            body = {"metadata": {"resourceVersion": job.resource_version}, "status": with_nulls(plan.status)}
            written = await self._patch(JOBS, job, job.name, body, "status")
            # The next pass sees this status, however late the watch event comes.
            self._remember(job, "jobs", written)

    async def act(self, snapshot: Snapshot, plan: Plan) -> None:
        """Do the actions of a plan up to the first StaleError, RefusedError or ApiError, and record its events."""
        events = plan.events
        failed: Exception | None = None
        try:
            for action in plan.actions:
                assert not isinstance(action, ReadLive), "the reconciler reads live and decides again"
                if isinstance(action, Create):
                    await self._create(snapshot.job, action.manifest)
                elif isinstance(action, SetOwner):
                    await self._set_owner(snapshot.job, action)
                elif isinstance(action, Resize):
                    await self._resize(snapshot.job, action)
                else:
                    await self._delete(snapshot.job.namespace, action)
        except RefusedError as error:
            # An action of the new phase was not done, and the next pass takes the phase back: no event about it.
            events, failed = tuple(each for each in events if each.reason != plan.status.phase), error
        except Exception as error:  # noqa: BLE001 raised below; a cancellation must end the pass at once
            failed = error
        for event in events:
            await self.events.record(snapshot.job, event)
        if failed:
            raise failed

    async def _patch(
        self, resource: Resource, job: ObservedJob, name: str, body: Manifest, subresource: str = ""
    ) -> Document:
        """Patch an object in the job's namespace; return it. Raises StaleError if the object has changed or is gone."""
        path, kind = resource.path(job.namespace, name, subresource), f"{resource.plural}/{subresource}".rstrip("/")
        try:
            return await self.client.call("PATCH", path, kind=kind, query=WRITTEN_BY, body=body, may=self.may_write)
        except ApiError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                raise StaleError(str(error)) from None
            raise

    async def _create(self, job: ObservedJob, manifest: Manifest) -> None:
        kind, name = raw.text(manifest, "kind"), raw.text(manifest, "metadata", "name")
        resource = CREATED[raw.text(manifest, "apiVersion"), kind]
        path = resource.path(job.namespace)
        try:
            made = await self.client.call(
                "POST", path, kind=resource.plural, query=CREATED_BY, body=manifest, may=self.may_write
            )
        except ApiError as error:
            if error.status in (FORBIDDEN, INVALID, 400):
                refusal = Refusal(reason="CreateRefused", message=f"{kind} {name} was refused: {error}")
                raise await self._refused(job, refusal) from None
            if error.status != CONFLICT:
                raise
            made = await self._existing(job, resource, manifest)
        if resource.plural in CACHED:
            self._remember(job, CACHED[resource.plural], made)

    def _remember(self, job: ObservedJob, kind: KindName, document: Document) -> None:
        self.enqueue(self.cache.put(kind, document) - {(job.namespace, job.name)})

    async def _existing(self, job: ObservedJob, resource: Resource, manifest: Manifest) -> Document:
        """Return the existing object of this name. Raises RefusedError if it does not have the manifest's owner."""
        name = raw.text(manifest, "metadata", "name")
        if (found := await self.client.get(resource, job.namespace, name)) is None:
            raise StaleError(f"{resource.kind} {name} was there and is gone")
        is_kept = resource is CLAIMS and parse.kept_for(found) == job.name
        if is_kept or {job.uid, *parse.owners(manifest)} & parse.owners(found):
            return found
        message = f"{resource.kind} {name} exists already and belongs to somebody else: delete it or rename the job"
        raise await self._refused(job, Refusal(reason="NameConflict", message=message))

    async def _refused(self, job: ObservedJob, refusal: Refusal) -> RefusedError:
        await self.events.record(job, Event(kind="Warning", reason=refusal.reason, message=refusal.message))
        return RefusedError(refusal)

    async def _set_owner(self, job: ObservedJob, action: SetOwner) -> None:
        """Add the job to its claim's owners, or remove the job from the owners; an event reports a refused change."""
        if (found := await self.client.get(CLAIMS, job.namespace, action.claim)) is None:
            return
        owners = [each for each in raw.entries(found, "metadata", "ownerReferences") if each.get("uid") != job.uid]
        body = {
            "metadata": {
                "resourceVersion": raw.text(found, "metadata", "resourceVersion"),
                "ownerReferences": [*owners, *([identity.owner(job)] if action.owned else [])],
            }
        }
        try:
            self._remember(job, "claims", await self._patch(CLAIMS, job, action.claim, body))
        except ApiError as error:
            if error.status not in (FORBIDDEN, INVALID):
                raise
            becomes = "go" if action.owned else "stay"
            message = f"Claim {action.claim} is to {becomes} when the job is deleted, which is refused: {error}"
            await self.events.record(job, Event(kind="Warning", reason="ClaimNotChanged", message=message))

    async def _resize(self, job: ObservedJob, action: Resize) -> None:
        """Set the number of pods of an elastic pool in its RayCluster; an event reports a refusal."""
        try:
            await self._set_replicas(job, action)
        except ApiError as error:
            if error.status not in (FORBIDDEN, INVALID):
                raise
            message = f"Pool {action.pool} is to have {action.nodes} pods, which is refused: {error}"
            await self.events.record(job, Event(kind="Warning", reason="PoolNotResized", message=message))

    async def _set_replicas(self, job: ObservedJob, action: Resize) -> None:
        """Write the size of an elastic pool, unless it is set; the patch must hold the whole list of worker groups."""
        found = await self.client.get(RAYCLUSTERS, job.namespace, action.cluster) or {}
        groups = [dict(each) for each in raw.entries(found, "spec", "workerGroupSpecs")]
        named = (each for each in groups if raw.text(each, "template", "metadata", "labels", names.POOL) == action.pool)
        is_own = raw.text(found, "metadata", "labels", names.JOB_UID) == job.uid
        if (group := next(named, None)) is None or not is_own or raw.number(group, "replicas") == action.nodes:
            return
        group.update(replicas=action.nodes, scaleStrategy={"workersToDelete": list(action.leaving)})
        version = raw.text(found, "metadata", "resourceVersion")
        body = {"metadata": {"resourceVersion": version}, "spec": {"workerGroupSpecs": groups}}
        await self._patch(RAYCLUSTERS, job, action.cluster, body)

    async def _delete(self, namespace: str, action: Delete) -> None:
        resource, options = DELETED[action.kind]
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": action.uid}, **options}
        path = resource.path(namespace, action.name)
        try:
            await self.client.call("DELETE", path, kind=resource.plural, body=body, may=self.may_write)
        except ApiError as error:
            if error.status == CONFLICT:  # the object has changed, or another object has its name
                raise StaleError(str(error)) from None
            if error.status != NOT_FOUND:
                raise


def with_nulls(status: Status) -> dict[str, Any]:
    """Return the status as a merge patch in which unset fields are null, so that their old values are removed."""
    return _with_nulls(status.model_dump(mode="json", by_alias=True), status.document())


def _with_nulls(every: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    # Lists are those of `given`: a patch replaces a list as a whole, so that a null in it would stay.
    nested = {name: _with_nulls(each, given[name]) for name, each in every.items() if isinstance(each, dict)}
    return {name: nested.get(name, given.get(name)) for name in every}
