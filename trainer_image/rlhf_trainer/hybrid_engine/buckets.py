"""Buckets of a reshard (weights from training to generation shards): the parts that one collective exchanges.

All ranks of the world cut their transfers (`Move`) into buckets in the same way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from rlhf_trainer.hybrid_engine.reshard_plan import Move, ReshardPlan

Part = tuple[str, Move]
"""(name of a parameter, move of a part of that parameter to a rank)."""
Cut = tuple[int, int, int]
"""(index of a parameter, index of a part of the parameter, number of the parameter's parts)."""
BUCKETS = 48
"""Number of buckets into which the busiest rank's traffic is cut, if the bounds of a bucket's size allow it."""
GRAIN = 4
"""Larger parameters are cut into parts of at most 1 / GRAIN of a bucket's size, so that buckets fill well."""


@dataclass(frozen=True)
class Step:
    """Step of a reshard, one collective: the parts of parameters that a rank sends, receives and then gives to vLLM."""

    sends: tuple[Part, ...]
    """Parts of parameters that this rank sends in the collective, sorted by destination."""
    receives: tuple[Part, ...]
    """Parts of parameters that this rank receives in the collective, sorted by source."""
    needed: tuple[Part, ...]
    """Parts of this rank's generation shard that vLLM gets after the collective: parts that the rank already had, or
    receives in this collective or the one before."""
    is_exchanged: bool
    """Whether any rank of the world sends a part of a parameter in this step of the reshard. If so, all ranks call the
    collective; if not, none does."""

    @property
    def numel(self) -> int:
        """Number of elements of the buffer that this rank needs for the collective."""
        return numel(self.sends) + numel(self.receives)


def loads(plan: ReshardPlan) -> Tensor:
    """Count the elements of each parameter that a rank exchanges across nodes, and within its node: [parameters, 2]."""
    return torch.tensor([moves.traffic for moves in plan.moves.values()], dtype=torch.int64)


def steps(plan: ReshardPlan, loads_of_all: Tensor, bucket: tuple[int, int]) -> list[Step]:
    """Return a rank's steps of a reshard: step k sends bucket k across nodes.

    In the same step ranks of a node exchange bucket k - 1, forwards included; so on one node step 0 sends nothing.
    loads_of_all: `loads` of every rank of the world [ranks, parameters, 2]. A bucket holds 1 / BUCKETS of the busiest
    rank's traffic, within the bounds `bucket` (elements). A move is cut along its longest dim only. So its parts
    may differ in size by the elements at one index of that dim.
    """
    busiest, used, (least, most) = loads_of_all.sum(2), loads_of_all.amax(0) > 0, bucket
    limit = min(max(int(busiest.sum(1).max()) // BUCKETS, least), most)
    buckets = list(_buckets(_cuts(plan, busiest, limit), loads_of_all, limit))
    parts = list(_parts(plan, buckets, limit))
    crosses, trades = ([bool(used[[at for at, _, _ in bucket], place].any()) for bucket in buckets] for place in (0, 1))
    nothing: tuple[list[Part], list[Part], list[Part]] = ([], [], [])
    return [
        _step(plan.rank, across + within, needed, is_entering or is_forwarded)
        for (_, across, _), (needed, _, within), is_entering, is_forwarded in zip(
            [*parts, nothing], [nothing, *parts], [*crosses, False], [False, *trades], strict=True
        )
    ]


def _cuts(plan: ReshardPlan, traffic: Tensor, limit: int) -> list[Cut]:
    """List the parts of all parameters in sending order; pipeline stages alternate, so that no stage is idle."""
    found = []
    for parameter, (load, (start, stop)) in enumerate(zip(traffic.amax(0).tolist(), plan.spans, strict=True)):
        count = max(1, -(-load * GRAIN // limit))
        found += [(start + (stop - start) * index / count, (parameter, index, count)) for index in range(count)]
    return [cut for _, cut in sorted(found)]


def _buckets(cuts: Iterable[Cut], traffic: Tensor, limit: int) -> Iterator[list[Cut]]:
    """Group parts in order into buckets; a rank exchanges at most `limit` elements per bucket, forwards included."""
    bucket: list[Cut] = []
    before = total = torch.zeros_like(traffic[:, 0])
    for cut in cuts:
        share = -(-traffic[:, cut[0]] // cut[2])
        across, within = (total + share).T
        if bucket and int(torch.maximum(across + within, across + before[:, 1]).max()) > limit:
            yield bucket
            bucket, before, total = [], total, torch.zeros_like(total)
        bucket.append(cut)
        total = total + share
    if bucket:
        yield bucket


def _parts(
    plan: ReshardPlan, buckets: Iterable[Sequence[Cut]], limit: int
) -> Iterator[tuple[list[Part], list[Part], list[Part]]]:
    """Yield the parts of each bucket: (needed by this rank, exchanged across nodes, exchanged within its node)."""
    names = list(plan.moves)

    @cache  # all layers are cut in the same way
    def cut_move(moves: tuple[Move, ...], index: int, count: int) -> list[Move]:
        return [part for move in moves for part in _cut(move, index, count)]

    for bucket in buckets:
        needed: list[Part] = []
        rounds: tuple[list[Part], list[Part]] = ([], [])
        for parameter, index, count in bucket:
            name, moves = names[parameter], plan.moves[names[parameter]]
            if moves.own and index == 0:  # own parts need no bucket; they are cut to fit the buffer for casting
                pieces = -(-moves.own.slice.numel // limit)
                needed += [(name, part) for piece in range(pieces) for part in _cut(moves.own, piece, pieces)]
            for each, found in zip((moves.across, moves.within), rounds, strict=True):
                parts = [(name, part) for part in cut_move(each, index, count)]
                found.extend(parts)
                needed += [part for part in parts if part[1].destination == plan.rank]
        yield needed, *rounds


def _step(rank: int, parts: Sequence[Part], needed: Sequence[Part], is_exchanged: bool) -> Step:
    return Step(
        tuple(sorted((part for part in parts if part[1].source == rank), key=lambda part: part[1].destination)),
        tuple(sorted((part for part in parts if part[1].destination == rank), key=lambda part: part[1].source)),
        tuple(needed),
        is_exchanged,
    )


def _cut(move: Move, index: int, count: int) -> list[Move]:
    """Cut a move along its longest dim and return part `index` of `count`, as a list; an empty part is left out."""
    if count == 1:
        return [move]
    part = move.slice.chunk(move.slice.shape.index(max(move.slice.shape)), index, count)
    return [replace(move, slice=part)] if part.numel else []


def numel(parts: Iterable[Part]) -> int:
    """Return the total number of elements of some parts of parameters."""
    return sum(move.slice.numel for _, move in parts)
