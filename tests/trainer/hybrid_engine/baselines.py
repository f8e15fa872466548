"""What HybridFlow is compared with: HybridFlow-V and DS-Chat gather the whole model, then keep a shard of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.hybrid_engine.layout import Parameter, Shards, generation_shards, training_shards
from rlhf_trainer.hybrid_engine.reshard_plan import ReshardPlan, addresses, plan
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

    plan: ReshardPlan
    """Its destinations are what a rank brings together: its generation shard, or the whole model."""
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


def transition(mode: Mode, model: Sequence[Parameter], layout: ParallelSizes, *, shards: int = 1) -> Transition:
    """The way of a mode. DS-Chat's weights are always sharded over all ranks (ZeRO-3), whatever `shards` says."""
    shards = layout.data if mode == "DS-Chat" else shards
    sources = dict(enumerate(training_shards(model, layout, shards=shards)))
    kept = generation_shards(model, layout)
    if mode != "HybridFlow":
        kept = _renumbered(kept, layout)
    whole = {parameter.name: TensorSlice.whole(parameter.shape) for parameter in model}
    destinations = dict(enumerate(kept)) if mode == "HybridFlow" else dict.fromkeys(sources, whole)
    return Transition(plan(sources, destinations, addresses(layout, shards=shards)), kept)


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
