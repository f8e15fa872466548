"""Who sends which box to whom, so that every rank gets what it lacks and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.boxes import Box
from rlhf_trainer.hybrid_engine.layout import Boxes

Address = tuple[int, ...]
"""Where a rank is; two ranks are the nearer the longer the beginning is that their addresses share."""
Need = tuple[int, Box, tuple[int, ...]]
"""(destination, box that it takes, the nearest ranks that hold it)."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a parameter that a rank takes from another, or from itself."""

    name: str
    box: Box
    source: int
    destination: int

    @property
    def is_own(self) -> bool:
        """Whether the rank has it already, so that nothing is sent."""
        return self.source == self.destination


@dataclass(frozen=True)
class ReshardPlan:
    """All moves, in the order of the sources' parameters, and what the ranks hold before and after."""

    moves: tuple[Move, ...]
    sources: Mapping[int, Boxes]
    destinations: Mapping[int, Boxes]

    def received(self, rank: int) -> int:
        """Elements that a rank gets from others."""
        return sum(move.box.numel for move in self.moves if move.destination == rank and not move.is_own)

    def sent(self, rank: int) -> int:
        """Elements that a rank gives to others; what two ranks get counts twice."""
        return sum(move.box.numel for move in self.moves if move.source == rank and not move.is_own)

    @cached_property
    def trading_groups(self) -> list[tuple[int, ...]]:
        """The smallest sets of ranks that trade among themselves only, each sorted; a rank that does not is in none."""
        group_of: dict[int, set[int]] = {}
        for pair in {(move.source, move.destination) for move in self.moves if not move.is_own}:
            merged = group_of.get(pair[0], {pair[0]}) | group_of.get(pair[1], {pair[1]})
            group_of.update(dict.fromkeys(merged, merged))
        return sorted({tuple(sorted(group)) for group in group_of.values()})


def addresses(layout: ParallelSizes, *, shards: int) -> dict[int, Address]:
    """rank -> (the model's replica, generation stage, generation shard): those near a rank hold what it needs."""
    found: dict[int, Address] = {}
    for rank in range(layout.world_size):
        places = layout.coordinates(rank)
        found[rank] = (places["data"] // shards, places["generation_pipeline"], places["generation_tensor"])
    return found


def plan(
    sources: Mapping[int, Boxes], destinations: Mapping[int, Boxes], near: Mapping[int, Address] | None = None
) -> ReshardPlan:
    """The moves that give every destination its boxes, each element once.

    A rank takes from itself what it holds, and the rest from the nearest ranks that do; where several are equally near,
    from the one that has sent least. The boxes of different ranks are equal or disjoint, as those of a training layout
    are; ValueError if they overlap, or if nobody holds a part of what is needed.
    """
    near = near or {}
    sent = dict.fromkeys(sources, 0)
    moves = []
    known: dict[tuple[object, ...], list[Need]] = {}  # layers are alike
    for name in dict.fromkeys(name for boxes in (*sources.values(), *destinations.values()) for name in boxes):
        held = tuple((rank, boxes[name]) for rank, boxes in sources.items() if name in boxes)
        wanted = tuple((rank, boxes[name]) for rank, boxes in destinations.items() if name in boxes)
        if (held, wanted) not in known:
            known[held, wanted] = list(_needs(name, held, wanted, near))
        for destination, box, holders in known[held, wanted]:
            source = min(holders, key=lambda holder: (sent[holder], holder))
            moves.append(Move(name, box, source, destination))
            if source != destination:
                sent[source] += box.numel
    return ReshardPlan(tuple(moves), sources, destinations)


def _needs(
    name: str, held: Sequence[tuple[int, Box]], wanted: Sequence[tuple[int, Box]], near: Mapping[int, Address]
) -> Iterator[Need]:
    """What each destination takes of a parameter, and from whom it may."""
    holders: dict[Box, list[int]] = {}
    for rank, box in held:
        if box.numel:
            holders.setdefault(box, []).append(rank)
    if any(one.intersection(other) for one, other in combinations(holders, 2)):
        raise ValueError(f"{name}: the sources hold boxes that overlap")
    for destination, target in wanted:
        found = 0
        for box, ranks in holders.items():
            if common := box.intersection(target):
                found += common.numel
                yield destination, common, _nearest(destination, ranks, near)
        if found != target.numel:
            raise ValueError(f"{name}: rank {destination} needs {target.numel} elements, and the sources hold {found}")


def _nearest(destination: int, ranks: Iterable[int], near: Mapping[int, Address]) -> tuple[int, ...]:
    """Those of the ranks that are nearest to the destination; itself alone if it is among them."""
    ranks = list(ranks)
    if destination in ranks:
        return (destination,)
    shared = {rank: _shared(near.get(rank, ()), near.get(destination, ())) for rank in ranks}
    return tuple(rank for rank in ranks if shared[rank] == max(shared.values()))


def _shared(one: Address, other: Address) -> int:
    """Length of the beginning that two addresses share."""
    length = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        length += 1
    return length
