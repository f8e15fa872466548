"""Arrays of layouts p-t-d and bandwidths of their parallel groups: ranks lie tensor first, then pipeline, then data."""

import math
from dataclasses import dataclass

import numpy as np

from rlhf_mapper.coefficients import Efficiency
from rlhf_mapper.hardware import NodeGroup
from rlhf_mapper.kernels import Numbers
from rlhf_mapper.zones import crossings


@dataclass(frozen=True)
class Layouts:
    """Layouts p-t-d as three arrays that broadcast against each other: one layout at each position."""

    p: Numbers
    t: Numbers
    d: Numbers

    @property
    def gpus(self) -> Numbers:
        return self.p * self.t * self.d


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

    def of_neighbours(self, layouts: Layouts) -> Numbers:
        """Return the bandwidth from a rank to its neighbour in the next pipeline stage.

        If a replica has several nodes, t ranks share a node's network.
        """
        across = self.nodes.network * self.efficiency.network / np.minimum(layouts.t, self.nodes.gpus_per_node)
        inside = layouts.p * layouts.t <= self.nodes.gpus_per_node
        reached = np.where(inside, self.within, np.minimum(across, self.within))
        shared: Numbers = np.minimum(reached, self._over_the_link(layouts)[1])
        return shared

    def of_data_ranks(self, layouts: Layouts) -> Numbers:
        """Return the bandwidth in the data-parallel groups, each of which has every (p t)th GPU.

        A ring crosses a node's network once, however many of its ranks are there. A node has min(p t, GPUs) rings.
        """
        replica = layouts.p * layouts.t
        rings = np.minimum(replica, self.nodes.gpus_per_node)
        across = self.nodes.network * self.efficiency.network / rings
        inside = layouts.gpus <= self.nodes.gpus_per_node
        reached = np.where(inside, self.within, np.minimum(across, self.within))
        shared: Numbers = np.minimum(reached, self._over_the_link(layouts)[0])
        return shared

    def _over_the_link(self, layouts: Layouts) -> tuple[Numbers, Numbers]:
        """Return bandwidths of (a ring of data ranks, a stage hand-over) between zones; inf if none crosses zones."""
        p, t, d = np.broadcast_arrays(layouts.p, layouts.t, layouts.d)
        shares = np.full((2, p.size), np.inf)
        if self.nodes.spans_zones:
            for place, cut in enumerate(zip(p.flat, t.flat, d.flat, strict=True)):
                if math.prod(cut) == self.nodes.gpus:
                    crossing = crossings(self.nodes.zones, self.nodes.gpus_per_node, int(cut[0]), int(cut[1]))
                    shares[:, place] = [self.between_zones / each if each else np.inf for each in crossing]
        rings, hand_overs = shares.reshape(2, *p.shape)
        return rings, hand_overs


def ring(size: Numbers) -> Numbers:
    """Return the share of all bytes that a rank receives in a ring all-gather or reduce-scatter: (n - 1) / n."""
    return (size - 1) / size
