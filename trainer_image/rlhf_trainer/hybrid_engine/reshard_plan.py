"""Reshard plan of one rank: its sends, forwards and receives. Each byte enters a node once.

A rank plans its own moves only, and once for each way of cutting a parameter, as all layers of a model are cut in the
same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_api.spec.parallel_sizes import Axis, ParallelSizes
from rlhf_trainer.hybrid_engine.layout import (
    Parameter,
    Shards,
    generation_shards,
    generation_slice,
    generation_stages_of,
    stages_of,
    training_shards,
    training_slice,
)
from rlhf_trainer.tensor_slice import TensorSlice

Ranks = list[int]


@dataclass(frozen=True, slots=True)
class Move:
    """Transfer of a part of a parameter from one rank to another, or to itself."""

    slice: TensorSlice
    source: int
    destination: int

    @property
    def is_own(self) -> bool:
        """Whether source and destination are the same rank, so that nothing is sent."""
        return self.source == self.destination


@dataclass(frozen=True)
class Moves:
    """Moves of one parameter for one rank: the rank's own part, exchange across nodes, and exchange within its node."""

    own: Move | None
    across: tuple[Move, ...]
    within: tuple[Move, ...]
    """Moves between this rank and ranks of its node, forwards of parts from other nodes included."""

    @cached_property
    def traffic(self) -> tuple[int, int]:
        """(elements sent and received across nodes, elements sent and received within the node)."""
        return sum(move.slice.numel for move in self.across), sum(move.slice.numel for move in self.within)


@dataclass(frozen=True)
class ReshardPlan:
    """Plan by which one rank moves weights from the training layout to the generation layout."""

    rank: int
    held: Shards
    """Slices of the parameters that the rank holds in training, by name."""
    wanted: Shards
    """Slices of the parameters that the rank needs for generation, by name."""
    moves: Mapping[str, Moves]
    """Moves by parameter: all parameters of the model, in its order, on every rank."""
    spans: Sequence[tuple[float, float]]
    """Begin and end of each parameter among all elements of its pipeline stage, as fractions from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Parties:
    """Ranks that send and receive weights in a reshard: one model replica, or a training and a generating pool."""

    training: ParallelSizes
    sources: range
    """Ranks with the training layout, in the layout's order, of one or more replicas."""
    generation: ParallelSizes
    destinations: range
    nodes: Sequence[int]
    """Number for the node of each rank; ranks on one node have the same number."""

    @classmethod
    def replica(cls, sizes: ParallelSizes, nodes: Sequence[int], rank: int) -> Parties:
        """Return the parties of the model replica that contains `rank`; each of its ranks trains and generates."""
        size = sizes.shards * sizes.pipeline * sizes.tensor
        ranks = range(rank - rank % size, rank - rank % size + size)
        return cls(training=sizes, sources=ranks, generation=sizes, destinations=ranks, nodes=nodes)

    @cached_property
    def training_places(self) -> dict[int, dict[Axis, int]]:
        return {rank: self.training.coordinates(place) for place, rank in enumerate(self.sources)}

    @cached_property
    def generation_places(self) -> dict[int, dict[Axis, int]]:
        return {rank: self.generation.coordinates(place) for place, rank in enumerate(self.destinations)}


def plan(model: Sequence[Parameter], parties: Parties, rank: int) -> ReshardPlan:
    """Plan the moves of a rank: parts come from the rank itself, else from a holder on its node.

    If no rank of a node holds a part, one rank of the node receives the part and forwards it within the node.
    ConfigError if the sizes do not fit the model.
    """
    stages = stages_of(model, parties.training.pipeline)
    generation_stages = generation_stages_of(model, parties.generation)
    moves_of_cut: dict[object, Moves] = {}
    moves = {}
    for parameter in model:
        stage, target = stages[parameter.name], generation_stages[parameter.name]
        cut = (replace(parameter, name="", positions=()), stage, target)
        if cut not in moves_of_cut:
            holders = _holders(parameter, parties, stage)
            moves_of_cut[cut] = _moves(holders, _requesters(parameter, parties, target), parties.nodes, rank)
        moves[parameter.name] = moves_of_cut[cut]
    is_source, is_destination = rank in parties.sources, rank in parties.destinations
    return ReshardPlan(
        rank,
        training_shards(model, parties.training, parties.sources.index(rank)) if is_source else {},
        generation_shards(model, parties.generation, parties.destinations.index(rank)) if is_destination else {},
        moves,
        _spans(model, stages),
    )


def _spans(model: Sequence[Parameter], stages: Mapping[str, frozenset[int]]) -> list[tuple[float, float]]:
    total = dict.fromkeys(stages.values(), 0)
    bounds = []
    for parameter in model:
        start = total[stages[parameter.name]]
        total[stages[parameter.name]] += TensorSlice.whole(parameter.shape).numel
        bounds.append((start, total[stages[parameter.name]]))
    totals = [total[stages[parameter.name]] for parameter in model]
    return [(start / whole, stop / whole) for (start, stop), whole in zip(bounds, totals, strict=True)]


def _holders(parameter: Parameter, parties: Parties, stages: frozenset[int]) -> list[tuple[TensorSlice, Ranks]]:
    """Return (slice, ranks that hold the slice) for each disjoint slice of a parameter in training."""
    found: dict[TensorSlice, Ranks] = {}
    for place, (rank, at) in enumerate(parties.training_places.items()):
        if at["pipeline"] in stages and (held := training_slice(parameter, parties.training, place)).numel:
            found.setdefault(held, []).append(rank)
    return list(found.items())


def _requesters(parameter: Parameter, parties: Parties, stages: frozenset[int]) -> dict[TensorSlice, dict[int, Ranks]]:
    """Return, for each disjoint slice of a parameter in generation and each node, the ranks that need the slice."""
    shards = range(parties.generation.generation_tensor)
    slices = [generation_slice(parameter, parties.generation, shard) for shard in shards]
    found: dict[TensorSlice, dict[int, Ranks]] = {}
    for rank, at in parties.generation_places.items():
        if at["generation_pipeline"] in stages:
            on_nodes = found.setdefault(slices[at["generation_tensor"]], {})
            on_nodes.setdefault(parties.nodes[rank], []).append(rank)
    return found


def _moves(
    holders: Sequence[tuple[TensorSlice, Ranks]],
    requesters: Mapping[TensorSlice, Mapping[int, Ranks]],
    nodes: Sequence[int],
    rank: int,
) -> Moves:
    """Return a rank's moves of one parameter, in an order that is the same at source and destination."""
    here = nodes[rank]
    own: Move | None = None
    across: list[Move] = []
    within: list[Move] = []
    for (held, sources), (target, needing) in ((cell, part) for cell in holders for part in requesters.items()):
        is_needed = rank in needing.get(here, ())
        part = held.intersection(target) if is_needed or rank in sources else None
        if part is None:
            continue
        if is_needed and rank in sources:
            own = Move(part, rank, rank)
        seen = needing if rank in sources else {here: needing[here]}
        for node, ranks in seen.items():
            entering, forwarded = _moves_into(node, part, sources, ranks, nodes)
            across += [move for move in entering if rank in (move.source, move.destination)]
            within += [move for move in forwarded if rank in (move.source, move.destination)]
    return Moves(own, tuple(across), tuple(within))


def _moves_into(
    node: int, part: TensorSlice, holders: Ranks, needing: Ranks, nodes: Sequence[int]
) -> tuple[list[Move], list[Move]]:
    """Return (at most one move from another node, moves inside the node) by which ranks of a node get a part."""
    inside = [rank for rank in holders if nodes[rank] == node]
    entering: list[Move] = []
    if not inside:
        source = holders[node % len(holders)]
        inside = [needing[source % len(needing)]]  # spreads parts of several sources over the ranks
        entering = [Move(part, source, inside[0])]
    others = (rank for rank in needing if rank not in inside)
    return entering, [Move(part, inside[place % len(inside)], rank) for place, rank in enumerate(others)]
