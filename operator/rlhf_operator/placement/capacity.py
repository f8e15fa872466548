"""The slots that the nodes have for a job: grouped, with the figures that the mapper needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlhf_api.job import Job
from rlhf_api.quantities import amount, times
from rlhf_mapper.hardware import CPU_SLOT, Cluster, NodeGroup, gpu_of_product, merged
from rlhf_mapper.mapping import Device
from rlhf_operator import names
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedNode, Snapshot

REPELS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """Equal parts of nodes: GPUs, each part on one node, or as many CPU slots as a job asks for.

    Whether a node has the CPUs and the memory for a worker pod is the scheduler's matter.
    """

    product: str
    """What the nodes say of their GPU; empty for CPU slots, and where they say nothing."""
    count: int
    slots: int
    """Of each."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The slots that nodes which match a job have for it."""

    device: Device
    machines: tuple[MachineGroup, ...]
    """Largest groups first."""
    nodes_known: bool
    """False where the operator may not list nodes, and `machines` is what the job asks for."""

    @property
    def count(self) -> int:
        return sum(group.count for group in self.machines)

    def __str__(self) -> str:
        """For messages: `2 nodes with 8 NVIDIA-H200`."""
        if not self.machines:
            return "no node that is ready, schedulable and matches spec.runtime"
        return " and ".join(
            f"{counted(group.count, 'node')} with {group.slots or 'no'} {group.product or self.device + ' slots'}"
            for group in self.machines
        )

    @property
    def as_clause(self) -> str:
        """For messages: `there are 2 nodes with 8 NVIDIA-H200`."""
        return f"there {'are' if self.count > 1 else 'is'} {self}"


def counted(number: int, thing: str) -> str:
    """`1 node` or `2 nodes`."""
    return f"{number} {thing}{'s' * (number != 1)}"


def capacity_for(job: Job, snapshot: Snapshot, settings: Settings) -> Capacity:
    """The slots of the nodes that match a job now; where the operator may not list nodes, what the job asks for."""
    resources = job.spec.resources
    if snapshot.nodes is None:
        device: Device = "GPU" if resources.device == "GPU" else "CPU"
        asked = MachineGroup(
            product="", count=resources.max_nodes or resources.nodes, slots=resources.slots_per_node or 1
        )
        return Capacity(device=device, machines=(asked,), nodes_known=False)
    resource = settings.gpu_resource_of(job.spec.runtime)
    nodes = [node for node in snapshot.nodes if _suits(node, job, resource)]
    gpus = {node.name: gpus_of(node, resource) for node in nodes}
    by_hand = job.spec.placement.mode == "Manual"  # then the pools say how many slots of a node they take
    if resources.device == "CPU" or (resources.device == "Auto" and not any(gpus.values())):
        wanted = resources.slots_per_node or 1
        return Capacity(device="CPU", machines=_grouped(("", wanted) for _ in nodes), nodes_known=True)
    parts = [
        (names.gpu_product(node.labels), wanted)
        for node in nodes
        if (wanted := (not by_hand and resources.slots_per_node) or gpus[node.name])
        for _ in range(gpus[node.name] // wanted)
    ]
    return Capacity(device="GPU", machines=_grouped(parts), nodes_known=True)


def nodes_too_small(job: Job, snapshot: Snapshot, settings: Settings) -> Capacity:
    """The nodes that match a job but have fewer GPUs, or none, than it asks for on each node."""
    resource, wanted = settings.gpu_resource_of(job.spec.runtime), job.spec.resources.slots_per_node or 1
    least = 1 if job.spec.placement.mode == "Manual" else wanted
    nodes = [node for node in snapshot.nodes or () if _suits(node, job, resource)]
    fewer = [(names.gpu_product(node.labels), gpus_of(node, resource)) for node in nodes]
    return Capacity(device="GPU", machines=_grouped(part for part in fewer if part[1] < least), nodes_known=True)


def machine_choices(capacity: Capacity, job: Job) -> list[tuple[MachineGroup, ...]]:
    """The sets of machines that the mapper may choose between, each of as many machines as the job may take (maxNodes).

    First each group that is large enough alone, then all groups together. Empty where there are too few machines.
    """
    fewest, most = job.spec.resources.nodes, job.spec.resources.max_nodes or job.spec.resources.nodes
    if capacity.device == "CPU" and capacity.machines:  # one node may have several worker pods
        (group,) = capacity.machines
        return [(replace(group, count=max(fewest, min(group.count, most))),)]
    take = min(capacity.count, most)
    if take < fewest:
        return []
    alone: list[tuple[MachineGroup, ...]] = [
        (replace(group, count=take),) for group in capacity.machines if group.count >= take
    ]
    mixed, left = [], take
    for group in capacity.machines:
        if left:
            mixed.append(replace(group, count=min(left, group.count)))
            left -= mixed[-1].count
    return [*alone, tuple(mixed)] if len(mixed) > 1 else alone


def cluster_of(machines: Sequence[MachineGroup], device: Device, job: Job, settings: Settings) -> Cluster | None:
    """The machines as the mapper describes a cluster; None where the figures of a GPU are not in its table."""
    if device == "CPU":
        return Cluster(tuple(_cpu_group(group, job, settings) for group in machines))
    gpus = [gpu_of_product(group.product) for group in machines]
    groups = [
        NodeGroup(gpu=gpu, count=group.count, gpus_per_node=group.slots)
        for gpu, group in zip(gpus, machines, strict=True)
        if gpu
    ]
    return Cluster(merged(groups)) if len(groups) == len(machines) else None


def gpus_of(node: ObservedNode, resource: str) -> int:
    """Allocatable GPUs of a node."""
    try:
        return int(amount(node.allocatable.get(resource, "0")))
    except ValueError:
        return 0


def _suits(node: ObservedNode, job: Job, resource: str) -> bool:
    wanted = job.spec.runtime.node_selector
    if not (node.ready and node.schedulable and wanted.items() <= dict(node.labels).items()):
        return False
    return all(
        effect not in REPELS or _tolerated(job, resource, key, value, effect) for key, value, effect in node.taints
    )


def _tolerated(job: Job, resource: str, key: str, value: str, effect: str) -> bool:
    if key == resource:  # worker pods that ask for GPUs tolerate the taint that keeps others off these nodes
        return True
    return any(
        each.effect in (None, effect)
        and each.key in (None, key)
        and (each.operator == "Exists" or (each.value or "") == value)
        for each in job.spec.runtime.tolerations
    )


def _grouped(parts: Iterable[tuple[str, int]]) -> tuple[MachineGroup, ...]:
    """One group for each (product, slots), the most slots first, whatever the order of the nodes."""
    counted = sorted(Counter(parts).items(), key=lambda each: (-each[1] * each[0][1], each[0]))
    return tuple(MachineGroup(product=product, count=count, slots=slots) for (product, slots), count in counted)


def _cpu_group(group: MachineGroup, job: Job, settings: Settings) -> NodeGroup:
    """CPU slots; those of one machine share the memory of a worker pod."""
    memory = amount(job.spec.runtime.worker.memory or times(settings.worker.memory, group.slots))
    slot = replace(CPU_SLOT, memory=float(memory) / group.slots)
    return NodeGroup(gpu=slot, count=group.count, gpus_per_node=group.slots)
