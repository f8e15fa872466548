"""Arrays of layouts p-t-d, and the bandwidths of their groups: ranks lie tensor first, then pipeline, then data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mapper.coefficients import Efficiency
from rlhf_mapper.hardware import NodeGroup

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Layouts:
    """Arrays that broadcast against each other: one p-t-d each place."""

    p: Numbers
    t: Numbers
    d: Numbers

    @property
    def gpus(self) -> Numbers:
        return self.p * self.t * self.d


@dataclass(frozen=True)
class Network:
    """What collectives reach on a group of nodes, in bytes/s of one GPU."""

    nodes: NodeGroup
    efficiency: Efficiency

    @property
    def within(self) -> float:
        """Between the GPUs of a node."""
        return self.nodes.link * self.efficiency.link

    @property
    def between(self) -> float:
        """Between nodes, of a GPU whose neighbours on the node send as much."""
        return min(self.nodes.network * self.efficiency.network / self.nodes.gpus_per_node, self.within)

    def of(self, span: Numbers) -> Numbers:
        """Of a group whose ranks lie within `span` neighbouring GPUs, all such groups at once."""
        return np.where(span <= self.nodes.gpus_per_node, self.within, self.between)

    def latency(self, span: Numbers) -> Numbers:
        """Seconds of a message in such a group."""
        return np.where(span <= self.nodes.gpus_per_node, self.nodes.link_latency, self.nodes.node_latency)

    def of_neighbours(self, layouts: Layouts) -> Numbers:
        """Of a rank to its like in the next stage: t of them cross from node to node where a replica has several."""
        across = self.nodes.network * self.efficiency.network / np.minimum(layouts.t, self.nodes.gpus_per_node)
        return np.where(layouts.p * layouts.t <= self.nodes.gpus_per_node, self.within, np.minimum(across, self.within))

    def of_data_ranks(self, layouts: Layouts) -> Numbers:
        """Of the data-parallel groups, each of every (p t)th GPU.

        A ring crosses a node's network once, however many of its ranks are there; a node has min(p t, GPUs) rings.
        """
        replica = layouts.p * layouts.t
        rings = np.minimum(replica, self.nodes.gpus_per_node)
        across = self.nodes.network * self.efficiency.network / rings
        inside = layouts.gpus <= self.nodes.gpus_per_node
        return np.where(inside, self.within, np.minimum(across, self.within))


def ring(size: Numbers) -> Numbers:
    """What a rank of a ring all-gather or reduce-scatter receives, as a share of the whole: (n - 1) / n."""
    return (size - 1) / size
