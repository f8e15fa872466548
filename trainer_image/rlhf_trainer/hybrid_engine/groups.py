"""The ranks of a pool in generation: tensor, pipeline and micro data-parallel groups (HybridFlow section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_api.parallel_sizes import ParallelSizes

Method = Literal["interval", "consecutive"]
"""How a replica's ranks are grouped: HybridFlow's, or HybridFlow-V's, which numbers them as training does."""
Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a rank does in generation."""

    stage: int
    """Which of the p_g pipeline stages it holds."""
    shard: int
    """Which of the t_g tensor-parallel shards of that stage."""
    micro: int
    """Which of the d_g micro data-parallel replicas of its training replica it belongs to."""


@dataclass(frozen=True, kw_only=True)
class GenerationGroups:
    """All groups of a layout, each in the order of its members' places, each list by its first rank."""

    tensor: Groups
    pipeline: Groups
    micro_data: Groups
    """Ranks that hold the same generation shard; by the interval rule their training shards make it up."""


def cell(layout: ParallelSizes, rank: int, method: Method = "interval") -> Cell:
    """The place of a rank in generation."""
    if method == "interval":
        places = layout.coordinates(rank)
        return Cell(stage=places["generation_pipeline"], shard=places["generation_tensor"], micro=places["micro"])
    place = rank % (layout.pipeline * layout.tensor)
    stage, shard = divmod(place % (layout.generation_pipeline * layout.generation_tensor), layout.generation_tensor)
    return Cell(stage=stage, shard=shard, micro=place // (layout.generation_pipeline * layout.generation_tensor))


def generation_groups(layout: ParallelSizes, method: Method = "interval") -> GenerationGroups:
    """The groups of all ranks of a layout."""
    tensor: dict[tuple[int, int, int], list[int]] = {}
    pipeline: dict[tuple[int, int, int], list[int]] = {}
    micro_data: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        replica, here = layout.coordinates(rank)["data"], cell(layout, rank, method)
        tensor.setdefault((replica, here.stage, here.micro), []).append(rank)
        pipeline.setdefault((replica, here.shard, here.micro), []).append(rank)
        micro_data.setdefault((replica, here.stage, here.shard), []).append(rank)
    return GenerationGroups(
        tensor=list(tensor.values()), pipeline=list(pipeline.values()), micro_data=list(micro_data.values())
    )
