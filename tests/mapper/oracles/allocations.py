"""HybridFlow's enum_alloc, d_cost and get_min_alloc (Algorithm 1) as printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def enum_alloc(units: int, minima: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All allocations of exactly `units` (machines, or GPUs) to one set or more that need at least `minima`."""
    first, *rest = minima
    if not rest:
        yield from [(units,)] if units >= first else []
        return
    for given in range(first, units - sum(rest) + 1):
        yield from ((given, *others) for others in enum_alloc(units - given, rest))


def d_cost(sets: Sequence[Sequence[Sequence[float]]]) -> float:
    """Seconds of a step: [sets][models of the set][stages].

    Models of a set run in turn, so their seconds in a stage add up; sets work at the same time, so the slowest counts.
    """
    costs: list[list[float]] = [[sum(stage) for stage in zip(*models, strict=True)] for models in sets]
    return float(sum(max(stage) for stage in zip(*costs, strict=True)))


def least_gpus(states: float, memory: float) -> int:
    """The fewest GPUs of so many bytes that hold these states, each filled to 80 % at most (get_min_alloc)."""
    return math.ceil(states / (0.8 * memory))
