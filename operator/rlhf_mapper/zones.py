"""A pool on nodes in two zones, which a slow link joins: in which order it has them, and what crosses the link.

Ranks lie tensor first, then pipeline, then data. Where a model's replica takes r nodes, node i of n has block i % r of
replica i // r. Two things cross: rings of data ranks that have nodes of both zones, and hand-overs between stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

LARGEST_REPLICA = 32
"""Nodes, as many as pipelines have stages."""


def orders(nodes: int, fewest: int, most: int) -> list[tuple[bool, ...]]:
    """For each of a pool's nodes, in the order of ranks, whether it lies in the first zone: fewest to most of them do.

    Of all ways to choose the nodes one of these sends the fewest bytes, whatever rings and hand-overs send and whatever
    r is: replicas lie whole in a zone, or the same blocks of all replicas do, or the nodes of one zone are a corner:
    the first blocks of the first replicas.
    """
    replicas = [r for r in range(1, min(nodes, LARGEST_REPLICA) + 1) if nodes % r == 0]
    return list(dict.fromkeys(order for r in replicas for order in _for_replicas(nodes, r, fewest, most)))


def _for_replicas(nodes: int, r: int, fewest: int, most: int) -> Iterator[tuple[bool, ...]]:
    """Those for replicas of r nodes. Where there is a choice, a zone has whole replicas, or the fewest nodes it may."""
    copies = nodes // r
    stages = sorted(range(nodes), key=lambda node: (node % r, node // r))
    for count in sorted({most // r * r, most // copies * copies, fewest, most} & set(range(fewest, most + 1))):
        yield _order(nodes, stages[:count], first=True)
        for width, first in product(range(1, r + 1), (True, False)):
            number = count if first else nodes - count
            rows = -(-number // width)
            # Else whole replicas, or the same blocks of all replicas, send less.
            if rows <= copies and (width == r or (rows - 1) * (width - 1) < (r - width) * (copies - rows)):
                corner = [node for node in range(nodes) if node % r < width]
                yield _order(nodes, corner[:number], first=first)


def _order(nodes: int, chosen: list[int], *, first: bool) -> tuple[bool, ...]:
    """Whether each node is in the first zone, if the chosen ones are, or are not."""
    lies = set(chosen)
    return tuple((node in lies) == first for node in range(nodes))


@lru_cache(maxsize=2**16)
def crossings(zones: tuple[str, ...], gpus_per_node: int, pipeline: int, tensor: int) -> tuple[float, int]:
    """(rings, hand-overs) of a model with such a cut that cross between zones at the same time.

    A ring goes through its ranks in their order, and back to the first; what a rank hands over counts by itself.
    """
    lies = np.unique(zones, return_inverse=True)[1].repeat(gpus_per_node).reshape(-1, pipeline, tensor)
    changes = int(np.count_nonzero(lies != np.roll(lies, 1, axis=0)))  # there, and back in the other direction
    return changes / 2, int(np.count_nonzero(lies[:, 1:] != lies[:, :-1]))
