"""Whether all pods of an attempt find nodes: a try run of the scheduler, by what the pods request and may tolerate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_api.checks.pod_template import PodSpec
from rlhf_api.status import Reserved, ReservedAmount
from rlhf_operator.actions import Manifest
from rlhf_operator.placement.suitable import suits
from rlhf_operator.snapshot import Document, ObservedNode, ObservedPod, Snapshot, requests_of

OFTEN_UNSAID: Final = ("cpu", "memory")
"""Of these a node that does not say what it has is taken to have enough."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal pods of an attempt."""

    what: str
    count: int
    pod: PodSpec
    requests: Counter[str]

    def __str__(self) -> str:
        """For messages: `2 pods of pool main (16 CPUs, 128Gi, 2 nvidia.com/gpu each)`."""
        rest = {name: number for name, number in self.requests.items() if name not in OFTEN_UNSAID and number}
        others = [f"{number if '/' in name else f'{number / 2**30:.3g}Gi'} {name}" for name, number in rest.items()]
        own = [f"{self.requests['cpu'] / 1000:g} CPUs", f"{self.requests['memory'] / 2**30:.3g}Gi", *others]
        return f"{self.what} ({', '.join(own)}{' each' * (self.count > 1)})"


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where the pods of an attempt would go."""

    reserved: tuple[Reserved, ...]
    lacks: str
    """Which pods find no node, in words; empty where all do."""


def room_for(rayjob: Manifest, nodes: Iterable[ObservedNode], taken: Mapping[str, Mapping[str, int]]) -> Room:
    """The largest pods first, each on the node with the fewest free devices, and of those on the one with most CPU.

    taken: what others hold on each node.
    """
    there = {node.name: node for node in nodes if node.ready and node.schedulable}
    free = {name: Counter(node.room) for name, node in there.items()}
    for name, left in free.items():
        left.subtract(taken.get(name, {}))
    held: dict[str, Counter[str]] = {}
    lacks = []
    for group in sorted(_groups(rayjob), key=lambda each: (-_devices(each.requests), -each.requests["memory"])):
        missing = group.count
        fitting = [name for name, node in there.items() if suits(node, group.pod)]
        for name in sorted(fitting, key=lambda each: (_devices(free[each]), -free[each]["cpu"], each)):
            if here := _times(group.requests, free[name], there[name], most=missing):
                taking = Counter({what: here * number for what, number in group.requests.items()})
                free[name].subtract(taking)
                held[name] = held.get(name, Counter()) + taking
                missing -= here
        if missing:
            lacks.append(f"{missing} of {group}" if group.count > 1 else str(group))
    return Room(reserved=_reserved(held), lacks=" and ".join(lacks))


def with_head(rayjob: Manifest, snapshot: Snapshot) -> Mapping[str, Mapping[str, int]]:
    """What is taken with the head pod on the suitable node that has most CPU free, whether that is enough or not."""
    taken, (head, *_) = snapshot.taken, _groups(rayjob)
    suiting = [node for node in snapshot.nodes or () if suits(node, head.pod)]
    if not suiting:
        return taken
    node = max(suiting, key=lambda each: each.room["cpu"] - taken.get(each.name, {}).get("cpu", 0)).name
    return {**taken, node: Counter(taken.get(node, {})) + head.requests}


def held_by(pods: Iterable[ObservedPod]) -> tuple[Reserved, ...]:
    """The room that pods hold."""
    held: dict[str, Counter[str]] = {}
    for pod in pods:
        held[pod.node] = held.get(pod.node, Counter()) + Counter(pod.requests)
    return _reserved(held)


def _reserved(held: Mapping[str, Counter[str]]) -> tuple[Reserved, ...]:
    return tuple(
        Reserved(
            node=node,
            requests=tuple(ReservedAmount(resource=name, amount=held[node][name]) for name in sorted(held[node])),
        )
        for node in sorted(held)
    )


def _groups(rayjob: Manifest) -> list[Group]:
    """The head pod, and the workers of each pool."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    found = [_group("the head pod", 1, cluster["headGroupSpec"])]
    for each in cluster["workerGroupSpecs"]:
        count = each["numOfHosts"]
        what = f"{count} pods of pool {each['groupName']}" if count > 1 else f"the pod of pool {each['groupName']}"
        found.append(_group(what, count, each))
    return found


def _group(what: str, count: int, group: Document) -> Group:
    pod = group["template"]["spec"]
    wishes = PodSpec.model_validate(pod, by_alias=True)
    return Group(what=what, count=count, pod=wishes, requests=requests_of(pod))


def _devices(amounts_of: Mapping[str, int]) -> int:
    return sum(number for name, number in amounts_of.items() if "/" in name)


def _times(requests: Mapping[str, int], free: Mapping[str, int], node: ObservedNode, *, most: int) -> int:
    """How many such pods a node has room for."""
    asked = {name: number for name, number in requests.items() if number}
    known = [name for name in asked if name in node.allocatable or name not in OFTEN_UNSAID]
    return max(min([most, *(free.get(name, 0) // asked[name] for name in known)]), 0)
