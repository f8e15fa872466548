"""Trial placement of an attempt's pods on the nodes, by their requests, affinities and tolerations."""

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

IMPLIED_RESOURCES: Final = ("cpu", "memory")
"""Resources that every node has enough of, unless the node reports how much it has."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of equal pods of an attempt: the head pod, or the workers of a pool."""

    label: str
    count: int
    pod: PodSpec
    requests: Counter[str]

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


def room_for(rayjob: Manifest, nodes: Iterable[ObservedNode], taken: Mapping[str, Mapping[str, int]]) -> Room:
    """Place an attempt's pods on nodes for trial, the largest pods first.

    Each pod goes to the node with the fewest free devices, and among equals to the one with the most free CPU. taken:
    amounts that others hold on each node.
    """
    usable = {node.name: node for node in nodes if node.ready and node.schedulable}
    free = {name: Counter(node.room) for name, node in usable.items()}
    for name, left in free.items():
        left.subtract(taken.get(name, {}))
    held: dict[str, Counter[str]] = {}
    lacks = []
    for group in sorted(_groups(rayjob), key=lambda each: (-_devices(each.requests), -each.requests["memory"])):
        missing = _place_group(group, usable, free, held)
        if missing:
            lacks.append(f"{missing} of {group}" if group.count > 1 else str(group))
    return Room(reserved=_reserved(held), lacks=" and ".join(lacks))


def _place_group(
    group: Group, nodes: Mapping[str, ObservedNode], free: Mapping[str, Counter[str]], held: dict[str, Counter[str]]
) -> int:
    """Place the pods of a group; return the number of pods without a node.

    Requests of placed pods move from `free` to `held`, in place.
    """
    missing = group.count
    fitting = [name for name, node in nodes.items() if suits(node, group.pod)]
    for name in sorted(fitting, key=lambda each: (_devices(free[each]), -free[each]["cpu"], each)):
        if here := _capacity(group.requests, free[name], nodes[name], most=missing):
            requests = Counter({resource: here * number for resource, number in group.requests.items()})
            free[name].subtract(requests)
            held[name] = held.get(name, Counter()) + requests
            missing -= here
    return missing


def with_head(rayjob: Manifest, snapshot: Snapshot) -> Mapping[str, Mapping[str, int]]:
    """Return the amounts taken on each node, with those of the head pod added.

    The head pod is put on the suitable node with most free CPU, even if it does not fit there.
    """
    taken, (head, *_) = snapshot.taken, _groups(rayjob)
    suiting = [node for node in snapshot.nodes or () if suits(node, head.pod)]
    if not suiting:
        return taken
    node = max(suiting, key=lambda each: each.room["cpu"] - taken.get(each.name, {}).get("cpu", 0)).name
    return {**taken, node: Counter(taken.get(node, {})) + head.requests}


def held_by(pods: Iterable[ObservedPod]) -> tuple[Reserved, ...]:
    """Return the requests of pods by node, as reserved room."""
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
    """Return the groups of equal pods of an attempt: the head pod, and the workers of each pool."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    found = [_group("the head pod", 1, cluster["headGroupSpec"])]
    for each in cluster["workerGroupSpecs"]:
        count = each["numOfHosts"]
        label = f"{count} pods of pool {each['groupName']}" if count > 1 else f"the pod of pool {each['groupName']}"
        found.append(_group(label, count, each))
    return found


def _group(label: str, count: int, group: Document) -> Group:
    pod = group["template"]["spec"]
    wishes = PodSpec.model_validate(pod, by_alias=True)
    return Group(label=label, count=count, pod=wishes, requests=requests_of(pod))


def _devices(amounts_of: Mapping[str, int]) -> int:
    return sum(number for name, number in amounts_of.items() if "/" in name)


def _capacity(requests: Mapping[str, int], free: Mapping[str, int], node: ObservedNode, *, most: int) -> int:
    """Number of pods with these requests for which a node has room, at most `most`."""
    needed = {name: number for name, number in requests.items() if number}
    known = [name for name in needed if name in node.allocatable or name not in IMPLIED_RESOURCES]
    return max(min([most, *(free.get(name, 0) // needed[name] for name in known)]), 0)
