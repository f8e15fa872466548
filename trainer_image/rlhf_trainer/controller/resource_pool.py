"""A set of slots on which colocated models live; one slot is one GPU, or one CPU worker (HybridFlow section 4.1)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_api.names import POOL_RESOURCE, slots_text
from rlhf_trainer.errors import EnvironmentProblem

Device = Literal["CPU", "GPU"]
NODE_LABEL = "ray.io/node-id"
POOL_DEADLINE_SECONDS = 300.0
"""Seconds that Ray may take to reserve a pool's slots."""
LOOK_SECONDS = 1
"""Longest single wait for Ray, in seconds; between two waits Python handles signals."""


class RayNode(TypedDict):
    """Machine of a Ray cluster, as `ray.nodes()` describes it."""

    NodeID: str
    Alive: bool
    NodeManagerAddress: str
    NodeManagerPort: int
    Resources: Mapping[str, float]


def threads_of(pools: Sequence[ResourcePool], nodes: Sequence[RayNode]) -> list[int]:
    """Return for each pool a slot's CPU threads: a machine's cores divided by its slots or, for a GPU pool, its GPUs.

    nodes: as `ray.nodes()` describes them. Ranks of a pool wait for each other, so the machine with the fewest threads
    per slot decides for all ranks.
    """
    resources = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    slots: Counter[str] = Counter()
    for pool in pools:
        for machine, count in pool.machines():
            slots[machine] += count

    def threads_on(machine: str, device: Device) -> int:
        shares = resources[machine]["GPU"] if device == "GPU" else slots[machine]
        return max(1, int(resources[machine]["CPU"] // shares))

    return [min(threads_on(machine, pool.device) for machine, _ in pool.machines()) for pool in pools]


class ResourcePool:
    """Slots, as `ResourcePool([slots per machine] * machines)`: a placement group per machine, a bundle per slot."""

    cpus_of_process = 1

    def __init__(self, slots_per_machine: Sequence[int], *, name: str, device: Device) -> None:
        self.name, self.device, self.slots_per_machine = name, device, tuple(slots_per_machine)
        self._groups: list[PlacementGroup] = []

    @property
    def size(self) -> int:
        """Number of the pool's slots on all machines."""
        return sum(self.slots_per_machine)

    def reserve(self, *, deadline: float, machines: Sequence[str] = ()) -> None:
        """Wait until Ray has reserved the pool's slots; EnvironmentProblem after `deadline` seconds.

        machines: Ray's ids of the machines on which the slots are to be; none: Ray chooses.
        """
        known = ray.cluster_resources()
        have = int(known.get(self.device, 0))
        if have < self.size:
            raise EnvironmentProblem(f"pool {self.name} needs {slots_text(self.size, self.device)}, but Ray has {have}")
        bundle = {"CPU": 1.0, "GPU": 1.0} if self.device == "GPU" else {"CPU": 1.0}
        own = f"{POOL_RESOURCE}{self.name}"
        self._groups = []
        for place, slots in enumerate(self.slots_per_machine):
            # Else a small pool may take the machine that a large one needs, or ranks may be outside their planned zone.
            named = (own,) if machines else (own, f"{own}:{place}")
            here = {each: 1.0 for each in named if each in known}
            only = [{NODE_LABEL: machines[place]}] * slots if machines else None
            bundles = [{**bundle, **here}] * slots
            self._groups.append(placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=only))
        until = time.monotonic() + deadline
        for group in self._groups:
            while not group.wait(LOOK_SECONDS):  # `ready` would start a process for its answer
                if time.monotonic() > until:
                    self.release()
                    raise EnvironmentProblem(
                        f"Ray did not give pool {self.name} its {slots_text(self.size, self.device)}, "
                        f"{list(self.slots_per_machine)} by machine, within {deadline:.0f} s"
                    )

    def slots(self) -> list[tuple[PlacementGroupSchedulingStrategy, int]]:
        """Return (Ray's scheduling strategy, rank on the machine) for each rank of the pool."""
        return [
            (PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index), index)
            for group, slots in zip(self._groups, self.slots_per_machine, strict=True)
            for index in range(slots)
        ]

    def machines(self) -> list[tuple[str, int]]:
        """Return (Ray's id of a machine, the pool's slots on it) for each placement group; a machine may come twice."""
        nodes = [placement_group_table(group)["bundles_to_node_id"][0] for group in self._groups]
        return list(zip(nodes, self.slots_per_machine, strict=True))

    def release(self) -> None:
        """Give the pool's slots back to Ray."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


class BesidePool(ResourcePool):
    """Pool of one process that takes no slot, on the machine of another pool's first rank."""

    cpus_of_process = 0

    def __init__(self, pool: ResourcePool, *, name: str) -> None:
        super().__init__((1,), name=name, device="CPU")
        self._pool = pool

    def slots(self) -> list[tuple[PlacementGroupSchedulingStrategy, int]]:
        return self._pool.slots()[:1]
