"""Hardware of a cluster: GPU types with their published figures, and the nodes that hold them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.tables import read_table

GB = 1e9
"""Vendors' gigabyte, as memory, bandwidths and prices are quoted."""
GIGABIT = 1e9 / 8
"""Bytes in a gigabit, the unit in which networks are quoted."""
THIN = GIGABIT
"""Bytes/s of a link between zones below which `gradientCompression: Auto` compresses what replicas send over it."""
USUAL_NETWORK = 50.0
"""Default Gb/s of a GPU's share of its node's network, if it is not known: 400 Gb/s for eight GPUs."""
SAME_MEMORY = 0.1
"""Relative difference below which the memory in a product name and the memory in the table count as equal."""
NEUTRAL = {"nvidia", "tesla", "amd", "instinct", "ac", "mega", "oam", "vf", "hbm3", "hbm3e"} | {
    f"sxm{version}" for version in ("", 4, 5, 6)
}
"""Words of a product name that do not tell GPU types apart; others, such as shared or laptop, mark another product."""
MIG = re.compile(r"(.+)[- ]mig[- ]([1-7])g\.(\d+)gb([.+].*)?")
"""Pattern of the name of a GPU slice (MIG): the GPU, sevenths of its multiprocessors, and gigabytes of memory."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Type of accelerator; the figures are peaks, and dense where vendors also quote sparse ones."""

    name: str
    memory: float
    bf16: float
    """FLOP/s of matrix products in bf16 (fp16 where there is no bf16)."""
    fp32: float
    """FLOP/s in fp32, without tensor cores."""
    memory_bandwidth: float
    """Bytes/s between the GPU and its own memory."""
    link_bandwidth: float
    """Bytes/s between the GPUs of a node, both directions together, as vendors quote it."""
    host_bandwidth: float
    """Bytes/s between a GPU and host memory, one direction."""
    network_bandwidth: float = USUAL_NETWORK * GIGABIT
    """Bytes/s of a GPU's share of its node's network, one direction, if the node's figure is unknown."""
    launch_seconds: float = 4e-6
    """Seconds to start a kernel; a decoder layer starts 12 to 54 kernels."""
    source: str
    host_memory: float = 128 * GB
    """Bytes of host memory for each GPU of a usual node, if the node's figure is unknown."""
    node_size: int = 8
    has_bf16: bool = True
    """Whether vLLM takes bf16 on it: from compute capability 8.0 on."""
    product: frozenset[str] = frozenset()
    """Words of the product name besides memory and NEUTRAL words; empty: no product name stands for this type."""

    @classmethod
    def row(cls, name: str, product: str, peaks: Iterable[float], source: str, network: float = USUAL_NETWORK) -> Self:
        """Return a GPU type from the vendor's figures; network: Gb/s.

        peaks: GB of memory, TFLOP/s in bf16 and in fp32, and GB/s of memory, link and host.
        """
        memory, bf16, fp32, hbm, link, host = peaks
        return cls(
            name=name,
            memory=memory * GB,
            bf16=bf16 * 1e12,
            fp32=fp32 * 1e12,
            memory_bandwidth=hbm * GB,
            link_bandwidth=link * GB,
            host_bandwidth=host * GB,
            network_bandwidth=network * GIGABIT,
            source=source,
            product=frozenset(product.split()),
        )


class _Node(NamedTuple):
    """Row of nodes.yaml, which says what the columns are."""

    names: tuple[str, ...]
    gpus: int
    memory: float | None
    host: float
    source: str


_NODES = read_table(__package__, "nodes.yaml", dict[str, _Node])
SHORT_NAMES = {short: name for name, node in _NODES.items() for short in node.names}
"""Short name of a GPU type, such as h100 -> its name in the table."""
NO_BF16 = "t4-16g"
"""GPU type of the table with a compute capability below 8.0."""


def _in_usual_node(gpu: Gpu) -> Gpu:
    """Return a GPU type with the row of nodes.yaml, if there is one: memory as torch reports it, usual node."""
    if not (node := _NODES.get(gpu.name)):
        return gpu
    memory = node.memory * 2**30 if node.memory else gpu.memory
    has_bf16 = gpu.name != NO_BF16
    return replace(gpu, memory=memory, host_memory=node.host * GB, node_size=node.gpus, has_bf16=has_bf16)


_TABLE = {
    name: _in_usual_node(Gpu.row(name, product, peaks, source, network))
    for name, (product, *peaks, source, network) in read_table(__package__, "gpus.yaml", dict[str, list[Any]]).items()
}
CPU_SLOT = replace(_TABLE["cpu-slot"], launch_seconds=20e-6)
GPUS: Mapping[str, Gpu] = {**_TABLE, CPU_SLOT.name: CPU_SLOT}


def gpu_of_product(product: str) -> Gpu | None:
    """Return the GPU table's row for a product name, or a share of the row for a slice (MIG); None if unknown.

    product: the node label nvidia.com/gpu.product or amd.com/gpu.product-name, such as NVIDIA-A100-SXM4-80GB or
    NVIDIA-H200-MIG-1g.18gb; or a driver's name, such as NVIDIA A100 80GB PCIe.
    """
    if found := MIG.fullmatch(product.lower()):
        whole = gpu_of_product(found[1])
        return whole and _slice(whole, int(found[2]), int(found[3]))
    if product.lower() == "nvidia-tesla-a100":  # the name at GKE, which fits several rows
        return GPUS["a100-40g"]
    words = set(re.split(r"[^a-z0-9.]+", product.lower())) - NEUTRAL - {""}
    sizes = {word: int(word[:-2]) * GB for word in words if re.fullmatch(r"\d+gb", word)}
    rows = [
        gpu
        for gpu in GPUS.values()
        if gpu.product
        and gpu.product == words - sizes.keys()
        and all(abs(size / gpu.memory - 1) < SAME_MEMORY for size in sizes.values())
    ]
    return rows[0] if len(rows) == 1 else None


def gpu_named(name: str, known: Mapping[str, Gpu] = GPUS) -> Gpu | None:
    """Return the GPU type of a name; a short one (h100) or a slice (a100-80g-mig-1g.10gb) will do. None if unknown."""
    found, name = MIG.fullmatch(name), SHORT_NAMES.get(name.lower(), name)
    if name in known or not found or found[1] not in known:
        return known.get(name)
    return _slice(known[found[1]], int(found[2]), int(found[3]))


def require_gpu(name: str, path: str) -> Gpu:
    """Return the GPU type of a name as `gpu_named` does; path: option with the name. SpecError with close names."""
    if (gpu := gpu_named(name.strip().lower())) is None:
        hint = suggestion(name.strip(), {*GPUS, *SHORT_NAMES})
        hint += "." * (not hint.endswith("?")) + " An --inventory of `rlhf plan` describes others"
        raise SpecError([Problem(path, f"{name.strip() or 'empty'} is no known GPU; {hint}")])
    return gpu


def _slice(gpu: Gpu, sevenths: int, gigabytes: int) -> Gpu:
    """Return a slice (MIG) of a GPU as a type of its own; shares as in NVIDIA's MIG user guide, Supported MIG Profiles.

    Slices have no NVLink and no peer access: they exchange data through host memory and share the GPU's link to it.
    """
    share = min(gigabytes * GB / gpu.memory, 1.0)
    return Gpu(
        name=f"{gpu.name}-mig-{sevenths}g.{gigabytes}gb",
        memory=share * gpu.memory,
        bf16=gpu.bf16 * sevenths / 7,
        fp32=gpu.fp32 * sevenths / 7,
        memory_bandwidth=share * gpu.memory_bandwidth,
        link_bandwidth=2 * share * gpu.host_bandwidth,
        host_bandwidth=share * gpu.host_bandwidth,
        network_bandwidth=share * gpu.network_bandwidth,
        host_memory=share * gpu.host_memory,
        source=f"{gpu.source}, {sevenths}/7 of it",
    )


ESTIMATED = " (estimated)"
"""Suffix of the name of a GPU that the GPU table lacks; its figures are estimated from what the driver reports."""
PER_CYCLE: Mapping[tuple[int, int], tuple[int, int]] = {
    (found[0], found[1]): (found[2], found[3])
    for found in read_table(__package__, "per_cycle.yaml", list[tuple[int, int, int, int]])
}
"""CUDA's compute capability -> FLOP of one multiprocessor in a cycle: (matrix products in bf16, fp32)."""
PCIE_4 = 32 * GB
"""Bytes/s of PCIe 4.0 x16 in one direction."""


@dataclass(frozen=True, kw_only=True)
class FoundGpu:
    """GPU of a machine, as the driver describes it."""

    name: str
    memory: float
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (0, 0) for a GPU of another vendor."""
    multiprocessors: int = 0
    clock: float = 0.0
    """Highest clock rate of the multiprocessors, in Hz."""
    memory_bandwidth: float = 0.0
    """Bytes/s between the GPU and its own memory; 0 if the driver does not report it."""


def figures_of(found: FoundGpu) -> Gpu | None:
    """Return a GPU's type from the GPU table, or estimated from its clock and with PCIe 4.0 x16; None if unknown."""
    if known := gpu_of_product(found.name):
        return known
    architecture = max((each for each in PER_CYCLE if each <= found.capability), default=None)
    if architecture is None or not found.memory_bandwidth:
        return None
    bf16, fp32 = PER_CYCLE[architecture]
    cycles = found.multiprocessors * found.clock
    return Gpu(
        name=found.name + ESTIMATED,
        memory=found.memory,
        bf16=bf16 * cycles,
        fp32=fp32 * cycles,
        memory_bandwidth=found.memory_bandwidth,
        link_bandwidth=2 * PCIE_4,
        host_bandwidth=PCIE_4,
        has_bf16=found.capability >= (8, 0),
        source="its multiprocessors and clocks as the driver says them",
    )


MAX_GROUPS = 8
"""Largest number of node groups in a search, which tries every group for every pool."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Group of equal nodes. A pool lies in one node group, so it never spans GPU types."""

    gpu: Gpu
    count: int
    gpus_per_node: int
    link_bandwidth: float | None = None
    """Bytes/s between the GPUs of a node, both directions together; None: the GPU type's."""
    node_bandwidth: float | None = None
    """Bytes/s of a node's network, one direction, shared by its GPUs; None: the usual network of the GPU type."""
    link_latency: float = 5e-6
    """Seconds that a message takes between GPUs of one node."""
    node_latency: float = 15e-6
    """Seconds that a message takes between nodes."""
    host_memory: float | None = None
    """Bytes of host memory for each GPU; None: as in a usual node of the GPU type."""
    gpu_hour_price: float | None = None
    """Price of a GPU for an hour, in any currency."""
    zones: tuple[str, ...] = ()
    """Zone of each node, empty if unknown. If a pool spans zones, its ranks are laid over the nodes in this order."""
    zone_bandwidth: float | None = None
    """Bytes/s from one zone to another, one direction, shared by all nodes; None: as fast as the nodes."""

    @property
    def gpus(self) -> int:
        return self.count * self.gpus_per_node

    @property
    def in_zones(self) -> tuple[Self, ...]:
        """Node group of each zone alone; just this group if all its nodes lie in one zone."""
        if not self.spans_zones:
            return (self,)
        return tuple(replace(self, count=n, zones=(zone,) * n) for zone, n in Counter(self.zones).items())

    @property
    def has_thin_link(self) -> bool:
        """Whether the nodes lie in several zones, whose link is known to be thin."""
        return self.spans_zones and self.zone_bandwidth is not None and self.zone_bandwidth < THIN

    @property
    def spans_zones(self) -> bool:
        return len(set(self.zones)) > 1

    @property
    def link(self) -> float:
        """Bytes/s that one GPU sends to the other GPUs of its node."""
        return (self.link_bandwidth or self.gpu.link_bandwidth) / 2

    @property
    def host(self) -> float:
        """Bytes of host memory for each GPU."""
        return self.gpu.host_memory if self.host_memory is None else self.host_memory

    @property
    def network(self) -> float:
        """Bytes/s that a node can send to other nodes, one direction."""
        return self.node_bandwidth or self.gpu.network_bandwidth * self.gpus_per_node


def merged(groups: Iterable[NodeGroup]) -> tuple[NodeGroup, ...]:
    """Join the node groups that differ only in the number and the zones of their nodes."""
    counts, zones = Counter[NodeGroup](), dict[NodeGroup, tuple[str, ...]]()
    for group in groups:
        one = replace(group, count=1, zones=())
        counts[one] += group.count
        zones[one] = zones.get(one, ()) + group.zones
    return tuple(replace(one, count=count, zones=zones[one]) for one, count in counts.items())


@dataclass(frozen=True)
class Cluster:
    """Nodes on which the mapper may place a job; in the operator, with only the GPUs that are free for the job."""

    groups: tuple[NodeGroup, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def memory(self) -> float:
        """Bytes of memory of all GPUs together."""
        return sum(group.gpus * group.gpu.memory for group in self.groups)
