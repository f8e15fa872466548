"""Carries out a plan over torch.distributed: every rank's generation shard, bucket by bucket and checked.

pack 1 | pack 2 | take 1 | pack 3 | take 2 | ...        on this rank: cast and copy out; hand over, then free
       [ 1 on the wire ] [ 2 on the wire ] ...           all_to_all inside the smallest group that trades

"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, groupby, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_trainer.boxes import Box
from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.layout import Boxes, Parameter, chunk
from rlhf_trainer.hybrid_engine.plan import Move, ReshardPlan

Piece = tuple[str, Box, Tensor]
"""(Hugging Face name, box of the parameter, its elements)."""


def wrapped(total: int) -> int:
    """A sum as int64 holds it."""
    return (total + 2**63) % 2**64 - 2**63


@dataclass
class Traffic:
    """What an update moved and held on this rank, in bytes; counted where a collective is called."""

    sent: int = 0
    received: int = 0
    collectives: int = 0
    """With the one that compares the checksums, whose bytes are not weights and are not counted above."""
    buffers: int = 0
    """Bytes of the buffers that live as long as the update does."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters of one layer, or a part of a large one, as this rank sees them."""

    takes: tuple[Move, ...]
    """What this rank shall hold of them, its own parts too, in the order of the plan."""
    gives: tuple[Move, ...]
    """What it sends, by destination."""
    gets: tuple[Move, ...]
    """What it receives, by source."""
    traded: tuple[Move, ...]
    """What the ranks of its trading group send each other; unless that is nothing, all of them call the collective."""


@dataclass(frozen=True)
class Flight:
    """A bucket on the wire."""

    takes: tuple[Move, ...]
    received: Mapping[Move, Tensor]
    """Where each part that comes from others will lie."""
    work: dist.Work | None


def buckets(plan: ReshardPlan, model: Sequence[Parameter], rank: int, limit: int) -> list[Bucket]:
    """The buckets of a rank, in layer order: parameters of one layer, of which no rank sends and gets over `limit`.

    limit: in elements. A parameter of which a rank sends and gets more is cut into parts, each over the limit by
    less than a row of every move at most. All ranks of a trading group cut alike.
    """
    members = next((set(group) for group in plan.trading_groups if rank in group), {rank})
    seen = (move for move in plan.moves if (move.destination == rank if move.is_own else move.source in members))
    moves_of = {name: list(moves) for name, moves in groupby(seen, key=lambda move: move.name)}
    found = []
    for _, layer in groupby(model, key=lambda parameter: parameter.places):
        bucket: list[Move] = []
        total: Counter[int] = Counter()
        for part in chain.from_iterable(_parts(moves_of.get(parameter.name, []), limit) for parameter in layer):
            added = _loads(part)
            if any(total[place] + load > limit for place, load in added.items()):
                found.append(_bucket(bucket, rank))
                bucket, total = [], Counter()
            bucket.extend(part)
            total.update(added)
        found.append(_bucket(bucket, rank))
    return [bucket for bucket in found if bucket.takes or bucket.traded]


def _loads(moves: Iterable[Move]) -> Counter[int]:
    """rank -> elements that it sends and gets."""
    loads: Counter[int] = Counter()
    for move in moves:
        if not move.is_own:
            loads[move.source] += move.box.numel
            loads[move.destination] += move.box.numel
    return loads


def _parts(moves: Sequence[Move], limit: int) -> list[list[Move]]:
    """The moves of a parameter in as many parts as keep each below the limit; what a rank has already comes first."""
    own = [part for move in moves if move.is_own for part in _cut(move, -(-move.box.numel // limit))]
    traded = [move for move in moves if not move.is_own]
    count = -(-max(_loads(traded).values(), default=0) // limit)
    cut = zip_longest(*(_cut(move, count) for move in traded))
    return [own, *([move for move in part if move] for part in cut)]


def _cut(move: Move, count: int) -> list[Move]:
    """A move in `count` parts along its longest dim, or in fewer where there are fewer rows."""
    longest = move.box.shape.index(max(move.box.shape))
    parts = (chunk(move.box, longest, index, count) for index in range(count))
    return [replace(move, box=part) for part in parts if part.numel]


def _bucket(moves: Sequence[Move], rank: int) -> Bucket:
    traded = [move for move in moves if not move.is_own]
    gives = [move for move in traded if move.source == rank]
    gets = [move for move in traded if move.destination == rank]
    return Bucket(
        takes=tuple(move for move in moves if move.destination == rank),
        gives=tuple(sorted(gives, key=lambda move: move.destination)),
        gets=tuple(sorted(gets, key=lambda move: move.source)),
        traded=tuple(traded),
    )


class Exchange:
    """The generation shard of this rank, brought together anew after every update of the training weights."""

    def __init__(
        self,
        plan: ReshardPlan,
        model: Sequence[Parameter],
        *,
        dtype: torch.dtype,
        buffer_bytes: int,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        """All ranks of the world make it together, with the same arguments (but `device`), for it makes their groups.

        dtype: that of the generator; elements are cast before they are sent. buffer_bytes: what the buffers of this
        rank may take together: a third for each of the two buckets that are alive, and one for the part of its own that
        is being cast. timeout: of a collective; torch's own if left out.
        """
        self._rank = dist.get_rank()
        self._held: Boxes = plan.sources.get(self._rank, {})
        self._wanted: Boxes = plan.destinations.get(self._rank, {})
        self._dtype, self._device = dtype, device
        self._buckets = buckets(plan, model, self._rank, buffer_bytes // 3 // dtype.itemsize)
        self._members: tuple[int, ...] = ()
        self._group: dist.ProcessGroup | None = None
        for members in plan.trading_groups:
            group = dist.new_group(list(members), timeout=timeout)
            if self._rank in members:
                self._members, self._group = members, group
        traded = chain.from_iterable(bucket.traded for bucket in self._buckets)
        self._slots = {move: slot for slot, move in enumerate(traded)}
        self.traffic = Traffic()
        """Of the last update."""
        self.checksums: dict[str, int] = {}
        """name -> bit sum of this rank's generation shard of it, as its sources sent it; of the last update."""

    def pieces(self, weights: Mapping[str, Tensor]) -> Iterator[Piece]:
        """This rank's generation shard in the plan's order; every rank goes through it to its end.

        weights: name -> this rank's part of the training weights, of the shape of its box. They are only read.
        A piece is valid until the next one is asked for; it may be a view of a training weight. Raises NumericsError at
        the end, on all ranks that trade with each other, if a part did not arrive with the bits it was sent with.
        """
        own_type = next((weight.dtype for weight in weights.values()), self._dtype)
        to_cast = (move.box.numel for bucket in self._buckets for move in bucket.takes if move.is_own)
        on_wire = max((_numel(bucket.gives) + _numel(bucket.gets) for bucket in self._buckets), default=0)
        sizes = [on_wire, on_wire, max(to_cast, default=0) if own_type != self._dtype else 0]
        one, other, cast = (torch.empty(size, dtype=self._dtype, device=self._device) for size in sizes)
        self.traffic = Traffic(buffers=one.nbytes + other.nbytes + cast.nbytes)
        self.checksums = dict.fromkeys(self._wanted, 0)
        differences = torch.zeros(len(self._slots), dtype=torch.int64)
        ahead: Flight | None = None
        for bucket in self._buckets:
            one, other = other, one
            behind, ahead = ahead, self._send(bucket, weights, one, differences)
            if behind:
                yield from self._hand_over(behind, weights, cast, differences)
        if ahead:
            yield from self._hand_over(ahead, weights, cast, differences)
        self._compare(differences)

    def _send(self, bucket: Bucket, weights: Mapping[str, Tensor], buffer: Tensor, differences: Tensor) -> Flight:
        """Cast and pack what others lack of a bucket, and put it on the wire."""
        given, got = _numel(bucket.gives), _numel(bucket.gets)
        sent, received = buffer[:given], buffer[given : given + got]
        for move, part in _laid_out(bucket.gives, sent).items():
            part.copy_(self._own(move, weights))
            differences[self._slots[move]] = bit_sum(part)
        work = None
        if bucket.traded:
            gets = [_numel(move for move in bucket.gets if move.source == member) for member in self._members]
            gives = [_numel(move for move in bucket.gives if move.destination == member) for member in self._members]
            work = dist.all_to_all_single(
                received.view(torch.uint8),  # gloo knows fewer types than generators do
                sent.view(torch.uint8),
                [size * buffer.itemsize for size in gets],
                [size * buffer.itemsize for size in gives],
                group=self._group,
                async_op=True,
            )
            self.traffic.collectives += 1
            self.traffic.sent += sent.nbytes
            self.traffic.received += received.nbytes
        return Flight(bucket.takes, _laid_out(bucket.gets, received), work)

    def _hand_over(
        self, flight: Flight, weights: Mapping[str, Tensor], cast: Tensor, differences: Tensor
    ) -> Iterator[Piece]:
        """The pieces of a bucket, its own as they are cast and the others as they arrived."""
        if flight.work is not None:
            flight.work.wait()
        for move in flight.takes:
            if move.is_own:
                piece = self._own(move, weights)
                if len(cast):
                    piece = cast[: move.box.numel].view(move.box.shape).copy_(piece)
            else:
                piece = flight.received[move]
            total = bit_sum(piece)
            if not move.is_own:
                differences[self._slots[move]] = -total
            self.checksums[move.name] = wrapped(self.checksums[move.name] + total)
            yield move.name, move.box, piece

    def _compare(self, differences: Tensor) -> None:
        """What a source counted less what its destination did is nothing, for every part that was sent."""
        if self._group is None:
            return
        differences = differences.to(self._device)
        dist.all_reduce(differences, group=self._group)
        self.traffic.collectives += 1
        if not differences.any():
            return
        move = next(move for move, slot in self._slots.items() if differences[slot])
        raise NumericsError(
            f"{move.name}: what rank {move.destination} received of it is not what rank {move.source} sent (checksum)"
        )

    def _own(self, move: Move, weights: Mapping[str, Tensor]) -> Tensor:
        """The elements of a move, as a view of this rank's training weights."""
        weight, box = weights[move.name], self._held[move.name]
        assert weight.shape == box.shape, f"{move.name}: rank {self._rank} holds {tuple(weight.shape)}, not {box}"
        return weight.detach()[move.box.within(box)]


def _laid_out(moves: Sequence[Move], buffer: Tensor) -> dict[Move, Tensor]:
    """Where the moves lie in a buffer, one after the other."""
    parts = torch.split(buffer, [move.box.numel for move in moves]) if moves else ()
    return {move: part.view(move.box.shape) for move, part in zip(moves, parts, strict=True)}


def _numel(moves: Iterable[Move]) -> int:
    return sum(move.box.numel for move in moves)
