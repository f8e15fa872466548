"""Which models share a pool, and in which node group each pool lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from rlhf_mapper.search.tables import Sets


def placements(models: Iterable[str]) -> list[Sets]:
    """All set partitions, fewest sets first and then by name, whatever the order of the input; none of no models."""
    found = [_ordered(blocks) for blocks in _partitions(sorted(set(models))) if blocks]
    return [tuple(map(frozenset, blocks)) for blocks in sorted(found, key=lambda blocks: (len(blocks), blocks))]


def assignments(placement: Sets, groups: int) -> Iterator[tuple[int, ...]]:
    """All ways to put the pools of a placement into node groups, an index for each."""
    return product(range(groups), repeat=len(placement))


def _partitions(names: list[str]) -> Iterator[list[list[str]]]:
    if not names:
        yield []
        return
    *rest, last = names
    for blocks in _partitions(rest):
        yield [*blocks, [last]]
        for index, block in enumerate(blocks):
            yield [*blocks[:index], [*block, last], *blocks[index + 1 :]]


def _ordered(blocks: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(sorted(block)) for block in blocks))
