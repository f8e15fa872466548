"""Nodes that do not exist yet: those that an autoscaler may still add to the node groups of the settings."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlhf_operator import names
from rlhf_operator.settings import NodesOfGroup, Settings
from rlhf_operator.snapshot import ObservedNode


def with_coming_nodes(nodes: Iterable[ObservedNode], settings: Settings) -> tuple[ObservedNode, ...]:
    """Return the nodes, and after them those that groups may still add: first those up to each group's `min`."""
    existing = tuple(nodes)
    coming = [each for group in settings.node_groups for each in _coming(group, existing, settings)]
    ordered = (node for _, node in sorted(coming, key=lambda each: each[0]))
    return (*existing, *(replace(node, turn=turn) for turn, node in enumerate(ordered, start=1)))


def _coming(
    group: NodesOfGroup, existing: tuple[ObservedNode, ...], settings: Settings
) -> Iterator[tuple[bool, ObservedNode]]:
    """Yield (whether the node is added for waiting pods only, node) for the nodes that a group may still add.

    Numbers begin after the nodes that exist, so the lowest one disappears when a node comes.
    """
    if not group.most:
        return
    there = sum(group.match_labels.items() <= node.labels.items() for node in existing)
    product = {names.GPU_PRODUCTS[0]: group.gpu} if group.gpu else {}
    gpus = {settings.gpu_resource_name: str(group.gpus_per_node)} if group.gpu else {}
    known = {"cpu": group.cpu, "memory": group.memory}
    for number in range(there + 1, group.most + 1):
        node = ObservedNode(
            name=f"{group.name}{names.OF_GROUP}{number:05}",  # the lowest numbers come first
            ready=True,
            schedulable=True,
            labels={**product, **group.match_labels},
            taints=tuple((each.key, each.value, each.effect) for each in group.taints),
            allocatable={**{name: amount for name, amount in known.items() if amount}, **gpus},
            spot=group.spot,
        )
        yield number > group.least, node
