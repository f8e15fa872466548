"""Ways to use a node group: how many GPUs of each node, of which zones and in which order of the nodes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, cycle, islice, zip_longest

from rlhf_mapper.hardware import NodeGroup
from rlhf_mapper.mapping import MappedPool
from rlhf_mapper.pools import pool_sizes
from rlhf_mapper.strategy import Indices
from rlhf_mapper.workload import Workload
from rlhf_mapper.zones import orders


def node_uses(group: NodeGroup, load: Workload, most: int) -> Iterator[NodeGroup]:
    """Yield node groups with all or some GPUs of a node in use: up to `most` per zone, then groups over two zones."""
    for part in group.in_zones:
        yield from _uses_of_zone(part, load)[:most]
    for one, other in combinations(group.in_zones, 2):
        yield from _uses_of_two_zones(one, other, load, most)


def _uses_of_two_zones(one: NodeGroup, other: NodeGroup, load: Workload, most: int) -> Iterator[NodeGroup]:
    """Yield node groups larger than either zone: for each number of nodes, the orders of zones that are worth a try."""
    for used in _uses_of_zone(replace(one, count=one.count + other.count, zones=()), load)[:most]:
        counts: list[int] = (sizes_of_pools(used, load) // used.gpus_per_node).tolist()
        for count in (each for each in counts if each > max(one.count, other.count)):
            for order in orders(count, count - other.count, one.count):
                zones = tuple((one if is_there else other).zones[0] for is_there in order)
                yield replace(used, count=count, zones=zones)


def nodes_of_pool(pool: MappedPool, nodes: NodeGroup) -> NodeGroup:
    """Return the nodes that a manual pool uses of its node group; nodes alternate between zones if it names none."""
    machines = len(pool.slots_per_machine)
    if min(machines, nodes.count) > 1:
        nodes = replace(nodes, gpus_per_node=max(pool.slots_per_machine))
    if not nodes.zones:
        return nodes
    turns = filter(None, chain.from_iterable(zip_longest(*(part.zones for part in nodes.in_zones))))
    return replace(nodes, count=machines, zones=pool.zones or tuple(islice(cycle(turns), machines)))


def _uses_of_zone(nodes: NodeGroup, load: Workload) -> list[NodeGroup]:
    """Return node groups with all or some of each node's GPUs in use, most GPUs first.

    A pool on several nodes uses equally many GPUs of each, and its size divides the batch: 5 of 8 GPUs suit a batch of
    500. A number is left out if a larger number allows the same pool sizes at no lower speed. The speed is no lower if
    each pool lies on one node, or if the larger number is a multiple and each GPU has its own part of the network.
    """
    kept: list[tuple[NodeGroup, set[int]]] = []
    for gpus in range(nodes.gpus_per_node, 0, -1):
        used = replace(nodes, gpus_per_node=gpus)
        sizes = set(sizes_of_pools(used, load).tolist())
        if not any(
            sizes <= others
            and (max(sizes) <= gpus or (nodes.node_bandwidth is None and more.gpus_per_node % gpus == 0))
            for more, others in kept
        ):
            kept.append((used, sizes))
    return [used for used, _ in kept]


def sizes_of_pools(nodes: NodeGroup, load: Workload) -> Indices:
    """Return the pool sizes in GPUs that the nodes allow and that divide the batch sizes evenly."""
    most = min(load.pool_divides, default=nodes.gpus) // nodes.gpus_per_node
    sizes = pool_sizes(replace(nodes, count=min(nodes.count, most)))
    for number in load.pool_divides:
        sizes = sizes[number % sizes == 0]
    return sizes
