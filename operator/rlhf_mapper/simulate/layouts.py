"""Arrays of layouts p-t-d and bandwidths of their parallel groups.

Ranks lie tensor first, then pipeline, then context, then data; the ranks of a stage's experts are neighbours.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Efficiency
from rlhf_mapper.hardware import NodeGroup
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.zones import crossings

UNEVEN_EXPERTS = 1.2
"""Tokens of the fullest rank over the mean, where ranks share the experts of a layer; a guess."""


@dataclass(frozen=True)
class Layouts:
    """Layouts p-t-d, with context and expert sizes, as arrays that broadcast against each other."""

    p: Numbers
    t: Numbers
    d: Numbers
    c: Numbers | float = 1.0
    """Ranks that share the tokens of a row; they also share FSDP shards."""
    e: Numbers | float | None = None
    """Ranks of a stage that share the experts of a layer; None: each expert is cut along its width over t (vLLM)."""

    @property
    def gpus(self) -> Numbers:
        return self.p * self.t * self.d * self.c

    @property
    def shards(self) -> Numbers:
        """FSDP shards of the weights other than experts."""
        return self.d * self.c

    @property
    def of_experts(self) -> Self:
        """Layouts of the experts alone: cut into e parts, each with its FSDP shards; without context."""
        parts = self.t if self.e is None else self.e
        return type(self)(self.p, parts + 0.0 * self.t, self.shards * self.t / parts)

    @property
    def exchanges_tokens(self) -> NDArray[np.bool_] | bool:
        """Whether tokens go to the ranks of their experts and back."""
        return False if self.e is None else np.greater(self.e, 1.0)

    @property
    def fullest(self) -> Numbers | float:
        """Tokens of the rank with the most used experts over the mean of the ranks."""
        return np.where(self.exchanges_tokens, UNEVEN_EXPERTS, 1.0)

    def gathers_keys(self, model: Architecture) -> NDArray[np.bool_]:
        """Whether context-parallel ranks gather all keys, as c does not divide the heads; else they exchange heads."""
        queries, keys = model.heads / self.t, model.kv_heads / self.t
        divides = (queries % self.c == 0) & ((keys % self.c == 0) | (self.c % np.maximum(keys, 1.0) == 0))
        gathers: NDArray[np.bool_] = ~divides
        return gathers

    def copies(self, model: Architecture) -> Numbers:
        """Return the number of copies of keys and values that the context-parallel ranks of a row need."""
        few = np.maximum(self.c * self.t / model.kv_heads, 1.0)
        return np.where(self.gathers_keys(model), self.c, few)

    def layer_parameters(self, model: Architecture) -> Numbers:
        return (model.layer_parameters - model.expert_parameters) / self.t + self.own_experts(model)

    def own_experts(self, model: Architecture) -> Numbers:
        """Return the number of parameters of a layer's experts that a rank computes with."""
        return model.expert_parameters / self.of_experts.t


@dataclass(frozen=True)
class Network:
    """Bandwidth that collectives reach on a group of nodes, in bytes/s of one GPU."""

    nodes: NodeGroup
    efficiency: Efficiency

    @property
    def within(self) -> float:
        """Bandwidth between the GPUs of a node."""
        return self.nodes.link * self.efficiency.link

    @property
    def between(self) -> float:
        """Bytes/s of each GPU if all send to other nodes; with zones, at most their link / GPUs of the smaller zone."""
        reached = min(self.nodes.network * self.efficiency.network / self.nodes.gpus_per_node, self.within)
        if not self.nodes.spans_zones:
            return reached
        return min(reached, self.between_zones / min(part.gpus for part in self.nodes.in_zones))

    @property
    def between_zones(self) -> float:
        """Bandwidth from one zone to another, of all GPUs together; infinite within one zone."""
        link = self.nodes.zone_bandwidth if self.nodes.spans_zones else None
        return (link or math.inf) * self.efficiency.network

    def of(self, span: Numbers) -> Numbers:
        """Return the bandwidth in groups of ranks within `span` neighbouring GPUs, with all groups active at once."""
        return np.where(span <= self.nodes.gpus_per_node, self.within, self.between)

    def latency(self, span: Numbers) -> Numbers:
        """Return the latency of a message, in seconds, in a group of ranks within `span` neighbouring GPUs."""
        return np.where(span <= self.nodes.gpus_per_node, self.nodes.link_latency, self.nodes.node_latency)

    def exchange(self, ranks: Numbers | float, near: Numbers | float, bytes_: Numbers) -> Numbers:
        """Return the seconds of an all-to-all of `bytes_` bytes of each rank; near: ranks of a group in one node."""
        near = np.clip(near, 1.0, ranks)
        inside, across = (near - 1) / ranks * bytes_ / self.within, (ranks - near) / ranks * bytes_ / self.between
        start = np.where(ranks > near, self.nodes.node_latency, self.nodes.link_latency)
        return np.where(np.greater(ranks, 1.0), np.maximum(inside, across) + start, 0.0)

    def of_neighbours(self, layouts: Layouts) -> Numbers:
        """Return the bandwidth from a rank to the next pipeline stage; across nodes t ranks share a node's network."""
        return self._shared(layouts.p * layouts.t, layouts.t, self._over_the_link(layouts)[1])

    def of_data_ranks(self, layouts: Layouts, replicas: int = 1) -> Numbers:
        """Return the bandwidth in the data-parallel groups, each of which has every (p t)th GPU.

        replicas: copies of the weights (HSDP), if the layouts are those of one copy.
        A ring crosses a node's network once, however many of its ranks are there. A node has min(p t, GPUs) rings.
        """
        return self._shared(layouts.gpus, layouts.p * layouts.t, self._over_the_link(layouts, replicas)[0])

    def _shared(self, span: Numbers, ranks: Numbers, link: Numbers) -> Numbers:
        """Return the bandwidth within `span` GPUs if `ranks` of them share a node's network; link: between zones."""
        across = self.nodes.network * self.efficiency.network / np.minimum(ranks, self.nodes.gpus_per_node)
        inside = span <= self.nodes.gpus_per_node
        reached: Numbers = np.minimum(np.where(inside, self.within, np.minimum(across, self.within)), link)
        return reached

    def _over_the_link(self, layouts: Layouts, replicas: int = 1) -> tuple[Numbers, Numbers]:
        """Return bandwidths of (a ring of data ranks, a stage hand-over) between zones; inf if none crosses zones."""
        p, t, d = np.broadcast_arrays(layouts.p, layouts.t, layouts.d)
        shares = np.full((2, p.size), np.inf)
        if self.nodes.spans_zones:
            for place, cut in enumerate(zip(p.flat, t.flat, d.flat, strict=True)):
                if math.prod(cut) * replicas == self.nodes.gpus:
                    sizes = self.nodes.gpus_per_node, int(cut[0]), int(cut[1]), replicas
                    crossing = crossings(self.nodes.zones, *sizes)
                    shares[:, place] = [self.between_zones / each if each else np.inf for each in crossing]
        rings, hand_overs = shares.reshape(2, *p.shape)
        return rings, hand_overs


def ring(size: Numbers) -> Numbers:
    """Return the share of all bytes that a rank receives in a ring all-gather or reduce-scatter: (n - 1) / n."""
    return (size - 1) / size
