"""Facts about one job from the cache: its pods and input jobs, and the room on nodes that other pods and jobs hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rlhf_api.status import Attempt
from rlhf_operator import conditions, names
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.placement.node_groups import with_coming_nodes
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedNode, ObservedPod, inputs_of

Held: TypeAlias = dict[str, Counter[str]]
"""Amounts by node and resource, in the units of `amounts`."""


def pods_of(cache: Cache, job: ObservedJob) -> Iterator[ObservedPod]:
    """Yield the pods of the job itself, not those of an earlier job of the same name."""
    for _, each in cache.pods.find(job.namespace, job.name):
        if each.owner == job.uid:
            yield each.value


def nodes_of(cache: Cache, settings: Settings) -> tuple[ObservedNode, ...]:
    """Return the nodes that exist and those that node groups may still add."""
    return with_coming_nodes((entry.value for _, entry in cache.nodes), settings)


def claimable_gpus(cache: Cache) -> Held:
    """Return the number of GPUs that pods can have only by resource claims (DRA), by node and driver."""
    found: Held = {}
    for _, entry in cache.slices:
        node, driver, devices = entry.value
        if driver.startswith("gpu."):  # as all vendors name it: gpu.nvidia.com
            found.setdefault(node, Counter())[driver] += devices
    return found


def held_by_others(cache: Cache, job: ObservedJob, settings: Settings) -> tuple[Held, Held]:
    """Return (amounts by node that other pods and jobs hold, the amounts of these that other RLHFJobs will free).

    Room reserved for missing pods counts on its node, or on a node with room if foreign pods have taken it. Room on a
    coming node that its group has added in the meantime counts on a node of this group first.
    """
    taken = _without(cache.pods.requested, pods_of(cache, job))
    by_jobs = _without(_without(cache.pods.requested_by_jobs, pods_of(cache, job)), _kept(cache))
    missing = _missing(cache, job)
    for node, amount in missing.items():
        for held in (taken, by_jobs):
            held[node] = held.get(node, Counter()) + amount
    usable = [each for each in nodes_of(cache, settings) if each.ready and each.schedulable] if missing else []
    for node, amount in missing.items():
        _move_surplus(node, amount, _room_near(node, usable, settings), taken, by_jobs)
    return taken, by_jobs


def _room_near(node: str, usable: Sequence[ObservedNode], settings: Settings) -> Held:
    """Return the allocatable amounts of usable nodes by name; if `node` is yet to come, its group's nodes are first."""
    group = settings.group(names.group_of(node))
    labels = group.match_labels if group else {}
    ordered = sorted(usable, key=lambda each: not labels.items() <= each.labels.items())
    return {each.name: each.room for each in ordered}


def _kept(cache: Cache) -> Iterator[ObservedPod]:
    """Yield the pods that failed jobs keep for debugging; such jobs do not give their room back."""
    for _, entry in cache.jobs:
        job = entry.value
        if conditions.keeps_pods(job.status) and not job.deleting:
            yield from (pod for pod in pods_of(cache, job) if pod.deleting_since is None)


def _missing(cache: Cache, job: ObservedJob) -> Held:
    """Return the room, by node, that is reserved for other jobs and not yet taken by their pods."""
    missing: Held = {}
    for _, entry in cache.jobs:
        other = entry.value
        if other.uid != job.uid and other.status.reserved and not other.deleting:
            reserved: Held = {}
            for each in other.status.reserved:
                reserved[each.node] = reserved.get(each.node, Counter()) + each.amounts
            for node, amount in _without(reserved, pods_of(cache, other)).items():
                missing[node] = missing.get(node, Counter()) + amount
    return {node: amount for node, amount in missing.items() if amount}


def inputs(cache: Cache, job: ObservedJob) -> Iterator[ObservedJob]:
    """Yield the jobs whose output this job reads (job://), and in turn their input jobs, each once."""
    known: set[str] = set()
    waiting = sorted(inputs_of(job.spec))
    while waiting:
        name = waiting.pop()
        entry = None if name in known else cache.jobs.get((job.namespace, name))
        known.add(name)
        if entry is not None:
            yield entry.value
            waiting += sorted(inputs_of(entry.value.spec))


def measured_attempts(cache: Cache, job: ObservedJob) -> Iterator[Attempt]:
    """Yield the latest attempt with measured steps of each other job of the namespace."""
    for (namespace, name), entry in cache.jobs:
        if namespace == job.namespace and name != job.name:
            yield from [each for each in entry.value.status.attempts if each.measured][-1:]


def _without(held: Held, pods: Iterable[ObservedPod]) -> Held:
    """Return amounts by node less the pods' requests; a pod on a new node takes up room held on a coming node."""
    rest = dict(held)
    for pod in pods:
        requests = Counter(pod.requests)
        coming = (name for name, left in rest.items() if names.group_of(name) and requests <= left)
        place = pod.node if pod.node in rest or not pod.node else next(coming, "")
        if place in rest:
            rest[place] = rest[place] - requests
    return rest


def _move_surplus(node: str, reserved: Counter[str], room: Held, taken: Held, by_jobs: Held) -> None:
    """Move reserved amounts for which a node has no room left to nodes with room, in `taken` and `by_jobs`."""
    surplus = (taken[node] - room.get(node, Counter())) & reserved
    for other, allocatable in room.items() if surplus else ():
        moved = surplus & (allocatable - taken.get(other, Counter()))
        surplus -= moved
        for held in (taken, by_jobs):
            held[node] = held[node] - moved
            held[other] = held.get(other, Counter()) + moved
