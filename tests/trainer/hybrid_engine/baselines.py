"""What HybridFlow is compared with: HybridFlow-V and DS-Chat gather the whole model, then keep a shard of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import Parameter, Shards, generation_shards
from rlhf_trainer.hybrid_engine.reshard_plan import Move, Parties, ReshardPlan, plan
from rlhf_trainer.tensor_slice import TensorSlice, WeightSlice

Mode = Literal["HybridFlow", "HybridFlow-V", "DS-Chat"]
MODES: tuple[Mode, ...] = ("HybridFlow", "HybridFlow-V", "DS-Chat")
Method = Literal["interval", "consecutive"]
"""How a replica's ranks are grouped for generation: HybridFlow's rule, or HybridFlow-V's, the order of training."""
Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class GenerationCoordinates:
    """What a rank does in generation."""

    stage: int
    """Which of the p_g pipeline stages it holds."""
    shard: int
    """Which of the t_g tensor-parallel shards of that stage."""
    micro: int
    """Which of the d_g micro data-parallel replicas of its training replica it belongs to."""


@dataclass(frozen=True, kw_only=True)
class GenerationGroups:
    """All groups of a layout, each in the order of its members' coordinates, each list by its first rank."""

    tensor: Groups
    pipeline: Groups
    micro_data: Groups
    """Ranks that hold the same generation shard; by the interval rule their training shards make it up."""


@dataclass(frozen=True)
class Transition:
    """A way from training to generation."""

    plans: Sequence[ReshardPlan]
    """By rank; what it wants is what it brings together: its generation shard, or the whole model."""
    kept: Sequence[Shards]
    """What each rank generates with."""


def generation_coordinates(layout: ParallelSizes, rank: int, method: Method) -> GenerationCoordinates:
    """Which part of the model a rank generates with."""
    if method == "interval":
        at = layout.coordinates(rank)
        stage, shard, micro = at["generation_pipeline"], at["generation_tensor"], at["micro"]
    else:
        micro, place = divmod(
            rank % (layout.pipeline * layout.tensor), layout.generation_pipeline * layout.generation_tensor
        )
        stage, shard = divmod(place, layout.generation_tensor)
    return GenerationCoordinates(stage=stage, shard=shard, micro=micro)


def generation_groups(layout: ParallelSizes, method: Method = "interval") -> GenerationGroups:
    """The groups of all ranks of a layout."""
    tensor: dict[tuple[int, int, int], list[int]] = {}
    pipeline: dict[tuple[int, int, int], list[int]] = {}
    micro_data: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        replica, at = layout.coordinates(rank)["data"], generation_coordinates(layout, rank, method)
        tensor.setdefault((replica, at.stage, at.micro), []).append(rank)
        pipeline.setdefault((replica, at.shard, at.micro), []).append(rank)
        micro_data.setdefault((replica, at.stage, at.shard), []).append(rank)
    return GenerationGroups(
        tensor=list(tensor.values()), pipeline=list(pipeline.values()), micro_data=list(micro_data.values())
    )


def transition(
    mode: Mode, model: Sequence[Parameter], layout: ParallelSizes, *, shards: int = 1, per_node: int = 8
) -> Transition:
    """The way of a mode, with so many ranks on a node. DS-Chat's weights are always sharded over all ranks (ZeRO-3)."""
    sizes = replace(layout, replicas=1 if mode == "DS-Chat" else layout.data // shards)
    kept = [generation_shards(model, layout, rank) for rank in range(layout.world_size)]
    if mode != "HybridFlow":
        kept = _renumbered(kept, layout)
        sizes = replace(sizes, generation_pipeline=1, generation_tensor=1)
    return Transition(plans_of(model, sizes, per_node=per_node), kept)


def plans_of(model: Sequence[Parameter], sizes: ParallelSizes, *, per_node: int = 8) -> list[ReshardPlan]:
    """The plan of every rank of a pool that trains and generates."""
    nodes = [rank // per_node for rank in range(sizes.world_size)]
    return [plan(model, Parties.replica(sizes, nodes, rank), rank) for rank in range(sizes.world_size)]


def exchanged(made: ReshardPlan) -> list[Move]:
    """Moves that a rank sends to others or gets from them."""
    return [move for each in made.moves.values() for move in (*each.across, *each.within)]


def sent(made: ReshardPlan) -> int:
    """Elements that a rank sends to others; one for two ranks counts twice."""
    return sum(move.slice.numel for move in exchanged(made) if move.source == made.rank)


def received(made: ReshardPlan) -> int:
    return sum(move.slice.numel for move in exchanged(made) if move.destination == made.rank)


def entering(members: Sequence[ReshardPlan]) -> tuple[int, int]:
    """Elements that come from elsewhere to these ranks of a node, and those that some need and none of them holds."""
    ranks = {made.rank for made in members}
    moves = (move for made in members for move in exchanged(made) if move.destination == made.rank)
    entered = sum(move.slice.numel for move in moves if move.source not in ranks)
    return entered, sum(_lacking(members, name) for name in members[0].moves)


def _lacking(members: Sequence[ReshardPlan], name: str) -> int:
    """The elements of a parameter that these ranks need and none of them holds; equal slices count once."""
    wanted = {made.wanted[name] for made in members if name in made.wanted}
    held = {made.held[name] for made in members if name in made.held}
    common = (part.intersection(other) for part in wanted for other in held)
    return sum(part.numel for part in wanted) - sum(part.numel for part in common if part)


def _renumbered(held: Sequence[Shards], layout: ParallelSizes) -> list[Shards]:
    """The same generation shards, on the ranks that HybridFlow-V gives them to."""
    by_place = {}
    for rank, shards in enumerate(held):
        at = generation_coordinates(layout, rank, "interval")
        by_place[at.stage, at.shard] = shards
    wanted = [generation_coordinates(layout, rank, "consecutive") for rank in range(layout.world_size)]
    return [by_place[at.stage, at.shard] for at in wanted]


def assembled(pieces: Iterable[WeightSlice], shards: Mapping[str, TensorSlice], like: Tensor) -> dict[str, Tensor]:
    """The pieces put together: name -> tensor of the shape of its shard, of the type and on the device of `like`."""
    found = {name: torch.empty(shard.shape, dtype=like.dtype, device=like.device) for name, shard in shards.items()}
    for name, part, piece in pieces:
        found[name][part.within(shards[name])] = piece
    return found
