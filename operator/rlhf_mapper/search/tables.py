"""Input of a search (placements of models in pools, and their stage costs), and its result."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ALONE = "rollout"
"""Role that is always alone in its pool: a generator apart from the actor."""
Sets = tuple[frozenset[str], ...]
"""Sets of models; the models of a set share one pool, and every model is in exactly one set."""


@dataclass(frozen=True)
class StageTable:
    """Seconds of each stage for one set of models, by pool size."""

    gpus: NDArray[np.int64]
    """[K] pool sizes, ascending, above zero. Pools fit in a node group whenever the sum of their sizes does."""
    seconds: NDArray[np.float64]
    """[S, K] seconds of generation, preparation and training, none negative; inf where the set does not fit.

    S is 3, or 4 if a step works ahead or scoring overlaps generation (`Objective`)."""


class Costs(Protocol):
    """Protocol of the stage costs of any set of models in any node group; implementations cache them."""

    @property
    def groups(self) -> Sequence[int]:
        """Number of GPUs in each node group; every pool lies in one node group."""

    @property
    def hosts(self) -> Sequence[frozenset[tuple[int, str]]]:
        """Hosts of each node group of the search: its nodes, as (index of a node group of the cluster, zone).

        A placement uses only one of the node groups that share a host. A group with several hosts serves one pool.
        """

    def of(self, models: frozenset[str], group: int) -> StageTable:
        """Return the stage table of a set of models whose pool lies in the node group with this index."""


@dataclass(frozen=True)
class Found:
    """Placement of models in pools, with its best allocation of GPUs to the pools."""

    sets: tuple[tuple[frozenset[str], int, int], ...]
    """(models, index of the node group, number of GPUs) of each pool."""
    seconds: float
    stages: tuple[float, float, float]
    """Seconds of generation, preparation and training, each of the slowest pool."""

    @property
    def gpus(self) -> int:
        return sum(gpus for _, _, gpus in self.sets)


def placements(models: Iterable[str]) -> list[Sets]:
    """Return all partitions of the models into sets, fewest sets first, then by names; `ALONE` has a set of its own."""
    found = [
        sorted(blocks)
        for blocks in _partitions(sorted(set(models)))
        if blocks and not any(ALONE in block and len(block) > 1 for block in blocks)
    ]
    return [tuple(map(frozenset, blocks)) for blocks in sorted(found, key=lambda blocks: (len(blocks), blocks))]


def _partitions(names: list[str]) -> Iterator[list[list[str]]]:
    """Yield all partitions of a list of names into blocks; each block keeps the order of the list."""
    if not names:
        yield []
        return
    *rest, last = names
    for blocks in _partitions(rest):
        yield [*blocks, [last]]
        for index, block in enumerate(blocks):
            yield [*blocks[:index], [*block, last], *blocks[index + 1 :]]


def assignments(count: int, hosts: Sequence[frozenset[tuple[int, str]]]) -> NDArray[np.int64]:
    """Return all ways to put `count` pools into node groups, in ascending order: the group of each pool, [A, count]."""
    groups = np.arange(len(hosts))
    apart = [[one.isdisjoint(other) for other in hosts] for one in hosts]
    together = np.array(apart, dtype=bool).reshape(len(hosts), len(hosts))
    np.fill_diagonal(together, [len(host) == 1 for host in hosts])
    chosen = np.zeros((1, 0), dtype=np.int64)
    for _ in range(count):
        last = np.tile(groups, len(chosen))
        chosen = chosen.repeat(len(groups), axis=0)
        fits = together[chosen, last[:, None]].all(axis=1)
        chosen = np.column_stack([chosen, last])[fits]
    return chosen
