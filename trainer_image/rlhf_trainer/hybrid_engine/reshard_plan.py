"""Which rank sends which part of a parameter to which, so that each gets what it lacks and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import Shards
from rlhf_trainer.tensor_slice import TensorSlice

Address = tuple[int, ...]
"""Where a rank is, outermost level first; the more leading levels two ranks share, the nearer they are."""
Need = tuple[int, TensorSlice, tuple[int, ...]]
"""(destination, the part that it needs, the nearest ranks that hold that part)."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a parameter that a rank gets from another rank, or has itself."""

    name: str
    slice: TensorSlice
    source: int
    destination: int

    @property
    def is_own(self) -> bool:
        """Whether source and destination are the same rank, so that nothing is sent."""
        return self.source == self.destination


@dataclass(frozen=True)
class ReshardPlan:
    """All moves, in the order of the sources' parameters, and the shards that ranks hold before and after."""

    moves: tuple[Move, ...]
    sources: Mapping[int, Shards]
    destinations: Mapping[int, Shards]

    def received(self, rank: int) -> int:
        """Elements that a rank gets from others."""
        return sum(move.slice.numel for move in self.moves if move.destination == rank and not move.is_own)

    def sent(self, rank: int) -> int:
        """Elements that a rank sends to others; those sent to two ranks count twice."""
        return sum(move.slice.numel for move in self.moves if move.source == rank and not move.is_own)

    @cached_property
    def exchange_groups(self) -> list[tuple[int, ...]]:
        """The smallest sets of ranks that exchange among themselves only, each sorted. A rank that sends and receives
        nothing is in none."""
        group_of: dict[int, set[int]] = {}
        for pair in {(move.source, move.destination) for move in self.moves if not move.is_own}:
            merged = group_of.get(pair[0], {pair[0]}) | group_of.get(pair[1], {pair[1]})
            group_of.update(dict.fromkeys(merged, merged))
        return sorted({tuple(sorted(group)) for group in group_of.values()})


def addresses(layout: ParallelSizes, *, shards: int) -> dict[int, Address]:
    """rank -> (replica of the model, generation stage, generation shard).

    Ranks whose addresses begin alike train the parts of the same generation shard.
    """
    found: dict[int, Address] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        found[rank] = (at["data"] // shards, at["generation_pipeline"], at["generation_tensor"])
    return found


def plan(
    sources: Mapping[int, Shards], destinations: Mapping[int, Shards], near: Mapping[int, Address] | None = None
) -> ReshardPlan:
    """The moves that give every destination its shards, each element once.

    A rank takes from itself what it holds, and the rest from the nearest ranks that hold it; of equally near ones from
    the one that has sent least. The sources' slices of a parameter must be equal or disjoint, as those of a training
    layout are: ValueError if they overlap, or if nobody holds a part of what is needed.
    """
    near = near or {}
    sent = dict.fromkeys(sources, 0)
    moves = []
    known: dict[tuple[object, ...], list[Need]] = {}  # layers are cut alike, so one is worked out for all
    for name in dict.fromkeys(name for shards in (*sources.values(), *destinations.values()) for name in shards):
        held = tuple((rank, shards[name]) for rank, shards in sources.items() if name in shards)
        wanted = tuple((rank, shards[name]) for rank, shards in destinations.items() if name in shards)
        if (held, wanted) not in known:
            known[held, wanted] = list(_needs(name, held, wanted, near))
        for destination, part, holders in known[held, wanted]:
            source = min(holders, key=lambda holder: (sent[holder], holder))
            moves.append(Move(name, part, source, destination))
            if source != destination:
                sent[source] += part.numel
    return ReshardPlan(tuple(moves), sources, destinations)


def _needs(
    name: str,
    held: Sequence[tuple[int, TensorSlice]],
    wanted: Sequence[tuple[int, TensorSlice]],
    near: Mapping[int, Address],
) -> Iterator[Need]:
    """The parts of a parameter that each destination needs, and which ranks may send them."""
    holders: dict[TensorSlice, list[int]] = {}
    for rank, part in held:
        if part.numel:
            holders.setdefault(part, []).append(rank)
    if any(one.intersection(other) for one, other in combinations(holders, 2)):
        raise ValueError(f"{name}: the sources hold slices that overlap")
    for destination, target in wanted:
        found = 0
        for part, ranks in holders.items():
            if common := part.intersection(target):
                found += common.numel
                yield destination, common, _nearest(destination, ranks, near)
        if found != target.numel:
            raise ValueError(f"{name}: rank {destination} needs {target.numel} elements, and the sources hold {found}")


def _nearest(destination: int, ranks: Iterable[int], near: Mapping[int, Address]) -> tuple[int, ...]:
    """Those of the ranks that are nearest to the destination; only itself if it is among them."""
    ranks = list(ranks)
    if destination in ranks:
        return (destination,)
    shared = {rank: _shared(near.get(rank, ()), near.get(destination, ())) for rank in ranks}
    return tuple(rank for rank in ranks if shared[rank] == max(shared.values()))


def _shared(one: Address, other: Address) -> int:
    """How many leading levels two addresses share."""
    length = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        length += 1
    return length
