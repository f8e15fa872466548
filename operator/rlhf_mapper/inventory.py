"""Cluster that a user describes: an inventory file, or a number of equal nodes."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from rlhf_api.contract import Name, NodeCount, SlotCount, Spec
from rlhf_api.problems import Problem, SpecError, choice
from rlhf_api.pydantic_errors import validated
from rlhf_mapper.hardware import CPU_SLOT, GB, GIGABIT, GPUS, MAX_GROUPS, Cluster, Gpu, NodeGroup, gpu_named, merged

MAX_PRINTABLE = 1e300
"""Bound above which a message does not show a number: whole numbers in YAML may exceed the range of floats."""


def _in(unit: str, least: float, most: float) -> BeforeValidator:
    """Return a validator of a number from `least` to `most`; its message names the unit, as users may mistake it."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            shown = json.dumps(value) if isinstance(value, str | bool) else "empty" if value is None else "no number"
            raise ValueError(f"is {shown}, expected a number, in {unit}")
        if not least <= value <= most:
            shown = f"{value:g}" if abs(value) < MAX_PRINTABLE else "far too large"
            raise ValueError(f"is {shown}, expected {least:g} to {most:g}; it is in {unit}")
        return float(value)

    return BeforeValidator(check)


Memory = Annotated[float, _in("GB (1e9 bytes)", 1, 10_000)]
Tflops = Annotated[float, _in("TFLOP/s (1e12 operations/s)", 0.001, 100_000)]
GigabytesPerSecond = Annotated[float, _in("GB/s (1e9 bytes/s)", 0.1, 100_000)]
BothDirections = Annotated[float, _in("GB/s (1e9 bytes/s), both directions together", 0.1, 20_000)]
GigabitsPerSecond = Annotated[float, _in("Gb/s (1e9 bits/s), one direction", 0.001, 100_000)]
Price = Annotated[float, _in("units of a currency, for one GPU and one hour", 0, 100_000)]


class GpuType(Spec):
    """Entry of an inventory file for a GPU type that the table lacks; the figures are peaks, as vendors quote them."""

    name: Name
    memory: Annotated[Memory, Field(alias="memoryGB")]
    bf16: Annotated[Tflops, Field(alias="bf16Tflops")]
    fp32: Annotated[Tflops, Field(alias="fp32Tflops")]
    memory_bandwidth: Annotated[GigabytesPerSecond, Field(alias="memoryGBps")]
    link_bandwidth: Annotated[BothDirections, Field(alias="linkGBps")]
    host_bandwidth: Annotated[GigabytesPerSecond, Field(alias="hostGBps")]

    def gpu(self, source: str) -> Gpu:
        """Return the GPU type with its figures in bytes and FLOP/s."""
        rates = (self.memory_bandwidth, self.link_bandwidth, self.host_bandwidth)
        return Gpu.row(self.name, "", (self.memory, self.bf16, self.fp32, *rates), source)


class NodeFigures(Spec):
    """Bandwidths and price of the nodes of an inventory entry; an unset bandwidth is the usual one of the GPU type."""

    intra_node: Annotated[BothDirections | None, Field(alias="intraNodeGBps")] = None
    inter_node: Annotated[GigabitsPerSecond | None, Field(alias="interNodeGbps")] = None
    price_per_gpu_hour: Price | None = None

    @property
    def link(self) -> float | None:
        """Bytes/s between the GPUs of a node, both directions together."""
        return None if self.intra_node is None else self.intra_node * GB

    @property
    def network(self) -> float | None:
        """Bytes/s of a node's network, one direction."""
        return None if self.inter_node is None else self.inter_node * GIGABIT


class Link(Spec):
    """Network link between zones of equal nodes; all nodes of a zone together share its link to any other zone."""

    between: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
    gbps: GigabitsPerSecond


class Nodes(NodeFigures):
    """Entry of an inventory file for equal nodes."""

    name: Name | None = None
    """Name of the zone of these nodes, by which `links` refer to it."""
    gpu: str
    count: NodeCount
    gpus_per_node: SlotCount
    host_memory: Annotated[Memory | None, Field(alias="hostMemoryGB")] = None

    def group(self, gpu: Gpu, link: Link | None) -> NodeGroup:
        """Return the nodes as a node group in bytes and bytes/s; link: link between their zone and other zones."""
        return NodeGroup(
            gpu=gpu,
            count=self.count,
            gpus_per_node=self.gpus_per_node,
            link_bandwidth=self.link,
            node_bandwidth=self.network,
            host_memory=None if self.host_memory is None else self.host_memory * GB / self.gpus_per_node,
            gpu_hour_price=self.price_per_gpu_hour,
            zones=(self.name or "",) * self.count if link else (),
            zone_bandwidth=link.gbps * GIGABIT if link else None,
        )


class InventoryFile(Spec):
    """Content of an inventory file: groups of equal nodes, links between zones, and GPU types that the table lacks."""

    nodes: Annotated[tuple[Nodes, ...], Field(strict=False, min_length=1)]
    links: Annotated[tuple[Link, ...], Field(strict=False)] = ()
    gpus: Annotated[tuple[GpuType, ...], Field(strict=False)] = ()


class Flags(Spec):
    """Options of `rlhf plan` that describe a cluster of equal nodes."""

    nodes: Annotated[NodeCount, Field(alias="--nodes")]
    gpus_per_node: Annotated[SlotCount, Field(alias="--gpus-per-node")]


def cluster_of(document: object, source: str) -> Cluster:
    """Return the cluster of an inventory file, with equal nodes in one group. Raises SpecError with every mistake."""
    inventory = validated(InventoryFile, document, f"{source}: ")
    types = {**GPUS, **{each.name: each.gpu(source) for each in inventory.gpus}}
    if problems := [each.within(f"{source}: ") for each in _conflicts(inventory, types)]:
        raise SpecError(problems)
    groups = tuple(_groups(inventory, types))
    if len(groups) > MAX_GROUPS:
        message = f"has {len(groups)} different groups, expected at most {MAX_GROUPS}"
        raise SpecError([Problem(f"{source}: nodes", message)])
    return Cluster(groups)


def cluster_of_flags(nodes: int, gpus_per_node: int, gpu: Gpu) -> Cluster:
    """Return a cluster of equal nodes with the usual figures of a GPU type. Raises SpecError for a wrong number."""
    validated(Flags, {"--nodes": nodes, "--gpus-per-node": gpus_per_node})
    return Cluster((NodeGroup(gpu=gpu, count=nodes, gpus_per_node=gpus_per_node),))


def _groups(inventory: InventoryFile, types: Mapping[str, Gpu]) -> Iterator[NodeGroup]:
    """Yield the groups of nodes outside all links between zones, then the groups of each link's zones.

    Equal groups are merged, but never those of different links.
    """
    linked = {name: link for link in inventory.links for name in link.between}
    for link in (None, *inventory.links):
        of_link = [nodes for nodes in inventory.nodes if linked.get(nodes.name or "") is link]
        yield from merged(nodes.group(gpu, link) for nodes in of_link if (gpu := gpu_named(nodes.gpu, types)))


def _conflicts(inventory: InventoryFile, types: Mapping[str, Gpu]) -> Iterator[Problem]:
    """Yield a problem for each contradiction between fields of an inventory file that are valid alone."""
    own = [each.name for each in inventory.gpus]
    for place, name in enumerate(own):
        if name in own[:place]:
            yield Problem(f"gpus.{place}.name", f'"{name}" is used twice')
    for place, nodes in enumerate(inventory.nodes):
        if gpu_named(nodes.gpu, types) is None:
            unknown = f'is "{nodes.gpu}", expected {choice(types)}; `gpus` of this file may describe others'
            yield Problem(f"nodes.{place}.gpu", unknown)
    yield from _wrong_links(inventory)
    if len({nodes.gpu == CPU_SLOT.name for nodes in inventory.nodes}) > 1:
        yield Problem("nodes", "mixes CPU slots and GPUs; a job runs on one of the two")


def _wrong_links(inventory: InventoryFile) -> Iterator[Problem]:
    """Yield the problems of links: unknown or repeated names, and zones whose nodes differ, which no pool can span."""
    names = Counter(nodes.name for nodes in inventory.nodes)
    uses = Counter(name for link in inventory.links for name in link.between)
    for place, link in enumerate(inventory.links):
        path = f"links.{place}.between"
        if len(link.between) == 1:
            yield Problem(path, "has one name, expected two or more")
        for name in dict.fromkeys(link.between):
            if (names[name], uses[name]) != (1, 1):
                yield Problem(path, f'names "{name}", expected the name of one entry of nodes, in one link')
        kinds = [nodes.model_dump(exclude={"name", "count"}) for nodes in inventory.nodes if nodes.name in link.between]
        if any(kind != kinds[0] for kind in kinds):
            yield Problem(path, "joins nodes that differ in more than their count; a pool lies on equal nodes")
