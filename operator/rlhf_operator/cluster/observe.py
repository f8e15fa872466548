"""Snapshots of a job for one pass: from the cache, or by live reads if the next step cannot be undone."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from rlhf_operator import conditions, names, observed_attempt
from rlhf_operator.cluster import parse, raw, view
from rlhf_operator.cluster.cache import Cache, Key
from rlhf_operator.cluster.client import FORBIDDEN, Client, tolerate
from rlhf_operator.cluster.discovery import Offer
from rlhf_operator.cluster.heartbeats import Heartbeats
from rlhf_operator.cluster.raw import Listing
from rlhf_operator.cluster.resources import EVENTS, JOBS, PODS, RAYJOBS
from rlhf_operator.placement.turns import Turns
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import (
    ObservedClaim,
    ObservedJob,
    ObservedNode,
    ObservedPod,
    ObservedRayJob,
    Snapshot,
    claims_named,
)

NEVER: Final = 2**63
FAILING_SECONDS: Final = 60.0  # of failing passes, after which a job does not hold up younger jobs in line


@dataclass(eq=False)
class Observer:
    """Maker of Snapshots; `enqueue` gets the keys of other jobs that an object read from the API server concerns."""

    client: Client
    cache: Cache
    heartbeats: Heartbeats
    settings: Settings
    enqueue: Callable[[set[Key]], None]
    offer: Offer = field(default_factory=Offer)
    """Kinds and capabilities of the cluster; none until the API server was asked."""
    unusable_groups: tuple[str, ...] = ()
    failing: dict[Key, float] = field(default_factory=dict)
    """Time since which every pass over a job has failed, by job, in seconds of this process's monotonic clock."""

    def use_groups(self, settings: Settings, unusable: tuple[str, ...]) -> bool:
        """Use these settings from now on. If node groups have changed, wake all jobs and return True."""
        before = self.settings, self.unusable_groups
        self.settings, self.unusable_groups = settings, unusable
        if has_changed := before != (settings, unusable):
            self.enqueue(set(self.keys()))
        return has_changed

    def keys(self) -> list[Key]:
        """Return the keys of all jobs, the oldest first: younger jobs wait for the first pass of older ones."""
        return [key for key, _ in sorted(self.cache.jobs, key=lambda job: job[1].value.created)]

    async def sync(self) -> None:
        """List all objects of all kinds into the cache: at the start, and to repair what a watch has missed."""
        failed: Exception | None = None
        # One after the other: several long lists at once would all be in memory.
        for kind in self.offer.kinds:
            for namespace in (kind.namespaced and self.settings.namespaces) or (None,):
                try:
                    slim = parse.slim_pod if kind.name == "pods" else None
                    listing = await self.client.list(kind.resource, namespace, kind.selector, slim=slim)
                    self.enqueue(self.cache.put_list(kind.name, listing, self.cache.keys(kind.name, namespace)))
                except Exception as error:  # noqa: BLE001 the other kinds are listed all the same
                    failed = error
        if failed:
            raise failed
        self.heartbeats.forget_all_but({job.uid for _, job in self.cache.jobs})

    async def observe(self, key: Key, *, fresh: bool, since: datetime) -> Snapshot | None:
        """Return the Snapshot of a job; None if the job does not exist.

        fresh: read the job's objects from the API server. since: time from which silence of a pod or node counts.
        """
        foreign: tuple[ObservedRayJob, ...] = ()
        if fresh:
            await self._read_live(key)
        if (entry := self.cache.jobs.get(key)) is None:
            return None
        if fresh and "kuberay" in self.offer.capabilities:
            foreign = await self._foreign_rayjobs(entry.value)
        await self._read_last_heartbeat(entry.value)
        snapshot = self._snapshot(entry.value, foreign, fresh=fresh, since=since)
        return replace(snapshot, complaint=await self._complaint(snapshot)) if fresh else snapshot

    def head(self, key: Key) -> tuple[str, ObservedPod] | None:
        """Return (uid of the job, head pod of its current attempt); None if no head pod is running."""
        if (entry := self.cache.jobs.get(key)) is None:
            return None
        job = entry.value
        for pod in view.pods_of(self.cache, job):
            if pod.role == names.CONTROLLER and pod.attempt == job.status.attempt and pod.ip and pod.phase == "Running":
                return job.uid, pod
        return None

    async def _read_live(self, key: Key) -> None:
        """Read the job first, then its RayJobs and pods into the cache: a write fails if the job changes later."""
        namespace, name = key
        found = await self.client.get(JOBS, namespace, name)
        listing = Listing(items=() if found is None else (found,), version=NEVER)
        changed = self.cache.put_list("jobs", listing, [key])
        entry = self.cache.jobs.get(key)
        # The status names an attempt before its RayJob is made, so a new job needs no lists. For each list by label the
        # server scans all objects of the kind: for a thousand new jobs it would read a million.
        has_attempt = entry is not None and entry.value.status.attempt is not None
        if found and (has_attempt or self.cache.rayjobs.find(*key) or self.cache.pods.find(*key)):
            selector = f"{names.MANAGED_BY}={names.OPERATOR},{names.JOB_NAME}={name}"
            pods = await self.client.list(PODS, namespace, selector)
            changed |= self.cache.put_list("pods", pods, [each for each, _ in self.cache.pods.find(*key)])
            if "kuberay" in self.offer.capabilities:
                rayjobs = await self.client.list(RAYJOBS, namespace, selector)
                keys = [each for each, _ in self.cache.rayjobs.find(*key)]
                changed |= self.cache.put_list("rayjobs", rayjobs, keys)
        self.enqueue(changed - {key})

    async def _foreign_rayjobs(self, job: ObservedJob) -> tuple[ObservedRayJob, ...]:
        """Return the RayJobs that have the name of the job's current or next attempt but lack the job's label."""
        attempt = job.status.attempt or 0
        expected = {names.rayjob_name(job.name, number) for number in (attempt, attempt + 1) if number}
        unseen = sorted(expected - {key[1] for key, _ in self.cache.rayjobs.find(job.namespace, job.name)})
        found = await asyncio.gather(*(self.client.get(RAYJOBS, job.namespace, name) for name in unseen))
        return tuple(parse.parse_rayjob(each, job.uid) for each in found if each is not None)

    async def _read_last_heartbeat(self, job: ObservedJob) -> None:
        """Read the trainer's last status once Ray reports the end of the attempt, before anything is decided."""
        rayjob = self.cache.rayjobs.get((job.namespace, names.rayjob_name(job.name, job.status.attempt or 0)))
        ended = ("SUCCEEDED", "FAILED", "STOPPED")
        over = rayjob is not None and rayjob.owner == job.uid and rayjob.value.job_status in ended
        known = self.heartbeats.last(job.uid, job.status.attempt)
        if over and not (known and known.complete) and (head := self.head((job.namespace, job.name))):
            await self.heartbeats.read(*head)

    async def _complaint(self, snapshot: Snapshot) -> str:
        """Return the newest event on a pod that does not start, or warning on objects that lack pods; "" if none."""
        if waiting := observed_attempt.waiting_container(snapshot):
            about = {f"regarding.kind=Pod,regarding.name={waiting[0].name}": waiting[0].name}
        else:
            about = {f"type=Warning,regarding.kind={kind}": name for kind, name in _without_pods(snapshot).items()}
        events = [
            parse.complaint(each)
            for fields, name in about.items()
            for each in (await self._events(snapshot.job.namespace, fields)).items
            if re.fullmatch(name, raw.text(each, "regarding", "name"))
        ]
        return max(events, default=("", ""))[1]

    async def _events(self, namespace: str, fields: str) -> Listing:
        """Return the events that a field selector chooses; none if the operator may not read events."""
        with tolerate(FORBIDDEN):
            return await self.client.list(EVENTS, namespace, fields=fields)
        return Listing(items=(), version=0)

    def _snapshot(
        self, job: ObservedJob, foreign: tuple[ObservedRayJob, ...], *, fresh: bool, since: datetime
    ) -> Snapshot:
        inputs = {each.name: each for each in view.inputs(self.cache, job)}
        pods = tuple(view.pods_of(self.cache, job))
        rayjobs = self.cache.rayjobs.find(job.namespace, job.name)
        quotas = self.cache.quotas.find(job.namespace, names.rayjob_name(job.name, job.status.attempt or 0))
        taken, by_jobs = view.held_by_others(self.cache, job, self.settings)
        others = [each for each in self._jobs() if each.uid != job.uid]
        return Snapshot(
            job=job,
            rayjobs=(*(replace(each.value, owned=each.owner == job.uid) for _, each in rayjobs), *foreign),
            pods=tuple(each for each in pods if each.role not in (names.READER, names.SANDBOX)),
            readers=tuple(each for each in pods if each.role == names.READER),
            sandboxes=tuple(each for each in pods if each.role == names.SANDBOX),
            lost_pods=self.cache.lost_pods(job),
            inputs=inputs,
            claims=dict(self._claims(job, inputs)),
            quota=quotas[0][1].value if quotas else None,
            heartbeat=self.heartbeats.last(job.uid, job.status.attempt),
            measured=tuple(view.measured_attempts(self.cache, job)) if fresh else (),
            nodes=self._nodes(),
            priorities=self._priorities(),
            unusable_groups=self.unusable_groups,
            claimable_gpus=view.claimable_gpus(self.cache),
            taken=taken,
            held_by_jobs=by_jobs,
            line=tuple(each for each in self._line() if each.uid != job.uid),
            pausing=tuple(each for each in others if each.status.next_attempt_time and not each.status.reserved),
            holders=tuple(each for each in others if each.status.reserved),
            capabilities=self.offer.capabilities,
            watching_since=since,
            fresh=fresh,
        )

    def _priorities(self) -> dict[str, int]:
        """Return the value of each priority class by name; the default for pods without a class is under ''."""
        classes = {name: entry.value for (_, name), entry in self.cache.priorities}
        default = max((value for value, is_default in classes.values() if is_default), default=0)
        return {"": default, **{name: value for name, (value, _) in classes.items()}}

    def next_in_line(self) -> list[Key]:
        """Return the keys of jobs that may begin now; [] unless room was freed or the line moved since the last call.

        Jobs that began before their turn, or hold extra nodes, are returned, too: a waiting job may need their room.
        """
        if not self.cache.has_line_moved:
            return []
        self.cache.has_line_moved = False
        holders = [job for job in self._jobs() if job.status.reserved]
        turns = Turns(self._nodes() or (), self._priorities(), holders, self.settings)
        givers = (job for job in holders if _may_give_room(job))
        return [(job.namespace, job.name) for job in (*turns.first(self._line()), *givers)]

    def _nodes(self) -> tuple[ObservedNode, ...] | None:
        """Return the nodes, with those that groups may add; None if the operator may not list them."""
        return view.nodes_of(self.cache, self.settings) if "nodes" in self.offer.capabilities else None

    def _line(self) -> Iterator[ObservedJob]:
        """Yield the jobs that wait for room, or may do so after their first pass."""
        given_up = time.monotonic() - FAILING_SECONDS
        for job in self._jobs():
            waits = not job.status.conditions or conditions.in_line(job.status)
            if waits and self.failing.get((job.namespace, job.name), NEVER) > given_up:
                yield job

    def _jobs(self) -> Iterator[ObservedJob]:
        return (entry.value for _, entry in self.cache.jobs if not entry.value.deleting)

    def _claims(self, job: ObservedJob, inputs: dict[str, ObservedJob]) -> Iterator[tuple[str, ObservedClaim]]:
        read = claims_named({"outputs": [each.output_uri for each in inputs.values()]})
        for name in sorted({names.output_claim_name(job.name)} | claims_named(job.spec) | read):
            if entry := self.cache.claims.get((job.namespace, name)):
                yield name, replace(entry.value, owned=entry.owner == job.uid)


def _may_give_room(job: ObservedJob) -> bool:
    """Whether a job that holds room began before its turn, or holds extra nodes."""
    return any(each.extra for each in job.status.reserved) or any(each.backfilled for each in job.status.attempts[-1:])


def _without_pods(snapshot: Snapshot) -> dict[str, str]:
    """Return name patterns by kind, for objects of the job that should have pods by now but have none."""
    job, rayjob = snapshot.job, snapshot.current_rayjob()
    mapped = conditions.found(job.status.conditions, "Mapped")
    if mapped is not None and mapped.reason in conditions.READING and not snapshot.readers:
        return {"Job": f"{job.name}-shapes-.*"}
    is_starting = rayjob is not None and rayjob.deployment_status == "Initializing" and not rayjob.deleting
    if rayjob is None or not is_starting or any(pod.attempt == rayjob.attempt for pod in snapshot.pods):
        return {}
    return {"RayJob": rayjob.name, "RayCluster": f"{rayjob.name}-[a-z0-9]+"}
