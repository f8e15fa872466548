"""What a cluster is made of: GPU types with their published figures, and nodes that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

GB = 1e9
"""Vendors' gigabyte, as memory, bandwidths and prices are quoted."""
SAME_MEMORY = 0.1
"""Two figures of a GPU's memory, of driver and vendor, differ by a smaller share than this."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A type of accelerator; the figures are peaks, and dense where vendors also quote sparse ones."""

    name: str
    memory: float
    """Bytes."""
    bf16: float
    """FLOP/s of matrix products in bf16 (fp16 where there is no bf16)."""
    fp32: float
    """FLOP/s in fp32, without tensor cores."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s between the GPUs of a node, both directions together, as vendors quote it."""
    host_bandwidth: float
    """Bytes/s to host memory, one direction."""
    launch_seconds: float = 4e-6
    """Time to start a kernel; a decoder layer starts about ten."""
    source: str
    """Where the figures are from."""


def _gpu(name: str, memory: float, bf16: float, fp32: float, hbm: float, link: float, host: float, source: str) -> Gpu:
    """A row of the table: gigabytes, TFLOP/s, TFLOP/s, then GB/s."""
    return Gpu(
        name=name,
        memory=memory * GB,
        bf16=bf16 * 1e12,
        fp32=fp32 * 1e12,
        memory_bandwidth=hbm * GB,
        link_bandwidth=link * GB,
        host_bandwidth=host * GB,
        source=source,
    )


CPU_SLOT = Gpu(
    name="cpu-slot",
    memory=8 * GB,
    bf16=64e9,
    fp32=64e9,
    memory_bandwidth=16 * GB,
    link_bandwidth=2 * GB,
    host_bandwidth=8 * GB,
    launch_seconds=60e-6,
    source="one worker process on one core of a server CPU; rough, to be calibrated by a run",
)

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 40, 312, 19.5, 1555, 600, 32, "NVIDIA A100 datasheet, SXM4 40GB"),
        _gpu("a100-80g", 80, 312, 19.5, 2039, 600, 32, "NVIDIA A100 datasheet, SXM4 80GB"),
        _gpu("h100-80g", 80, 989.4, 66.9, 3350, 900, 64, "NVIDIA H100 datasheet, SXM5"),
        _gpu("h200-141g", 141, 989.4, 66.9, 4800, 900, 64, "NVIDIA H200 datasheet, SXM5"),
        _gpu("b200-180g", 180, 2250, 75, 7700, 1800, 64, "NVIDIA DGX B200 datasheet, one of 8 GPUs"),
        _gpu("l40s-48g", 48, 362, 91.6, 864, 64, 32, "NVIDIA L40S datasheet; PCIe 4.0 x16, no NVLink"),
        _gpu("a10-24g", 24, 125, 31.2, 600, 64, 32, "NVIDIA A10 datasheet; PCIe 4.0 x16, no NVLink"),
        _gpu("t4-16g", 16, 65, 8.1, 320, 32, 16, "NVIDIA T4 datasheet; fp16, PCIe 3.0 x16"),
        _gpu("mi300x-192g", 192, 1307.4, 163.4, 5300, 896, 64, "AMD Instinct MI300X datasheet; 7 links of 128 GB/s"),
        CPU_SLOT,
    )
}


def gpu_of_product(product: str) -> Gpu | None:
    """The row of the table for what a node's label nvidia.com/gpu.product (or amd.com/gpu.product-name) says.

    Such as NVIDIA-A100-SXM4-80GB or Tesla-T4-SHARED; None for what the table lacks, slices of a GPU among it.
    """
    words = re.split(r"[^a-z0-9.]+", product.lower())
    if {"mig", "nvl"} & set(words) or {"h100", "pcie"} <= set(words):  # a slice, or other chips of the same name
        return None
    sizes = {int(found[1]) for word in words if (found := re.fullmatch(r"(\d+)gb", word))}
    rows = [gpu for gpu in GPUS.values() if gpu is not CPU_SLOT and gpu.name.partition("-")[0] in words]
    if not sizes:
        return rows[0] if len(rows) == 1 else None
    return next((gpu for gpu in rows if any(abs(size * GB / gpu.memory - 1) < SAME_MEMORY for size in sizes)), None)


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Equal nodes. A pool lies in one group: it never spans GPU types."""

    gpu: Gpu
    count: int
    gpus_per_node: int
    link_bandwidth: float | None = None
    """Bytes/s between the GPUs of a node, both directions together; None: the GPU type's."""
    node_bandwidth: float = 200e9 / 8
    """Bytes/s of a node's network, one direction, shared by its GPUs."""
    link_latency: float = 5e-6
    """Seconds of a message within a node."""
    node_latency: float = 15e-6
    """Seconds of a message between nodes."""
    gpu_hour_price: float | None = None
    """Price of a GPU for an hour, in any currency."""

    @property
    def gpus(self) -> int:
        return self.count * self.gpus_per_node

    @property
    def link(self) -> float:
        """Bytes/s that one GPU sends to the others of its node."""
        return (self.link_bandwidth or self.gpu.link_bandwidth) / 2


@dataclass(frozen=True)
class Cluster:
    """All nodes that a job may use."""

    groups: tuple[NodeGroup, ...] = field(default=())

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)
