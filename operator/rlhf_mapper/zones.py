"""Order of a pool's nodes in two zones with a slow link between them, and the traffic over that link.

Ranks lie tensor first, then pipeline, then data. If a model's replica takes r nodes, node i holds block i % r of
replica i // r. The link carries rings of data ranks with nodes in both zones, and hand-overs between stages.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

MAX_REPLICA_NODES = 32
"""Largest number of nodes of one model replica to try, equal to the largest number of pipeline stages."""


def orders(nodes: int, fewest: int, most: int) -> list[tuple[bool, ...]]:
    """Return orders of `nodes` nodes; `fewest` to `most` nodes lie in the first zone, the others in the second.

    An order is a bool for each node: whether the node lies in the first zone. For any number r of nodes of a replica,
    and any bytes of a ring and of a hand-over, one of the orders sends the fewest bytes between the zones. There are
    three kinds. A zone has whole replicas; or a zone has the same blocks of all replicas; or a zone is a corner, with
    the first blocks of the first replicas.
    """
    replicas = [r for r in range(1, min(nodes, MAX_REPLICA_NODES) + 1) if nodes % r == 0]
    return list(dict.fromkeys(order for r in replicas for order in _for_replicas(nodes, r, fewest, most)))


def _for_replicas(nodes: int, r: int, fewest: int, most: int) -> Iterator[tuple[bool, ...]]:
    """Yield the orders for replicas of r nodes.

    Numbers of nodes to try for the first zone: `fewest`, `most`, and the most that are whole replicas, or the same
    blocks of all replicas.
    """
    copies = nodes // r
    stages = sorted(range(nodes), key=lambda node: (node % r, node // r))
    for count in sorted({most // r * r, most // copies * copies, fewest, most} & set(range(fewest, most + 1))):
        yield _order(nodes, stages[:count], first=True)
        for width, first in product(range(1, r + 1), (True, False)):
            number = count if first else nodes - count
            rows = -(-number // width)
            # If not, whole replicas, or the same blocks of all replicas, send less.
            if rows <= copies and (width == r or (rows - 1) * (width - 1) < (r - width) * (copies - rows)):
                corner = [node for node in range(nodes) if node % r < width]
                yield _order(nodes, corner[:number], first=first)


def _order(nodes: int, chosen: list[int], *, first: bool) -> tuple[bool, ...]:
    """Return the order in which the chosen nodes alone lie in the first zone, or in the second if `first` is False."""
    lies = set(chosen)
    return tuple((node in lies) == first for node in range(nodes))


@lru_cache(maxsize=2**16)
def crossings(
    zones: tuple[str, ...], gpus_per_node: int, pipeline: int, tensor: int, replicas: int = 1
) -> tuple[float, int]:
    """Return the numbers of (data-parallel rings, stage hand-overs of a rank) of a model that cross zones at once.

    replicas: copies of the weights (HSDP), each of which has rings of its own.
    """
    lies = np.unique(zones, return_inverse=True)[1].repeat(gpus_per_node).reshape(replicas, -1, pipeline, tensor)
    changes = int(np.count_nonzero(lies != np.roll(lies, 1, axis=1)))  # half of them in each direction
    return changes / 2, int(np.count_nonzero(lies[:, :, 1:] != lies[:, :, :-1]))
