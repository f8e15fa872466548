"""Transfer protocols: which rows a rank gets, and which ranks' outputs make up the result (HybridFlow, Table 3).

A protocol is two functions, `distribute` and `collect`; any TransferProtocol can be given to `types.register`. Those of
Table 3 follow from how each axis of a layout places a batch: split, broadcast or partial sum (SBP of OneFlow,
arXiv:2110.15032; torch's DTensor says Shard, Replicate, Partial).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import pairwise

from rlhf_api.spec.parallel_sizes import Axis, ParallelSizes


class AxisPlacement(Enum):
    """Placement of a batch on the ranks of one axis of a layout."""

    SPLIT = "S(0)"
    """Placement in which each rank holds a contiguous block of the batch's rows, in the order of the ranks."""
    BROADCAST = "B"
    """Placement in which each rank holds the same rows."""
    PARTIAL = "P"
    """Placement in which each rank holds a partial sum of the same rows."""
    LAST = "last"
    """Placement in which only the last rank of the axis holds the rows, as the last stage of a pipeline does."""


AxisPlacements = Mapping[Axis, AxisPlacement]
"""Placement of a batch on each axis of a layout, the outermost axis first; an axis that is left out broadcasts."""
PlacementKey = tuple[tuple[Axis, AxisPlacement], ...]
"""AxisPlacements as a hashable key of `lru_cache`; a step uses few different ones."""


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """Rule by which a call is distributed over the ranks of a worker group, and the ranks' outputs are collected."""

    name: str
    distribute: Callable[[ParallelSizes, int], list[range]]
    """Function (layout, number of rows of the batch) -> the rows that each rank gets."""
    collect: Callable[[ParallelSizes], list[tuple[int, ...]]]
    """Function (layout) -> tuples of ranks in the order of rows; outputs within a tuple are added up, tuples joined."""
    holders: Callable[[ParallelSizes], frozenset[int]] = lambda _: frozenset()
    """Function (layout) -> ranks with final output for their rows; models in such a rank's process read this output."""
    takes: PlacementKey = ()
    """Placement of the input by axis, which is empty for a protocol that has functions only."""
    gives: PlacementKey = ()
    """Placement of the output on every axis that the protocol knows; empty like `takes`."""
    by_rank: bool = False
    """Whether the caller gives a batch for each rank; False: `distribute` gives each rank its rows of one batch."""

    def axes(self, layout: ParallelSizes) -> dict[AxisPlacement, tuple[Axis, ...]]:
        """Return the axes with several ranks by their use: to split or broadcast the input, or for partial sums."""
        split = [axis for axis, placement in self.takes if placement is AxisPlacement.SPLIT]
        addends = [axis for axis, placement in self.gives if placement is AxisPlacement.PARTIAL]
        copied = [axis for axis, _ in self.gives if axis not in split]
        found = {AxisPlacement.SPLIT: split, AxisPlacement.BROADCAST: copied, AxisPlacement.PARTIAL: addends}
        return {key: tuple(axis for axis in axes if layout.size(axis) > 1) for key, axes in found.items()}

    def misfit(self, layout: ParallelSizes, given: Sequence[range], rows: int, *, adds: bool) -> str:
        """Return in words why a call cannot give these rows of a batch to the ranks; empty if it can.

        adds: whether the call adds fields; then the ranks whose outputs are collected must have each row once.
        """
        if self.by_rank and layout.world_size > 1:
            return f"{self.name} needs a batch for each of {layout.world_size} ranks"
        if len(given) != layout.world_size:
            return f"{self.name} gives rows to {len(given)} ranks, but the model has {layout.world_size}"
        if outside := [part for part in given if part.start < 0 or part.stop > rows]:
            return f"{self.name} gives rows {outside[0].start} to {outside[0].stop} of a batch of {rows}"
        parts = [[given[rank] for rank in ranks] for ranks in self.collect(layout)] if adds else []
        ends, starts = [0, *(part[0].stop for part in parts)], [*(part[0].start for part in parts), rows]
        if adds and (starts != ends or any(rank != part[0] for part in parts for rank in part)):
            return f"{self.name} does not give each row once, so it can add no fields"
        return ""


def blocks(rows: int, count: int) -> list[range]:
    """Cut rows into `count` contiguous blocks; if `count` does not divide them, the first blocks are longer by one."""
    short, longer = divmod(rows, count)
    starts = [index * short + min(index, longer) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@lru_cache
def distributed(takes: PlacementKey, layout: ParallelSizes, rows: int) -> list[range]:
    """Return the rows of each rank for a batch with this placement: one block for each index on the split axes."""
    split = [axis for axis, placement in takes if placement is AxisPlacement.SPLIT]
    count, indices = 1, [0] * layout.world_size
    for axis in split:
        count *= layout.size(axis)
        indices = [index * layout.size(axis) + layout.coordinates(rank)[axis] for rank, index in enumerate(indices)]
    parts = blocks(rows, count)
    return [parts[index] for index in indices]


@lru_cache
def collected(gives: PlacementKey, layout: ParallelSizes) -> list[tuple[int, ...]]:
    """Return the ranks whose outputs make up the result with this placement: per block of rows, the ranks to add up."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if all(_is_collected(placement, at[axis], layout.size(axis)) for axis, placement in gives):
            key = tuple(at[axis] for axis, placement in gives if placement is AxisPlacement.SPLIT)
            parts.setdefault(key, []).append(rank)
    return [tuple(parts[key]) for key in sorted(parts)]


@lru_cache
def holders(gives: PlacementKey, layout: ParallelSizes) -> frozenset[int]:
    """Return the ranks whose own output is final for their rows: broadcast copies too, but no partial sums."""
    if any(placement is AxisPlacement.PARTIAL and layout.size(axis) > 1 for axis, placement in gives):
        return frozenset()
    last = [axis for axis, placement in gives if placement is AxisPlacement.LAST]
    places = enumerate(map(layout.coordinates, range(layout.world_size)))
    return frozenset(rank for rank, at in places if all(at[axis] == layout.size(axis) - 1 for axis in last))


def _is_collected(placement: AxisPlacement, index: int, size: int) -> bool:
    """Whether the output of the rank at this index of an axis belongs to the result."""
    return index == {AxisPlacement.BROADCAST: 0, AxisPlacement.LAST: size - 1}.get(placement, index)


def sbp_protocol(name: str, *, takes: AxisPlacements, gives: AxisPlacements) -> TransferProtocol:
    """Return the protocol with these placements of input and output; `gives` names all axes of a layout."""
    return TransferProtocol(
        name=name,
        takes=tuple(takes.items()),
        gives=tuple(gives.items()),
        distribute=partial(distributed, tuple(takes.items())),
        collect=partial(collected, tuple(gives.items())),
        holders=partial(holders, tuple(gives.items())),
    )


S, B, LAST = AxisPlacement.SPLIT, AxisPlacement.BROADCAST, AxisPlacement.LAST
EVERY_RANK: AxisPlacements = {"data": S, "context": S, "pipeline": S, "tensor": S}

ONE_TO_ALL = sbp_protocol("ONE_TO_ALL", takes={}, gives=EVERY_RANK)
DP_PROTO = sbp_protocol("DP_PROTO", takes=EVERY_RANK, gives=EVERY_RANK)
"""Protocol for models whose ranks are all data-parallel (FSDP, ZeRO): each rank gets and returns its own rows."""
THREE_D_PROTO = sbp_protocol(
    "3D_PROTO", takes={"data": S}, gives={"data": S, "context": B, "pipeline": LAST, "tensor": B}
)
THREE_D_ALL_MICRO_DP = sbp_protocol(
    "3D_ALL_MICRO_DP",
    takes={"data": S, "micro": S},
    gives={"data": S, "micro": S, "generation_pipeline": LAST, "generation_tensor": B},
)
THREE_D_PP_ONLY = sbp_protocol("3D_PP_ONLY", takes={}, gives={"data": B, "context": B, "pipeline": S, "tensor": B})
ALL_TO_ALL = replace(ONE_TO_ALL, name="ALL_TO_ALL", by_rank=True, holders=lambda _: frozenset())
