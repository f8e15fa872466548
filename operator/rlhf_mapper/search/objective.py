"""Objective of the search: the fastest mapping, the smallest that is fast enough, or the cheapest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Objective:
    """Objective that ranks mappings by two numbers: less is better, and more seconds or GPUs never lower a number."""

    kind: Literal["throughput", "fewest_gpus", "lowest_cost"] = "throughput"
    """Fewest seconds (ties: fewest GPUs), fewest GPUs within `most_seconds`, or lowest price (ties: fewest seconds)."""
    most_seconds: float = math.inf
    """Upper bound of a step's seconds, for `fewest_gpus`."""
    prices: tuple[float, ...] = ()
    """Price of a GPU for an hour, by node group; not negative."""
    works_ahead: bool = False
    """Whether a step generates the responses of a later step while it prepares and trains. The second of four stages is
    then the transition: the actor's ranks send weights, and their link carries no gradients meanwhile."""
    streams: tuple[tuple[float, float], ...] = ()
    """Overlap of scoring in other pools with generation: (end as a share of generation, share of all scoring that is
    left at this end) by group of responses, the shortest first. The tables then have two stages of preparation: of the
    pool that generates, and of the other pools."""

    def on(self, hosts: Sequence[int]) -> Self:
        """Return the objective with a price for each node group of a search; hosts: each one's index in the cluster."""
        return replace(self, prices=tuple(self.prices[host] for host in hosts)) if self.prices else self

    def three(self, stages: Floats) -> Floats:
        """Return the seconds of generation, preparation and training [..., 3] by the stages of the tables [..., S]."""
        if self.works_ahead:
            return np.stack([stages[..., 0] + stages[..., 1], stages[..., 2], stages[..., 3]], axis=-1)
        if not self.streams:
            return stages
        generation, own, beside, training = np.moveaxis(stages, -1, 0)
        scored = np.max([generation * ends + beside * rest for ends, rest in self.streams], axis=0)
        return np.stack([generation, np.maximum(own, scored - generation), training], axis=-1)

    def step(self, stages: Floats) -> Floats:
        """Return seconds of steps [...] by stages [..., S]: the sum; generation overlaps the rest if `works_ahead`."""
        generation, preparation, training = np.moveaxis(self.three(stages), -1, 0)
        seconds: Floats = generation + preparation + training  # in a fixed order, so equal stages give equal sums
        if self.works_ahead:
            seconds = np.maximum(generation, preparation + training + stages[..., 1])
        return seconds

    def beside(self, stages: Floats) -> Floats:
        """Return for each stage a lower bound of the seconds that a step adds to it; stages: of M steps, [M, S]."""
        generation, preparation, training = self.three(stages).T
        if self.works_ahead:
            alone, sent, _, _ = stages.T
            bounds = (sent, np.maximum(alone, preparation + training), sent + training, sent + preparation)
            return np.stack(bounds, 1)
        if self.streams:
            _, own, beside, _ = stages.T
            (ends, _), (_, rest) = self.streams[0], self.streams[-1]
            others = (np.maximum(own, beside * rest) + training, generation + training, generation * ends + training)
            return np.stack([*others, generation + preparation], 1)
        return np.stack([preparation + training, generation + training, generation + preparation], 1)

    def weights(self, groups: int) -> Floats:
        """Return the weight of one GPU by node group: its price for `lowest_cost`, else 1."""
        return np.array(self.prices if self.kind == "lowest_cost" else (1.0,) * groups, dtype=float)

    def keys(self, seconds: Floats, used: Floats) -> tuple[Floats, Floats]:
        """Return (first numbers, second numbers) by which mappings are ranked, the less the better; inf where too slow.

        seconds: of a step, by mapping; used: total weight of the mapping's GPUs.
        """
        if self.kind == "throughput":
            return seconds, used
        if self.kind == "lowest_cost":
            return seconds * used / 3600, seconds
        late = seconds > self.most_seconds
        return np.where(late, np.inf, used), np.where(late, np.inf, seconds)

    def seconds_within(self, first: Floats, used: Floats) -> Floats:
        """Return an upper bound of the seconds of mappings with GPU weight >= `used` and `keys(...)[0]` <= `first`."""
        if self.kind == "throughput":
            return first
        if self.kind == "fewest_gpus":
            return np.full_like(first, self.most_seconds)
        return _quotient(first * 3600, used)

    def used_within(self, first: Floats, seconds: Floats) -> Floats:
        """Return an upper bound of the GPU weight of mappings of >= `seconds` seconds and `keys(...)[0]` <= `first`."""
        if self.kind == "throughput":
            return np.full_like(first, np.inf)
        return first if self.kind == "fewest_gpus" else _quotient(first * 3600, seconds)


def weight(gpus: NDArray[np.int64], weights: Floats) -> Floats:
    """Return the GPU number or price (by `weights`) of M allocations [M, node groups], added in a fixed order."""
    return sum((gpus[:, group] * each for group, each in enumerate(weights)), np.zeros(len(gpus)))


def _quotient(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)
