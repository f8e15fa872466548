"""What a search chooses from (placements of models in pools, what each pool takes), and what it finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Sets = tuple[frozenset[str], ...]
"""Sets of models that share a pool each; every model is in exactly one."""


@dataclass(frozen=True)
class StageTable:
    """Seconds that one set of models takes in a pool of each size that it may have."""

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
    def hosts(self) -> Sequence[int]:
        """A number for the nodes of each group. Groups of one number are ways to use the same nodes: one is taken."""

    def of(self, models: frozenset[str], group: int) -> StageTable:
        """The table of a set whose pool lies in the group with this index."""


@dataclass(frozen=True)
class Found:
    """A placement with its best allocation."""

    sets: tuple[tuple[frozenset[str], int, int], ...]
    """(models, index of the node group, GPUs) of each pool."""
    seconds: float
    """Of a step: the sum of the stages."""
    stages: tuple[float, float, float]
    """Seconds of generation, preparation and training, each of the slowest pool."""

    @property
    def gpus(self) -> int:
        return sum(gpus for _, _, gpus in self.sets)


def total(stages: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 3] -> [...], always added in the same order, so that equal stages give equal sums in every search."""
    seconds: NDArray[np.float64] = stages[..., 0] + stages[..., 1] + stages[..., 2]
    return seconds


def placements(models: Iterable[str]) -> list[Sets]:
    """All set partitions, fewest sets first and then by name, whatever the order of the input; none of no models."""
    found = [sorted(blocks) for blocks in _partitions(sorted(set(models))) if blocks]
    return [tuple(map(frozenset, blocks)) for blocks in sorted(found, key=lambda blocks: (len(blocks), blocks))]


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


def assignments(placement: Sets, hosts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to put the pools of a placement into node groups with these hosts, an index for each."""
    ways: dict[int, list[int]] = {}
    for group, host in enumerate(hosts):
        ways.setdefault(host, []).append(group)
    for chosen in product(ways, repeat=len(placement)):
        used = list(dict.fromkeys(chosen))
        for groups in product(*(ways[host] for host in used)):
            taken = dict(zip(used, groups, strict=True))
            yield tuple(taken[host] for host in chosen)
