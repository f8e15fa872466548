"""Trial placement of an attempt's pods on the nodes, by their requests, affinities and tolerations."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlhf_api.checks.pod_template import PodSpec
from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement, Reserved, ReservedAmount
from rlhf_operator.placement.suitable import suits
from rlhf_operator.resources import sandboxes, workers
from rlhf_operator.resources.attempt import head_group
from rlhf_operator.resources.pods import AttemptPods
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, ObservedNode, ObservedPod, Snapshot, requests_of

IMPLIED_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
"""Resources that every node has enough of, unless the node reports how much it has."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of equal pods of an attempt: the head pod, or the workers of a pool."""

    label: str
    count: int
    pod: PodSpec
    requests: Counter[str]
    is_elastic: bool = False
    """Whether the pods may leave during the attempt: of the nodes yet to come, they prefer spot nodes."""

    def __str__(self) -> str:
        """Text for messages: `2 pods of pool main (16 CPUs, 128Gi, 2 nvidia.com/gpu each)`."""
        rest = {name: number for name, number in self.requests.items() if name not in IMPLIED_RESOURCES and number}
        others = [f"{number if '/' in name else f'{number / 2**30:.3g}Gi'} {name}" for name, number in rest.items()]
        own = [f"{self.requests['cpu'] / 1000:g} CPUs", f"{self.requests['memory'] / 2**30:.3g}Gi", *others]
        return f"{self.label} ({', '.join(own)}{' each' * (self.count > 1)})"


@dataclass(frozen=True, kw_only=True)
class Room:
    """Result of a trial placement of an attempt's pods."""

    reserved: tuple[Reserved, ...]
    lacks: str
    """Description of the pods that find no node; empty if all pods find one."""


def place(groups: Iterable[Group], snapshot: Snapshot) -> Room:
    """Place the pods of an attempt on the nodes for trial, the largest pods first.

    Largest means most devices, and among equals the largest share of the most CPU, memory or disk that a node has free.
    Each pod goes to the node with the fewest free devices, and among equals to the one with the most free CPU. Nodes to
    come are last, in the order of `turn`; spot nodes among them are first for elastic pools, and last for other pods.
    """
    usable = {node.name: node for node in snapshot.nodes or () if node.ready and node.schedulable}
    free = {name: Counter(node.room) - Counter(snapshot.taken.get(name, {})) for name, node in usable.items()}
    most = {each: max((left[each] for left in free.values()), default=0) or math.inf for each in IMPLIED_RESOURCES}
    held: dict[str, Counter[str]] = {}
    lacks = []

    def size(group: Group) -> tuple[int, float]:
        return _devices(group.requests), max(group.requests[each] / most[each] for each in most)

    for group in sorted(groups, key=size, reverse=True):
        missing = _place_group(group, usable, free, held)
        if missing:
            lacks.append(f"{missing} of {group}" if group.count > 1 else str(group))
    return Room(reserved=_reserved(held), lacks=" and ".join(lacks))


def _place_group(
    group: Group, nodes: Mapping[str, ObservedNode], free: Mapping[str, Counter[str]], held: dict[str, Counter[str]]
) -> int:
    """Place the pods of a group: their requests move from `free` to `held`. Return the number of pods left over."""
    missing, needed = group.count, {name: number for name, number in group.requests.items() if number}
    fitting = [name for name, node in nodes.items() if suits(node, group.pod)]

    def last(name: str) -> tuple[bool, bool, int, int, int, str]:
        node = nodes[name]
        is_coming = node.turn > 0
        is_unwanted = is_coming and node.spot != group.is_elastic
        return is_coming, is_unwanted, node.turn, _devices(free[name]), -free[name]["cpu"], name

    for name in sorted(fitting, key=last):
        known = [each for each in needed if each in nodes[name].allocatable or each not in IMPLIED_RESOURCES]
        here = max(min([missing, *(free[name][each] // needed[each] for each in known)]), 0)
        if here:
            requests = Counter({resource: here * number for resource, number in group.requests.items()})
            free[name].subtract(requests)
            held[name] = held.get(name, Counter()) + requests
            missing -= here
    return missing


def with_head(groups: Sequence[Group], snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with room taken for the head pod, the first group, which may use nodes that workers may not.

    The head pod is put on the suitable node with most free CPU, even if it does not fit there.
    """
    taken, suiting = snapshot.taken, [node for node in snapshot.nodes or () if groups and suits(node, groups[0].pod)]
    if not suiting:
        return snapshot
    node = max(suiting, key=lambda each: each.room["cpu"] - taken.get(each.name, {}).get("cpu", 0)).name
    return replace(snapshot, taken={**taken, node: Counter(taken.get(node, {})) + groups[0].requests})


def held_by(pods: Iterable[ObservedPod], *, is_extra: bool = False) -> tuple[Reserved, ...]:
    """Return the requests of pods by node, as reserved room. is_extra: of an elastic pool, beyond its fewest nodes."""
    held: dict[str, Counter[str]] = {}
    for pod in pods:
        held[pod.node] = held.get(pod.node, Counter()) + Counter(pod.requests)
    return _reserved(held, is_extra=is_extra)


def _reserved(held: Mapping[str, Counter[str]], *, is_extra: bool = False) -> tuple[Reserved, ...]:
    found = []
    for node, requests in sorted(held.items()):
        amounts = tuple(ReservedAmount(resource=name, amount=amount) for name, amount in sorted(requests.items()))
        found.append(Reserved(node=node, requests=amounts, extra=is_extra))
    return tuple(found)


def groups_of(
    snapshot: Snapshot, job: Job, mapping: MappedPlacement, settings: Settings, avoided: Sequence[str] = ()
) -> list[Group]:
    """Return the groups of an attempt's pods, the head pod first. avoided: names of nodes that pods must not use."""
    pods = AttemptPods(snapshot=snapshot, job=job, mapping=mapping, settings=settings, avoided=avoided)
    groups = [_group("the head pod", 1, head_group(pods))]
    for each in workers.groups(pods):
        count, pool = each["replicas"] * each["numOfHosts"], f"pool {each['groupName']}"
        label = f"{count} pods of {pool}" if count > 1 else f"the pod of {pool}"
        groups.append(_group(label, count, each, is_elastic=each["maxReplicas"] > each["minReplicas"]))
    return [*groups, *_sandboxes(job, settings)]


def _sandboxes(job: Job, settings: Settings) -> list[Group]:
    """Return the group of the sandboxes that a job keeps; none if it asks for none."""
    if (asked := job.spec.sandbox) is None:
        return []
    pod = {"template": {"spec": sandboxes.pod(job, asked, settings)}}
    return [_group(f"{asked.warm} sandboxes" if asked.warm > 1 else "the sandbox", asked.warm, pod)]


def with_sandboxes(
    held: tuple[Reserved, ...], job: Job | None, snapshot: Snapshot, settings: Settings
) -> tuple[Reserved, ...]:
    """Return the room that an attempt's pods hold, with room for its sandboxes, whose nodes change all the time."""
    if job is None or job.spec.sandbox is None:
        return held
    together: dict[str, Counter[str]] = {}
    for each in (*held, *place(_sandboxes(job, settings), snapshot.also_taken(held)).reserved):
        together[each.node] = together.get(each.node, Counter()) + each.amounts
    return _reserved(together)


def _group(label: str, count: int, group: Document, *, is_elastic: bool = False) -> Group:
    pod = group["template"]["spec"]
    known = PodSpec.model_validate(pod, by_alias=True)
    return Group(label=label, count=count, pod=known, requests=requests_of(pod), is_elastic=is_elastic)


def _devices(amounts_of: Mapping[str, int]) -> int:
    return sum(number for name, number in amounts_of.items() if "/" in name)
