"""Why nothing fits, by how much, and what would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlhf_mapper.hardware import Cluster, NodeGroup
from rlhf_mapper.mapping import Infeasible
from rlhf_mapper.pools import PoolCosts
from rlhf_mapper.simulate import memory

MOST_NODES = 4096
"""Beyond so many nodes nobody is told to look."""


def infeasible(costs: PoolCosts, cluster: Cluster, fits: Callable[[Cluster], bool]) -> Infeasible:
    """What is short on a cluster where no mapping was found; `fits` says whether there is one on another cluster.

    Models that may wait in host memory need room for the largest of them only.
    """
    states = [sum(costs.states(role, 0).values()) for role in costs.wanted]
    needed = max(states) if costs.settings[0].software.may_offload else sum(states)
    have = sum(memory.STATE_SHARE * group.gpu.memory * group.gpus for group in cluster.groups)
    smallest = tuple(
        (group.gpu.name, nodes * group.gpus_per_node)
        for group in cluster.groups
        if (nodes := _smallest(group, fits)) is not None
    )
    reason = _reason(costs, cluster, needed, have)
    return Infeasible(short_bytes=max(needed - have, 0.0), smallest=smallest, reason=reason)


def _smallest(group: NodeGroup, fits: Callable[[Cluster], bool]) -> int | None:
    """The least nodes of a group on which a mapping is found; None beyond MOST_NODES."""
    most = 1
    while not fits(Cluster((replace(group, count=most),))):
        most *= 2
        if most > MOST_NODES:
            return None
    least = most // 2 + 1
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(Cluster((replace(group, count=middle),))) else (middle + 1, most)
    return most


def _reason(costs: PoolCosts, cluster: Cluster, needed: float, have: float) -> str:
    models = ", ".join(costs.wanted)
    if needed > have:
        names = " and ".join(f"{group.gpus} x {group.gpu.name}" for group in cluster.groups)
        one = "the largest of " * (costs.settings[0].software.may_offload and len(costs.wanted) > 1)
        return f"the states of {one}{models} take {needed / 1e9:,.1f} GB, but {names} hold {have / 1e9:,.1f} GB"
    for role, wanted in costs.wanted.items():
        groups = range(len(costs.groups))
        if not any(costs.strategies(role, group, 1).fits.any() for group in groups):
            asked = wanted.sizes.model_dump(exclude={"replicas"}) if wanted.sizes else {}
            sizes = ", ".join(f"{name} {size}" for name, size in asked.items() if size)
            if wanted.replicas > 1:
                sizes += f", replicas {wanted.replicas}"
            return f"no pool of these GPUs can cut {role} as asked ({sizes}) and give each data rank a sequence"
    divides = sorted(set(costs.settings[0].load.pool_divides))
    largest = max((int(np.max(sizes, initial=0)) for sizes in costs.sizes), default=0)
    if divides and largest < max(group.gpus for group in cluster.groups):
        batch = " and ".join(str(number) for number in divides)
        slots = f"{largest} slot{'s' * (largest > 1)}"
        return f"{models} do not fit on {slots}, the most for a pool with which the batch ({batch} sequences) divides"
    return f"the states of {models} fit, but nothing is left for activations or for the KV cache of one sequence"
