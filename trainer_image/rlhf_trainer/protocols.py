"""Transfer protocols: which rows a rank gets, and whose outputs make up the result (HybridFlow, Table 3).

A protocol is two plain functions; one of your own is made the same way and given to `types.register`. Those of Table 3
follow from types in the words of OneFlow's SBP (arXiv:2110.15032): what each axis of a layout does to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import pairwise

from rlhf_api.parallel_sizes import Axis, ParallelSizes


class Spread(Enum):
    """What an axis of a layout does to a batch."""

    SPLIT = "S(0)"
    """Its ranks hold different rows; contiguous, in their order."""
    BROADCAST = "B"
    """Its ranks hold the same."""
    SUM = "P"
    """Its ranks hold addends of the same rows."""
    LAST = "last"
    """Its last rank holds it, as that of a pipeline does."""


Spreads = Mapping[Axis, Spread]
"""What each axis does, the outermost first; an axis that is left out broadcasts."""
Axes = tuple[tuple[Axis, Spread], ...]
"""The same, as the key under which an answer is remembered: a step asks for the same few again and again."""


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """How a call is distributed over the ranks of a group and its outputs are collected."""

    name: str
    distribute: Callable[[ParallelSizes, int], list[range]]
    """(layout, rows of the batch) -> the rows that each rank gets."""
    collect: Callable[[ParallelSizes], list[tuple[int, ...]]]
    """layout -> the ranks whose outputs are gathered, in the order of their rows; those of a tuple are added up."""
    by_rank: bool = False
    """The caller gives a batch for each rank, which gets all of its rows; nothing is distributed."""


def blocks(rows: int, count: int) -> list[range]:
    """`count` contiguous blocks of rows; where it does not divide the first are longer by one."""
    short, longer = divmod(rows, count)
    starts = [place * short + min(place, longer) for place in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@lru_cache
def distributed(takes: Axes, layout: ParallelSizes, rows: int) -> list[range]:
    """The rows of each rank when a batch arrives spread in this way: a block for each place on the split axes."""
    split = [axis for axis, spread in takes if spread is Spread.SPLIT]
    count, places = 1, [0] * layout.world_size
    for axis in split:
        count *= layout.size(axis)
        places = [place * layout.size(axis) + layout.coordinates(rank)[axis] for rank, place in enumerate(places)]
    shares = blocks(rows, count)
    return [shares[place] for place in places]


@lru_cache
def collected(gives: Axes, layout: ParallelSizes) -> list[tuple[int, ...]]:
    """The ranks that hold a result spread in this way, each part of it once."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        places = layout.coordinates(rank)
        if all(_is_taken(spread, places[axis], layout.size(axis)) for axis, spread in gives):
            key = tuple(places[axis] for axis, spread in gives if spread is Spread.SPLIT)
            parts.setdefault(key, []).append(rank)
    return [tuple(parts[key]) for key in sorted(parts)]


def _is_taken(spread: Spread, place: int, size: int) -> bool:
    """Whether the output of a rank at this place of an axis belongs to the result."""
    return place == {Spread.BROADCAST: 0, Spread.LAST: size - 1}.get(spread, place)


def typed(name: str, *, takes: Spreads, gives: Spreads) -> TransferProtocol:
    """The protocol of methods that take and give batches spread in these ways; `gives` names every axis of a view."""
    return TransferProtocol(
        name=name,
        distribute=partial(distributed, tuple(takes.items())),
        collect=partial(collected, tuple(gives.items())),
    )


S, B, LAST = Spread.SPLIT, Spread.BROADCAST, Spread.LAST
EVERY_RANK: Spreads = {"data": S, "pipeline": S, "tensor": S}

ONE_TO_ALL = typed("ONE_TO_ALL", takes={}, gives=EVERY_RANK)
DP_PROTO = typed("DP_PROTO", takes=EVERY_RANK, gives=EVERY_RANK)
"""Every rank is a data-parallel one (FSDP, ZeRO)."""
THREE_D_PROTO = typed("3D_PROTO", takes={"data": S}, gives={"data": S, "pipeline": LAST, "tensor": B})
THREE_D_ALL_MICRO_DP = typed(
    "3D_ALL_MICRO_DP",
    takes={"data": S, "micro": S},
    gives={"data": S, "micro": S, "generation_pipeline": LAST, "generation_tensor": B},
)
THREE_D_PP_ONLY = typed("3D_PP_ONLY", takes={}, gives={"data": B, "pipeline": S, "tensor": B})
ALL_TO_ALL = replace(ONE_TO_ALL, name="ALL_TO_ALL", by_rank=True)
