"""Input of a search (placements of models in pools, and their stage costs), and its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ALONE = "rollout"
"""Has a pool of its own: a generator that is not where the actor is."""
Sets = tuple[frozenset[str], ...]
"""Sets of models that share a pool each; every model is in exactly one."""


@dataclass(frozen=True)
class StageTable:
    """Seconds of one set of models by pool size."""

    gpus: NDArray[np.int64]
    """[K], ascending, above zero. Sizes pack: pools fit a node group whenever the sum of their sizes does."""
    seconds: NDArray[np.float64]
    """[3, K] of generation, preparation and training, none negative; inf where the set does not fit."""


class Costs(Protocol):
    """Stage costs of any set of models in any node group; the implementer caches."""

    @property
    def groups(self) -> Sequence[int]:
        """GPUs of each node group; a pool lies in one of them."""

    @property
    def hosts(self) -> Sequence[frozenset[tuple[int, str]]]:
        """Hosts of each group, as (number, zone). Of groups that share a host, a placement uses only one.

        A group with several hosts serves one pool.
        """

    def of(self, models: frozenset[str], group: int) -> StageTable:
        """The table of a set whose pool lies in the group with this index."""


@dataclass(frozen=True)
class Found:
    """A placement with its best allocation."""

    sets: tuple[tuple[frozenset[str], int, int], ...]
    """(models, index of the node group, GPUs) of each pool."""
    seconds: float
    """Seconds of a step."""
    stages: tuple[float, float, float]
    """Seconds of generation, preparation and training, each of the slowest pool."""

    @property
    def gpus(self) -> int:
        return sum(gpus for _, _, gpus in self.sets)


def placements(models: Iterable[str]) -> list[Sets]:
    """All set partitions, fewest sets first and then by name, whatever the order of the input; none of no models.

    What has a pool of its own is with no other.
    """
    found = [sorted(blocks) for blocks in _partitions(sorted(set(models))) if blocks and all(map(_may_be, blocks))]
    return [tuple(map(frozenset, blocks)) for blocks in sorted(found, key=lambda blocks: (len(blocks), blocks))]


def _may_be(block: list[str]) -> bool:
    return ALONE not in block or len(block) == 1


def _partitions(names: list[str]) -> Iterator[list[list[str]]]:
    """The names stay in order in each block."""
    if not names:
        yield []
        return
    *rest, last = names
    for blocks in _partitions(rest):
        yield [*blocks, [last]]
        for index, block in enumerate(blocks):
            yield [*blocks[:index], [*block, last], *blocks[index + 1 :]]


def assignments(placement: Sets, hosts: Sequence[frozenset[tuple[int, str]]]) -> Iterator[tuple[int, ...]]:
    """All ways to put the pools of a placement into node groups with these hosts, an index for each."""

    def goes(group: int, other: int) -> bool:
        """Whether a pool may go into a group beside another pool there, or in another group."""
        return len(hosts[group]) == 1 if group == other else hosts[group].isdisjoint(hosts[other])

    def extended(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(placement):
            yield chosen
            return
        for group in range(len(hosts)):
            if all(goes(group, other) for other in set(chosen)):
                yield from extended((*chosen, group))

    yield from extended(())
