"""Capacity of the nodes for a job: groups of equal machines, with the figures that the mapper needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from rlhf_api.job import Job
from rlhf_api.quantities import amount, times
from rlhf_mapper.hardware import CPU_SLOT, GIGABIT, MAX_GROUPS, Cluster, NodeGroup, merged
from rlhf_mapper.mapping import Device, DeviceMapping
from rlhf_operator import names
from rlhf_operator.placement.suitable import obstacle, suits
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

MAX_GPUS_OF_NODE = 1024
"""Maximum number of free GPUs that are counted on one node; also the maximum of slotsPerNode."""
MAX_DIGITS = 12
"""Number of digits from which on a network bandwidth in a node label is ignored."""


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """Group of equal machines: each is some GPUs of one node, or as many CPU slots as a job requests.

    A worker pod's CPUs, and without GPUs its memory, are left to the Kubernetes scheduler to check.
    """

    product: str
    """GPU product by the node's label; empty for CPU slots and unlabelled nodes."""
    count: int
    slots: int
    link: float | None = None
    """Bytes/s between the GPUs of a node, both directions together, by the settings; None if unset."""
    network: float | None = None
    """Bytes/s of each GPU's share of the node's network, by the settings or a node label; None if unknown."""
    price: float | None = None
    """Price of a GPU for an hour, by the settings; None if unset."""
    zone: str = ""
    """Zone of the machines; empty if unknown."""


Machines = tuple[MachineGroup, ...]
"""Groups of machines that one job may use together."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Machines with GPUs or CPU slots that a job may have, on the nodes that match the job."""

    device: Device
    machines: Machines
    """Groups of machines, the group with the most slots in total first."""
    nodes_known: bool
    """Whether the operator may list nodes; if not, `machines` is what the job requests."""
    taken: int = 0
    """GPUs on the matching nodes that foreign pods hold."""
    shared: int = 0
    """GPUs that do not count, because several pods would be given the same GPU."""
    cramped: int = 0
    """Number of nodes that lack the memory for worker pods on all of their free GPUs."""

    @property
    def count(self) -> int:
        return sum(group.count for group in self.machines)

    def usable_as(self, group: MachineGroup) -> int:
        """Return the number of machines that equal a machine of this group, except that they may have more slots."""
        large = [each for each in self.machines if each.slots >= group.slots]
        return sum(each.count for each in large if replace(each, count=group.count, slots=group.slots) == group)

    def __str__(self) -> str:
        """Return the nodes that the job may have, for messages: `2 nodes with 8 NVIDIA-H200`."""
        if not self.machines:
            return f"no node that is ready, schedulable and matches spec.runtime{self.note}"
        counts = Counter[tuple[int, str]]()
        for group in self.machines:
            counts[group.slots, group.product or f"{self.device} slots"] += group.count
        groups = (f"{counted(count, 'node')} with {slots or 'no'} {what}" for (slots, what), count in counts.items())
        return f"{' and '.join(groups)}{self.note}"

    @property
    def note(self) -> str:
        """Text for messages: ` (pods of others hold 3 GPUs)`; empty if all GPUs count."""
        shared = f"{counted(self.shared, 'GPU')} that pods would share by time-slicing or MPS do not count"
        cramped = f"{counted(self.cramped, 'node')} short of memory for workers on all free GPUs"
        notes = [f"pods of others hold {counted(self.taken, 'GPU')}"] * bool(self.taken)
        notes += [shared] * bool(self.shared) + [cramped] * bool(self.cramped)
        return f" ({'; '.join(notes)})" if notes else ""

    @property
    def as_clause(self) -> str:
        """Text for messages: `there are 2 nodes with 8 NVIDIA-H200`."""
        return f"there {'are' if self.count > 1 else 'is'} {self}"


def counted(number: int, thing: str) -> str:
    """Return a number with its noun: `1 node` or `2 nodes`."""
    return f"{number} {thing}{'s' * (number != 1)}"


def capacity_for(job: Job, snapshot: Snapshot, settings: Settings) -> Capacity:
    """Return the capacity of the nodes that match a job; if nodes cannot be listed, the capacity that it requests."""
    resources, slots = job.spec.resources, job.spec.resources.slots_per_node or 1
    if snapshot.nodes is None:
        requested = MachineGroup(product="", count=resources.max_nodes or resources.nodes, slots=slots)
        device: Device = "GPU" if resources.device == "GPU" else "CPU"
        return Capacity(device=device, machines=(requested,), nodes_known=False)
    nodes = _gpu_nodes(job, snapshot, settings)
    if resources.device == "CPU" or (resources.device == "Auto" and not has_gpus(job, snapshot, settings)):
        machines = [MachineGroup(product="", count=1, slots=slots)] * len(nodes)
        return Capacity(device="CPU", machines=_grouped(machines), nodes_known=True)
    return _gpu_capacity(nodes, job, settings)


def _gpu_capacity(nodes: Sequence[_GpuNode], job: Job, settings: Settings) -> Capacity:
    """Return the capacity of GPU nodes; if there is only one node, its memory must hold the head pod too."""
    unshared, slots = [each for each in nodes if not each.is_shared], job.spec.resources.slots_per_node or 1
    head = amount(job.spec.runtime.controller.memory or settings.controller.memory) if len(nodes) == 1 else Fraction()
    parts = [_parts(each, job, settings, head) for each in unshared]
    return Capacity(
        device="GPU",
        machines=_grouped(chain.from_iterable(parts)),
        nodes_known=True,
        taken=sum(each.gpus - each.free for each in unshared),
        shared=sum(each.gpus for each in nodes) - sum(each.gpus for each in unshared),
        cramped=sum(
            sum(part.slots for part in of_node) < node.free // slots * slots
            for node, of_node in zip(unshared, parts, strict=True)
        ),
    )


def has_gpus(job: Job, snapshot: Snapshot, settings: Settings) -> bool:
    """Whether nodes that match a job have GPUs, free or not."""
    return any(each.gpus for each in _gpu_nodes(job, snapshot, settings))


def unusable_gpus(job: Job, snapshot: Snapshot, settings: Settings) -> str:
    """Return a text that counts the nodes with GPUs that a job cannot use, by reason; empty if there are none."""
    pod, resource = settings.pod_of(job.spec.runtime, names.WORKER), settings.gpu_resource_of(job.spec.runtime)
    reasons = Counter[str]()
    for node in snapshot.nodes or ():
        others = sorted(each for each in node.room if names.is_gpu_resource(each) and node.room[each])
        label = names.gpu_label(node.labels)
        if resource in others:
            reason = obstacle(node, pod, resource)
        elif others:
            reason = f"with {' and '.join(others)} instead of {resource}, which spec.runtime.gpuResourceName can name"
        else:
            claimable = " and ".join(sorted(snapshot.claimable_gpus.get(node.name, {})))
            reason = f"without {resource} (is its device plugin up?), though labelled {label}" * bool(label)
            if claimable:
                reason = f"with GPUs for resource claims only (DRA, {claimable}), on which no job is planned"
        reasons[reason] += bool(reason)
    found = [f"{counted(number, 'node')} {reason}" for reason, number in sorted((+reasons).items())]
    return "; ".join(found)


def nodes_too_small(job: Job, snapshot: Snapshot, settings: Settings) -> Capacity:
    """Return the nodes that match a job but have fewer free GPUs than the job requests on each node."""
    least = 1 if job.spec.placement.mode == "Manual" else job.spec.resources.slots_per_node or 1
    smaller = [
        MachineGroup(product=each.product, count=1, slots=each.free)
        for each in _gpu_nodes(job, snapshot, settings)
        if not each.is_shared and each.free < least
    ]
    return Capacity(device="GPU", machines=_grouped(smaller), nodes_known=True)


def worker_memory(job: Job, slots: int, settings: Settings) -> Fraction:
    """Return the bytes of host memory that a worker pod with this number of slots requests."""
    return amount(job.spec.runtime.worker.memory or times(settings.worker.memory, slots))


def machine_choices(capacity: Capacity, job: Job) -> list[Machines]:
    """Return the sets of machines that the mapper may choose between, each with as many machines as maxNodes allows.

    First each group that is large enough alone, where machines with more slots may stand in for missing ones. Then
    groups that differ in their zone only. Then the largest groups together, as many as the mapper can search. The list
    is empty if there are too few machines.
    """
    fewest, most = job.spec.resources.nodes, job.spec.resources.max_nodes or job.spec.resources.nodes
    if capacity.device == "CPU" and capacity.machines:  # one node may run several worker pods
        (group,) = capacity.machines
        return [(replace(group, count=max(fewest, min(group.count, most))),)]
    take = min(capacity.count, most)
    if take < fewest:
        return []
    largest = capacity.machines[:MAX_GROUPS]
    alone: list[Machines] = [(replace(group, count=take),) for group in largest if capacity.usable_as(group) >= take]
    by_zone: dict[MachineGroup, list[MachineGroup]] = {}
    for group in largest:
        by_zone.setdefault(replace(group, count=0, zone=""), []).append(group)
    together = [_first(take, groups) for groups in (*by_zone.values(), largest)]
    return list(dict.fromkeys([*alone, *(each for each in together if len(each) > 1)]))


def _first(take: int, groups: Sequence[MachineGroup]) -> Machines:
    """Return the first `take` machines of the groups, or all if there are fewer."""
    found = []
    for group in groups:
        if take:
            found.append(replace(group, count=min(take, group.count)))
            take -= found[-1].count
    return tuple(found)


def cluster_of(machines: Sequence[MachineGroup], device: Device, job: Job, settings: Settings) -> Cluster | None:
    """Return the machines as a cluster of the mapper; None if the figures of a GPU are unknown."""
    groups, needs_network = [], sum(group.count for group in machines) > 1
    for group in machines:
        memory = float(worker_memory(job, group.slots, settings)) / group.slots
        # The CPU slots of a machine share a worker pod's memory.
        gpu = replace(CPU_SLOT, memory=memory) if device == "CPU" else settings.gpu_of(group.product)
        if gpu is None:
            return None
        groups.append(
            NodeGroup(
                gpu=gpu,
                count=group.count,
                gpus_per_node=group.slots,
                link_bandwidth=group.link,
                node_bandwidth=group.network * group.slots if group.network is not None and needs_network else None,
                host_memory=memory if device == "GPU" else None,
                gpu_hour_price=group.price,
                zones=(group.zone,) * group.count if group.zone else (),
                zone_bandwidth=settings.topology[0].gbps * GIGABIT if group.zone else None,
            )
        )
    return Cluster(merged(groups))


def price_per_hour(mapping: DeviceMapping, machines: Sequence[MachineGroup], settings: Settings) -> float | None:
    """Return the price of a mapping's GPUs for an hour; None on CPU slots, or if a GPU type has no price or several."""
    found: dict[str, set[float | None]] = {}
    for group in machines:
        if gpu := settings.gpu_of(group.product):
            found.setdefault(gpu.name, set()).add(group.price)
    prices = {name: price for name, (price, *others) in found.items() if price is not None and not others}
    if any(pool.gpu not in prices for pool in mapping.pools):
        return None
    return sum(pool.size * prices[pool.gpu] for pool in mapping.pools)


def unknown_figures(machines: Sequence[MachineGroup], settings: Settings) -> str:
    """Return why `cluster_of` cannot describe these machines: figures of a GPU type are unknown."""
    unknown = sorted({group.product for group in machines if settings.gpu_of(group.product) is None})
    if not all(unknown):
        return "the nodes do not say which GPUs they have"
    return f"the figures of GPU {' and '.join(unknown)} are not known; cluster.gpus of the chart can say them"


def _parts(node: _GpuNode, job: Job, settings: Settings, head: Fraction) -> list[MachineGroup]:
    """Return the machines into which a node is cut for a job: each with the requested GPUs, or one with all free GPUs.

    The free memory must hold the worker pods, and `head` bytes for a head pod on the same node. If it is short, the
    node gives fewer machines, or a smaller one.
    """
    requested, memory = job.spec.resources.slots_per_node, node.free_memory
    if job.spec.placement.mode == "Manual":  # the manifest's pools say how many slots of a node they take
        requested, memory = None, None
    for slots in (requested,) if requested else range(node.free, 0, -1):
        pods = node.free // slots
        if memory is not None and (needed := worker_memory(job, slots, settings)):
            pods = min(pods, max(int((memory - head) / needed), 0))
        if pods:
            return [_part(node, slots, settings)] * pods
    return []


def _part(node: _GpuNode, slots: int, settings: Settings) -> MachineGroup:
    """Return a machine with some GPUs of a node, and the known figures of its links and its price."""
    figures = settings.node_figures(node.labels)
    label = next((node.labels[name] for name in names.NETWORKS if name in node.labels), "")
    is_number = label.isascii() and label.isdigit() and len(label) < MAX_DIGITS
    network = figures.network or (int(label) / 1000 * GIGABIT if is_number else None)
    return MachineGroup(
        product=node.product,
        count=1,
        slots=slots,
        link=figures.link,
        network=network / node.gpus if network else None,
        price=figures.price_per_gpu_hour,
        zone=next((node.labels.get(level.label, "") for level in settings.topology), ""),
    )


@dataclass(frozen=True, kw_only=True)
class _GpuNode:
    """GPUs and memory of a node that matches a job."""

    labels: Mapping[str, str]
    product: str
    gpus: int
    free: int
    """GPUs of the node that no foreign pod holds."""
    free_memory: int | None
    """Bytes of the node's memory that no foreign pod holds; None if the node does not report its memory."""
    is_shared: bool
    """Whether several pods may be given one GPU (time-slicing, MPS) without knowing of each other's memory."""


def _gpu_nodes(job: Job, snapshot: Snapshot, settings: Settings) -> list[_GpuNode]:
    """Return GPUs and memory of each node that matches a job; for a job in a Kueue queue all of them count as free."""
    pod, resource = settings.pod_of(job.spec.runtime, names.WORKER), settings.gpu_resource_of(job.spec.runtime)
    found = []
    for node in (each for each in snapshot.nodes or () if suits(each, pod, resource)):
        taken: Mapping[str, int] = {} if snapshot.in_queue(snapshot.job) else snapshot.taken.get(node.name, {})
        ways = {node.labels.get(label, "none") for label in names.GPU_SHARING}
        gpu_node = _GpuNode(
            labels=node.labels,
            product=names.gpu_product(node.labels, resource),
            gpus=node.room[resource],
            free=min(max(node.room[resource] - taken.get(resource, 0), 0), MAX_GPUS_OF_NODE),
            free_memory=max(node.room["memory"] - taken.get("memory", 0), 0) if "memory" in node.room else None,
            is_shared=ways != {"none"} or names.gpu_product(node.labels, "").upper().endswith("-SHARED"),
        )
        found.append(gpu_node)
    return found


def _grouped(parts: Iterable[MachineGroup]) -> tuple[MachineGroup, ...]:
    """Group equal machines; the group with the most slots in total comes first, whatever the order of the nodes."""
    groups = [replace(part, count=count) for part, count in Counter(parts).items()]
    return tuple(sorted(groups, key=lambda group: (-group.count * group.slots, group.product, group.slots, str(group))))
