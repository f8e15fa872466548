"""Cache of the observed objects; each change returns the keys of the jobs that it concerns.

Entries are small values, never whole objects. A later version is never replaced by an earlier one, and a deleted object
never comes back, in whatever order lists, watches and answers to writes arrive.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from rlhf_api.names import KIND
from rlhf_api.status import Phase, Status
from rlhf_operator import names
from rlhf_operator.cluster import parse, raw
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.snapshot import Document, ObservedJob, ObservedPod, claims_named, inputs_of

T = TypeVar("T")
Key: TypeAlias = tuple[str, str]
"""Namespace and name of an object; the namespace of a node is empty."""
KindName = Literal["jobs", "rayjobs", "pods", "nodes", "claims", "quotas", "priorities", "slices"]

REMEMBERED_DELETIONS: Final = 20_000
MAX_LOST_PODS: Final = 16  # lost pods kept for each attempt: the first ones, whose loss ended the others
PLACED_LATER: Final[tuple[Phase, ...]] = ("Pending", "Mapping")
"""Phases of jobs that any change of a node wakes; of the jobs in line, only the first are woken (`has_line_moved`)."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """Entry of the cache: the value of an object, and the index names that find it."""

    uid: str
    version: int
    owner: str
    """uid of the RLHFJob to which the cached object belongs; empty if it belongs to none."""
    index_names: frozenset[str]
    value: T


class Table(Generic[T]):
    """Cached objects of one kind, found by key or by index name."""

    def __init__(
        self,
        read: Callable[[Document], T],
        *,
        owner: Callable[[Document], str] = lambda _: "",
        index_names: Callable[[Document], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        self._read, self._owner, self._index_names = read, owner, index_names
        self._entries: dict[Key, Entry[T]] = {}
        self._index: dict[Key, set[Key]] = {}
        self._gone: dict[str, None] = {}

    def __iter__(self) -> Iterator[tuple[Key, Entry[T]]]:
        return iter(list(self._entries.items()))

    def get(self, key: Key) -> Entry[T] | None:
        return self._entries.get(key)

    def find(self, namespace: str, name: str) -> list[tuple[Key, Entry[T]]]:
        """Return the objects of a namespace that have this index name, in the order of their keys."""
        return [(key, self._entries[key]) for key in sorted(self._index.get((namespace, name), ()))]

    def put(self, document: Document) -> tuple[Key, Entry[T] | None, Entry[T] | None]:
        """Store an object, unless it was deleted or is not newer; return (key, entry before, entry now)."""
        key, uid, version = _identity(document)
        before = self._entries.get(key)
        if uid in self._gone or (before is not None and version <= before.version):
            return key, before, before
        entry = Entry(uid, version, self._owner(document), self._index_names(document), self._read(document))
        self._set(key, before, entry)
        return key, before, entry

    def drop(self, key: Key, uid: str) -> Entry[T] | None:
        """Remove the object with this key and uid, and ignore the uid later; return the removed entry, or None."""
        self._gone[uid] = None
        if len(self._gone) > REMEMBERED_DELETIONS:
            del self._gone[next(iter(self._gone))]
        if (before := self._entries.get(key)) is None or before.uid != uid:
            return None
        self._set(key, before, None)
        return before

    def _set(self, key: Key, before: Entry[T] | None, now: Entry[T] | None) -> None:
        old, new = before.index_names if before else frozenset(), now.index_names if now else frozenset()
        for name in old - new:
            found = self._index[key[0], name]
            found.discard(key)
            if not found:
                del self._index[key[0], name]
        for name in new - old:
            self._index.setdefault((key[0], name), set()).add(key)
        if now is None:
            del self._entries[key]
        else:
            self._entries[key] = now


class PodTable(Table[ObservedPod]):
    """Cached pods, and the total requests of the pods on each node."""

    def __init__(self) -> None:
        # A pod's owner is KubeRay's RayCluster, so a label names the job.
        super().__init__(
            lambda document: parse.pod(parse.slim_pod(document)),
            owner=lambda document: raw.text(document, "metadata", "labels", names.JOB_UID),
            index_names=_job_names,
        )
        self.requested: dict[str, Counter[str]] = {}
        """Total requests of all pods by node; a Counter is replaced, never changed in place."""
        self.requested_by_jobs: dict[str, Counter[str]] = {}
        """Total requests by node of the pods that belong to RLHFJobs."""

    def _set(self, key: Key, before: Entry[ObservedPod] | None, now: Entry[ObservedPod] | None) -> None:
        super()._set(key, before, now)
        for entry, sign in ((before, -1), (now, 1)):
            if entry and _holds_room(entry):
                for requested in (self.requested, *([self.requested_by_jobs] if entry.owner else [])):
                    _add(requested, entry.value, sign)


def _add(requested: dict[str, Counter[str]], pod: ObservedPod, sign: int) -> None:
    change = Counter({name: sign * number for name, number in pod.requests.items()})
    requested[pod.node] = requested.get(pod.node, Counter()) + change
    if not requested[pod.node]:
        del requested[pod.node]


def _holds_room(pod: Entry[ObservedPod]) -> bool:
    """Whether a pod takes up room of a node: it has a node and has not ended."""
    return bool(pod.value.node and pod.value.requests)


def _identity(document: Document) -> tuple[Key, str, int]:
    version = raw.text(document, "metadata", "resourceVersion")
    key = (raw.text(document, "metadata", "namespace"), raw.text(document, "metadata", "name"))
    return key, raw.text(document, "metadata", "uid"), int(version) if version.isdigit() else 0


def _inputs_and_claims(job: Document) -> frozenset[str]:
    spec, own = raw.mapping(job, "spec"), names.output_claim_name(raw.text(job, "metadata", "name"))
    inputs = (f"input:{each}" for each in inputs_of(spec))
    return frozenset((*inputs, *(f"claim:{each}" for each in (own, *claims_named(spec)))))


def _job_names(document: Document) -> frozenset[str]:
    return frozenset({raw.text(document, "metadata", "labels", names.JOB_NAME)} - {""})


def _job_of_claim(document: Document) -> str:
    claim = raw.text(document, "metadata", "name")
    jobs = (each for each in raw.entries(document, "metadata", "ownerReferences") if each.get("kind") == KIND)
    found = (raw.text(each, "uid") for each in jobs if names.output_claim_name(raw.text(each, "name")) == claim)
    return next(found, "")


def _rayjob_of_quota(document: Document) -> frozenset[str]:
    kind, name, _ = parse.owner(document)
    return frozenset((name,) if kind == "RayJob" else ())


class Cache:
    """Cached objects of all watched kinds."""

    def __init__(self) -> None:
        self.jobs = Table(
            parse.job, owner=lambda document: raw.text(document, "metadata", "uid"), index_names=_inputs_and_claims
        )
        self.rayjobs = Table(
            parse.parse_rayjob, owner=lambda document: parse.owner(document)[2], index_names=_job_names
        )
        self.pods = PodTable()
        self.nodes = Table(parse.node)
        self.claims = Table(parse.claim, owner=_job_of_claim)
        self.quotas = Table(parse.quota, index_names=_rayjob_of_quota)
        self.priorities = Table(parse.priority)
        self.slices = Table(parse.device_slice)
        self.has_line_moved = False
        """Whether jobs that wait for room may begin, since room was freed or a job has left the line."""
        self._lost_pods: dict[str, tuple[ObservedPod, ...]] = {}

    def put(self, kind: KindName, document: Document) -> set[Key]:
        """Store an object; return the keys of the jobs that the change concerns."""
        return self._concerned(kind, *getattr(self, kind).put(document))

    def remove(self, kind: KindName, document: Document) -> set[Key]:
        """Remove a deleted object; return the keys of the jobs that the change concerns."""
        key, uid, _ = _identity(document)
        return self._concerned(kind, key, getattr(self, kind).drop(key, uid), None)

    def _concerned(self, kind: KindName, key: Key, before: Entry[Any] | None, now: Entry[Any] | None) -> set[Key]:
        """Return the jobs that a change of an object concerns; none if only its resource version has changed."""
        if kind == "jobs":
            return self._jobs_of_job(key, before, now)
        if before and now and replace(before, version=now.version) == now:
            return set()
        jobs = self._jobs_of(kind, key, before) | self._jobs_of(kind, key, now)
        if kind == "pods" and now is None:
            self._remember_lost_pod(key[0], before)
        if kind == "nodes" or (kind == "pods" and _frees_room(before, now)):
            self.has_line_moved = True
        return jobs

    def lost_pods(self, job: ObservedJob) -> tuple[ObservedPod, ...]:
        """Return the deleted pods of the current attempt that had been disrupted; see Snapshot.lost_pods."""
        return tuple(pod for pod in self._lost_pods.get(job.uid, ()) if pod.attempt == job.status.attempt)

    def _remember_lost_pod(self, namespace: str, pod: Entry[ObservedPod] | None) -> None:
        # KubeRay may delete a pod before a pass has seen why the pod ended.
        if pod is None or not pod.value.was_disrupted:
            return
        jobs = filter(None, (self.jobs.get((namespace, name)) for name in pod.index_names))
        mappings = (job.value.status.mapping for job in jobs if job.uid == pod.owner)
        elastic = [mapping.elastic_pool if mapping else None for mapping in mappings]
        # The trainer survives the loss of an elastic pool's pods, so they explain no failure.
        if any(pool is None or pool.name != pod.value.pool for pool in elastic):
            earlier = (each for each in self._lost_pods.get(pod.owner, ()) if each.attempt == pod.value.attempt)
            self._lost_pods[pod.owner] = (*earlier, pod.value)[:MAX_LOST_PODS]

    def put_list(self, kind: KindName, listing: Listing, keys: Iterable[Key]) -> set[Key]:
        """Store a list's objects; remove the objects of `keys` that the list lacks; return the affected jobs' keys."""
        changed: set[Key] = set()
        there = {_identity(each)[1] for each in listing.items}
        table = getattr(self, kind)
        for key in list(keys):
            entry = table.get(key)
            # An object that is younger than the list cannot be in it.
            if entry is not None and entry.uid not in there and entry.version <= listing.version:
                changed |= self._concerned(kind, key, table.drop(key, entry.uid), None)
        for document in listing.items:
            changed |= self.put(kind, document)
        return changed

    def keys(self, kind: KindName, namespace: str | None) -> list[Key]:
        """Return the keys of all objects of a kind, in a namespace or in all."""
        return [key for key, _ in getattr(self, kind) if namespace in (None, key[0])]

    def _jobs_of(self, kind: KindName, key: Key, entry: Entry[object] | None) -> set[Key]:
        if entry is None:
            return set()
        namespace, name = key
        if kind in ("rayjobs", "pods"):
            return {(namespace, job) for job in entry.index_names}
        if kind == "claims":
            return {job for job, _ in self.jobs.find(namespace, f"claim:{name}")}
        if kind == "quotas":
            rayjobs = filter(None, (self.rayjobs.get((namespace, each)) for each in entry.index_names))
            return {(namespace, job) for rayjob in rayjobs for job in rayjob.index_names}
        if kind == "nodes":
            on_it = {(key[0], job) for key, pod in self.pods if pod.value.node == name for job in pod.index_names}
            return on_it | {job for job, entry in self.jobs if entry.value.status.phase in PLACED_LATER}
        return set()

    def _jobs_of_job(self, key: Key, before: Entry[ObservedJob] | None, now: Entry[ObservedJob] | None) -> set[Key]:
        if before is now:
            return set()
        if before is not None and (now is None or now.uid != before.uid):
            self._lost_pods.pop(before.uid, None)
        dependants = set() if _seen_by_dependants(before) == _seen_by_dependants(now) else self._dependants(key)
        if before is not None and _lets_others_pass(before.value, now):
            self.has_line_moved = True
        return {key} | dependants

    def _dependants(self, key: Key) -> set[Key]:
        """Return the jobs that read a job's output, directly or through other jobs."""
        found: set[Key] = set()
        waiting = [key]
        while waiting:
            namespace, name = waiting.pop()
            new = {job for job, _ in self.jobs.find(namespace, f"input:{name}")} - found
            found |= new
            waiting += new
        return found


def _lets_others_pass(before: ObservedJob, now: Entry[ObservedJob] | None) -> bool:
    """Whether a job has given up reserved room, which may have no pods yet, or may have left the line."""
    is_there = now is not None and now.uid == before.uid and not now.value.deleting
    was, new = before.status, now.value.status if now is not None and is_there else Status()
    may_be_ahead = was.phase == "Queued" or not was.conditions
    stays_ahead = is_there and was.phase == new.phase and bool(was.conditions) == bool(new.conditions)
    frees_room = was.reserved != new.reserved and bool(_reserved(was) - _reserved(new))
    return frees_room or (may_be_ahead and not stays_ahead)


def _reserved(status: Status) -> Counter[str]:
    return sum((each.amounts for each in status.reserved), Counter[str]())


def _frees_room(before: Entry[ObservedPod] | None, now: Entry[ObservedPod] | None) -> bool:
    """Whether a pod's change frees devices, or room of an RLHFJob's pod; other free room is noticed once a minute."""
    if before is None or not _holds_room(before) or (now is not None and _holds_room(now)):
        return False
    return bool(before.owner) or any("/" in name for name in before.value.requests)


def _seen_by_dependants(job: Entry[ObservedJob] | None) -> object:
    """Return the values of a job on which jobs that read its output depend; None if the job does not exist."""
    return job and (job.uid, job.value.spec, job.value.status.phase, job.value.status.output)
