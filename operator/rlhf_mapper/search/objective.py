"""Objective of the search: the fastest mapping, the smallest that is fast enough, or the cheapest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Objective:
    """Ranks mappings by two numbers, the less the better; both only grow with seconds and with GPUs.

    Build one by `throughput`, `fewest_gpus` or `lowest_cost`.
    """

    kind: Literal["throughput", "fewest_gpus", "lowest_cost"]
    most_seconds: float = math.inf
    """Upper bound of a step's seconds."""
    prices: tuple[float, ...] = ()
    """Price of a GPU for an hour, by node group; not negative."""
    works_ahead: bool = False
    """Whether generation is of a later step, and beside the other stages."""

    @classmethod
    def throughput(cls) -> Objective:
        """Least seconds; among equals, least GPUs."""
        return cls("throughput")

    @classmethod
    def fewest_gpus(cls, most_seconds: float) -> Objective:
        """Least GPUs with which a step takes no longer than this; among equals, least seconds."""
        return cls("fewest_gpus", most_seconds=most_seconds)

    @classmethod
    def lowest_cost(cls, prices: tuple[float, ...]) -> Objective:
        """Least price of a step, during which all pools hold their GPUs; among equals, least seconds.

        Errors: ValueError where a price is negative.
        """
        if min(prices, default=0.0) < 0:
            raise ValueError("a GPU's price is negative")
        return cls("lowest_cost", prices=prices)

    def on(self, hosts: Sequence[int]) -> Objective:
        """Return the objective for groups on these hosts, each with the price of its host."""
        return replace(self, prices=tuple(self.prices[host] for host in hosts)) if self.prices else self

    def step(self, stages: Floats) -> Floats:
        """[..., 3] seconds of generation, preparation and training -> [...] of the step.

        Always added in the same order, so that equal stages give equal sums in every search.
        """
        generation, preparation, training = np.moveaxis(stages, -1, 0)
        seconds: Floats = generation + preparation + training
        if self.works_ahead:
            seconds = np.maximum(generation, preparation + training)
        return seconds

    def beside(self, stages: Floats) -> Floats:
        """[M, 3] -> [M, 3] seconds that a step takes besides each stage at least."""
        generation, preparation, training = stages.T
        if self.works_ahead:
            return np.stack([0 * generation, training, preparation], 1)
        return np.stack([preparation + training, generation + training, generation + preparation], 1)

    def weights(self, groups: int) -> Floats:
        """Weight of a GPU of each node group in `used`."""
        prices = self.prices if self.kind == "lowest_cost" else (1.0,) * groups
        if len(prices) != groups:
            raise ValueError(f"{len(prices)} prices for {groups} node groups")
        return np.array(prices, dtype=float)

    def keys(self, seconds: Floats, used: Floats) -> tuple[Floats, Floats]:
        """The two numbers, of steps that take `seconds` with GPUs of the weight `used`; inf where that is too slow."""
        if self.kind == "throughput":
            return seconds, used
        if self.kind == "lowest_cost":
            return seconds * used / 3600, seconds
        late = seconds > self.most_seconds
        return np.where(late, np.inf, used), np.where(late, np.inf, seconds)

    def seconds_within(self, first: Floats, used: Floats) -> Floats:
        """Upper bound of the seconds of what uses at least `used` and is no worse than `first`."""
        if self.kind == "throughput":
            return first
        if self.kind == "fewest_gpus":
            return np.full_like(first, self.most_seconds)
        return _quotient(first * 3600, used)

    def used_within(self, first: Floats, seconds: Floats) -> Floats:
        """Upper bound of the weight of the GPUs of what takes at least `seconds` and is no worse than `first`."""
        if self.kind == "throughput":
            return np.full_like(first, np.inf)
        return first if self.kind == "fewest_gpus" else _quotient(first * 3600, seconds)


def weight(gpus: NDArray[np.int64], weights: Floats) -> Floats:
    """[M, groups] GPUs -> [M], always added in the same order."""
    used = np.zeros(len(gpus))
    for group, each in enumerate(weights):
        used = used + gpus[:, group] * each
    return used


def _quotient(above: Floats, below: Floats) -> Floats:
    """inf where `below` is zero."""
    return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)
