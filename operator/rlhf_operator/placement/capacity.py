"""The slots that the nodes have for a job: grouped, with the figures that the mapper needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from rlhf_api.job import Job
from rlhf_api.quantities import amount, times
from rlhf_mapper.hardware import CPU_SLOT, GIGABIT, MOST_GROUPS, Cluster, NodeGroup, merged
from rlhf_mapper.mapping import Device
from rlhf_operator import names
from rlhf_operator.placement.suitable import suitable
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedNode, Snapshot

MOST_OF_A_NODE = 1024
"""GPUs; the most that slotsPerNode takes, too."""
MOST_DIGITS = 12
"""Of a label that says a number."""


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """Equal parts of nodes: GPUs, each part on one node, or as many CPU slots as a job asks for.

    Whether a node has the CPUs for a worker pod is the scheduler's matter; so is the memory for CPU slots.
    """

    product: str
    """What the nodes say of their GPU; empty for CPU slots, and where they say nothing."""
    count: int
    slots: int
    """Of each."""
    link: float | None = None
    """Bytes/s between the GPUs of a node, both directions together, where the settings say it."""
    network: float | None = None
    """Bytes/s of each GPU's part of the node's network, where the settings or a label say it."""
    price: float | None = None
    """Of a GPU for an hour, where the settings say it."""
    zone: str = ""
    """Where they lie; empty where nobody says."""

    def can_be(self, other: MachineGroup) -> bool:
        """Whether these machines differ from those of the other group in their count and in more slots at most."""
        return self.slots >= other.slots and replace(self, count=other.count, slots=other.slots) == other


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The slots that nodes which match a job have for it."""

    device: Device
    machines: tuple[MachineGroup, ...]
    """Largest groups first."""
    nodes_known: bool
    """False where the operator may not list nodes, and `machines` is what the job asks for."""
    taken: int = 0
    """GPUs that the pods of others hold."""
    shared: int = 0
    """GPUs that do not count: several pods would be given each of them."""
    cramped: int = 0
    """Nodes that lack the memory for worker pods on all of their free GPUs."""

    @property
    def count(self) -> int:
        return sum(group.count for group in self.machines)

    def __str__(self) -> str:
        """For messages: `2 nodes with 8 NVIDIA-H200`."""
        if not self.machines:
            return f"no node that is ready, schedulable and matches spec.runtime{self.note}"
        alike = Counter[tuple[int, str]]()
        for group in self.machines:
            alike[group.slots, group.product or f"{self.device} slots"] += group.count
        groups = (f"{counted(count, 'node')} with {slots or 'no'} {what}" for (slots, what), count in alike.items())
        return f"{' and '.join(groups)}{self.note}"

    @property
    def note(self) -> str:
        """For messages: ` (pods of others hold 3 GPUs)`; empty where all GPUs count."""
        shared = f"{counted(self.shared, 'GPU')} that pods would share by time-slicing or MPS do not count"
        cramped = f"{counted(self.cramped, 'node')} short of memory for workers on all free GPUs"
        notes = [f"pods of others hold {counted(self.taken, 'GPU')}"] * bool(self.taken)
        notes += [shared] * bool(self.shared) + [cramped] * bool(self.cramped)
        return f" ({'; '.join(notes)})" if notes else ""

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
    nodes = suitable(job, snapshot, settings)
    if resources.device == "CPU" or (resources.device == "Auto" and not any(_held(node, resource) for node in nodes)):
        part = MachineGroup(product="", count=1, slots=resources.slots_per_node or 1)
        return Capacity(device="CPU", machines=_grouped(part for _ in nodes), nodes_known=True)
    whole = [node for node in nodes if not _is_shared(node)]
    head = amount(job.spec.runtime.controller.memory or settings.controller.memory) if len(nodes) == 1 else Fraction()
    parts = [_parts(node, job, snapshot, settings, head) for node in whole]
    free, each = [_free(node, resource, snapshot) for node in whole], resources.slots_per_node or 1
    return Capacity(
        device="GPU",
        machines=_grouped(part for of_node in parts for part in of_node),
        nodes_known=True,
        taken=sum(_held(node, resource) for node in whole) - sum(free),
        shared=sum(_held(node, resource) for node in nodes if _is_shared(node)),
        cramped=sum(
            sum(part.slots for part in of_node) < gpus // each * each for gpus, of_node in zip(free, parts, strict=True)
        ),
    )


def nodes_too_small(job: Job, snapshot: Snapshot, settings: Settings) -> Capacity:
    """The nodes that match a job but have fewer GPUs free, or none, than it asks for on each node."""
    resource, wanted = settings.gpu_resource_of(job.spec.runtime), job.spec.resources.slots_per_node or 1
    least = 1 if job.spec.placement.mode == "Manual" else wanted
    fewer = [
        MachineGroup(product=names.gpu_product(node.labels, resource), count=1, slots=free)
        for node in suitable(job, snapshot, settings)
        if not _is_shared(node)
        if (free := _free(node, resource, snapshot)) < least
    ]
    return Capacity(device="GPU", machines=_grouped(fewer), nodes_known=True)


def worker_memory(job: Job, slots: int, settings: Settings) -> Fraction:
    """Bytes of host memory that a worker pod with so many slots asks for."""
    return amount(job.spec.runtime.worker.memory or times(settings.worker.memory, slots))


def machine_choices(capacity: Capacity, job: Job) -> list[tuple[MachineGroup, ...]]:
    """The sets of machines that the mapper may choose between, each of as many machines as the job may take (maxNodes).

    First each group that is large enough, together with machines that have more slots and are used as if they had as
    many; then groups that differ in their zone only; then the largest groups together, as many as the mapper can
    search. Empty where there are too few machines.
    """
    fewest, most = job.spec.resources.nodes, job.spec.resources.max_nodes or job.spec.resources.nodes
    if capacity.device == "CPU" and capacity.machines:  # one node may have several worker pods
        (group,) = capacity.machines
        return [(replace(group, count=max(fewest, min(group.count, most))),)]
    take = min(capacity.count, most)
    if take < fewest:
        return []
    alone: list[tuple[MachineGroup, ...]] = [
        (replace(group, count=take),)
        for group in capacity.machines[:MOST_GROUPS]
        if sum(each.count for each in capacity.machines if each.can_be(group)) >= take
    ]
    kinds: dict[MachineGroup, list[MachineGroup]] = {}
    for group in capacity.machines[:MOST_GROUPS]:
        kinds.setdefault(replace(group, count=0, zone=""), []).append(group)
    together = [_first(take, groups) for groups in (*kinds.values(), capacity.machines[:MOST_GROUPS])]
    return list(dict.fromkeys([*alone, *(each for each in together if len(each) > 1)]))


def _first(take: int, groups: Sequence[MachineGroup]) -> tuple[MachineGroup, ...]:
    """So many machines, as far as there are, of one group after the other."""
    found = []
    for group in groups:
        if take:
            found.append(replace(group, count=min(take, group.count)))
            take -= found[-1].count
    return tuple(found)


def cluster_of(machines: Sequence[MachineGroup], device: Device, job: Job, settings: Settings) -> Cluster | None:
    """The machines as the mapper describes a cluster; None where nobody knows the figures of a GPU."""
    if device == "CPU":
        return Cluster(tuple(_cpu_group(group, job, settings) for group in machines))
    groups, is_one = [], sum(group.count for group in machines) == 1  # which needs no network
    for group in machines:
        gpu = settings.gpu_of(group.product)
        if gpu is None:
            return None
        nodes = NodeGroup(
            gpu=gpu,
            count=group.count,
            gpus_per_node=group.slots,
            link_bandwidth=group.link,
            node_bandwidth=None if group.network is None or is_one else group.network * group.slots,
            host_memory=float(worker_memory(job, group.slots, settings)) / group.slots,
            gpu_hour_price=group.price,
            zones=(group.zone,) * group.count if group.zone else (),
            zone_bandwidth=settings.topology[0].gbps * GIGABIT if group.zone else None,
        )
        groups.append(nodes)
    return Cluster(merged(groups))


def prices_of(machines: Sequence[MachineGroup], settings: Settings) -> dict[str, float]:
    """Price of a GPU for an hour by the mapper's name of its type; without those that have none, or several."""
    found: dict[str, set[float | None]] = {}
    for group in machines:
        if gpu := settings.gpu_of(group.product):
            found.setdefault(gpu.name, set()).add(group.price)
    only = {name: min(prices, key=str) for name, prices in found.items() if len(prices) == 1}
    return {name: price for name, price in only.items() if price is not None}


def unknown_figures(machines: Sequence[MachineGroup], settings: Settings) -> str:
    """Why nothing can be predicted on machines of which `cluster_of` knows no figures."""
    unknown = sorted({group.product for group in machines if settings.gpu_of(group.product) is None})
    if not all(unknown):
        return "the nodes do not say which GPUs they have"
    return f"the figures of GPU {' and '.join(unknown)} are not known; cluster.gpus of the chart can say them"


def _parts(node: ObservedNode, job: Job, snapshot: Snapshot, settings: Settings, head: Fraction) -> list[MachineGroup]:
    """The parts of a node that a job may have: as many GPUs each as it asks for, or in one part all that are free.

    The free memory must do for them as worker pods, and for the head pod where that has to be here too: else there are
    fewer parts, or a smaller one.
    """
    resource, asked = settings.gpu_resource_of(job.spec.runtime), job.spec.resources.slots_per_node
    free, memory = _free(node, resource, snapshot), _free_memory(node, snapshot)
    if job.spec.placement.mode == "Manual":  # then the pools say how many slots of a node they take
        asked, memory = None, None
    for slots in (asked,) if asked else range(free, 0, -1):
        pods = free // slots
        if memory is not None and (needed := worker_memory(job, slots, settings)):
            pods = min(pods, max(int((memory - head) / needed), 0))
        if pods:
            return [_part(node, slots, resource, settings)] * pods
    return []


def _part(node: ObservedNode, slots: int, resource: str, settings: Settings) -> MachineGroup:
    """So many GPUs of a node, with what is known of its links and its price."""
    said = settings.node_figures(node.labels)
    network = said.network or _labelled_network(node)
    return MachineGroup(
        product=names.gpu_product(node.labels, resource),
        count=1,
        slots=slots,
        link=said.link,
        network=network / _held(node, resource) if network else None,
        price=said.price_per_gpu_hour,
        zone=settings.zone_of(node.labels),
    )


def _labelled_network(node: ObservedNode) -> float | None:
    """Bytes/s of a node's network by its labels; None where they say nothing, or no number."""
    label = next((node.labels[name] for name in names.NETWORKS if name in node.labels), "")
    is_number = label.isascii() and label.isdigit() and len(label) < MOST_DIGITS
    return int(label) / 1000 * GIGABIT if is_number else None


def _quantity(quantities: Mapping[str, str], name: str) -> int | None:
    """A whole quantity, rounded down; None where it is missing or none."""
    with suppress(ValueError):
        return int(amount(quantities[name])) if name in quantities else None
    return None


def _held(node: ObservedNode, resource: str) -> int:
    """Allocatable GPUs of a node."""
    return _quantity(node.allocatable, resource) or 0


def _taken(node: ObservedNode, snapshot: Snapshot) -> Mapping[str, int]:
    """What the pods of others hold on a node; nothing for a job in a queue: Kueue has it wait until there is room."""
    return {} if snapshot.in_queue(snapshot.job) else snapshot.taken.get(node.name, {})


def _free(node: ObservedNode, resource: str, snapshot: Snapshot) -> int:
    """GPUs of a node that no pod of others holds."""
    return min(max(_held(node, resource) - _taken(node, snapshot).get(resource, 0), 0), MOST_OF_A_NODE)


def _free_memory(node: ObservedNode, snapshot: Snapshot) -> int | None:
    """Bytes of a node that no pod of others holds; None: the node does not say what it has."""
    held = _quantity(node.allocatable, "memory")
    return None if held is None else max(held - _taken(node, snapshot).get("memory", 0), 0)


def _is_shared(node: ObservedNode) -> bool:
    """Whether several pods may be given one GPU (time-slicing, MPS): neither would know of the other's memory."""
    ways = {node.labels.get(label, "none") for label in names.GPU_SHARING}
    return ways != {"none"} or names.gpu_product(node.labels, "").upper().endswith("-SHARED")


def _grouped(parts: Iterable[MachineGroup]) -> tuple[MachineGroup, ...]:
    """Equal parts are a group, the group with the most slots first, whatever the order of the nodes."""
    groups = [replace(part, count=count) for part, count in Counter(parts).items()]
    return tuple(sorted(groups, key=lambda group: (-group.count * group.slots, group.product, group.slots, str(group))))


def _cpu_group(group: MachineGroup, job: Job, settings: Settings) -> NodeGroup:
    """CPU slots; those of one machine share the memory of a worker pod."""
    slot = replace(CPU_SLOT, memory=float(worker_memory(job, group.slots, settings)) / group.slots)
    return NodeGroup(gpu=slot, count=group.count, gpus_per_node=group.slots)
