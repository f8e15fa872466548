"""Carries out a ReshardPlan over torch.distributed, bucket by bucket; checksums are compared at the end.

pack 1 | pack 2 | deliver 1 | pack 3 | deliver 2 | ...   this rank casts and copies a bucket out; gives one to vLLM
       [ 1 is sent ]        [ 2 is sent ] ...            an asynchronous all_to_all of one exchange group
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

from rlhf_trainer.errors import NumericsError
from rlhf_trainer.generation.checksum import bit_sum
from rlhf_trainer.hybrid_engine.layout import Parameter, Shards, chunk
from rlhf_trainer.hybrid_engine.reshard_plan import Move, ReshardPlan
from rlhf_trainer.tensor_slice import WeightSlice


@dataclass
class ReshardStats:
    """What one reshard moved and held on this rank, in bytes; counted where a collective is called."""

    sent: int = 0
    received: int = 0
    collectives: int = 0
    """How many were called, with the one that compares checksums (whose bytes are not counted above)."""
    buffers: int = 0
    """Bytes of the send and receive buffers, which are freed when the reshard ends."""


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters of one layer, or a part of a large one, as this rank sees them."""

    needed: tuple[Move, ...]
    """All that this rank's generation shard takes from the bucket, in the order of the plan."""
    sends: tuple[Move, ...]
    """What it sends to other ranks, by destination."""
    receives: tuple[Move, ...]
    """What it receives from other ranks, by source."""
    exchanged: tuple[Move, ...]
    """All that the ranks of its exchange group send each other; if there is any, all of them call the collective."""


@dataclass(frozen=True)
class PendingBucket:
    """A bucket whose collective has been started."""

    needed: tuple[Move, ...]
    received: Mapping[Move, Tensor]
    """The buffer of each part that other ranks send; valid after `work`."""
    work: dist.Work | None
    """The collective; None if no rank of the exchange group sends anything."""


def buckets(plan: ReshardPlan, model: Sequence[Parameter], rank: int, limit: int) -> list[Bucket]:
    """The buckets of a rank, in layer order. A bucket holds parameters of one layer only.

    limit: the most elements that a rank sends and receives in a bucket. A larger parameter is cut into parts; as rows
    are not split, a part may exceed the limit by up to one row of each move. All ranks of an exchange group cut alike.
    """
    members = next((set(group) for group in plan.exchange_groups if rank in group), {rank})
    seen = (move for move in plan.moves if (move.destination == rank if move.is_own else move.source in members))
    moves_of = {name: list(moves) for name, moves in groupby(seen, key=lambda move: move.name)}
    found = []
    for _, layer in groupby(model, key=lambda parameter: parameter.positions):
        bucket: list[Move] = []
        total: Counter[int] = Counter()
        for part in chain.from_iterable(_parts(moves_of.get(parameter.name, []), limit) for parameter in layer):
            added = _traffic_of(part)
            if any(total[place] + load > limit for place, load in added.items()):
                found.append(_bucket(bucket, rank))
                bucket, total = [], Counter()
            bucket.extend(part)
            total.update(added)
        found.append(_bucket(bucket, rank))
    return [bucket for bucket in found if bucket.needed or bucket.exchanged]


def _traffic_of(moves: Iterable[Move]) -> Counter[int]:
    """rank -> elements that it sends and receives."""
    loads: Counter[int] = Counter()
    for move in moves:
        if not move.is_own:
            loads[move.source] += move.slice.numel
            loads[move.destination] += move.slice.numel
    return loads


def _parts(moves: Sequence[Move], limit: int) -> list[list[Move]]:
    """The moves of a parameter in parts below the limit; the first holds what ranks take from themselves."""
    own = [part for move in moves if move.is_own for part in _cut(move, -(-move.slice.numel // limit))]
    exchanged = [move for move in moves if not move.is_own]
    count = -(-max(_traffic_of(exchanged).values(), default=0) // limit)
    cut = zip_longest(*(_cut(move, count) for move in exchanged))
    return [own, *([move for move in part if move] for part in cut)]


def _cut(move: Move, count: int) -> list[Move]:
    """A move in `count` parts along its longest dim, or in fewer where there are fewer rows."""
    longest = move.slice.shape.index(max(move.slice.shape))
    parts = (chunk(move.slice, longest, index, count) for index in range(count))
    return [replace(move, slice=part) for part in parts if part.numel]


def _bucket(moves: Sequence[Move], rank: int) -> Bucket:
    exchanged = [move for move in moves if not move.is_own]
    sends = [move for move in exchanged if move.source == rank]
    receives = [move for move in exchanged if move.destination == rank]
    return Bucket(
        needed=tuple(move for move in moves if move.destination == rank),
        sends=tuple(sorted(sends, key=lambda move: move.destination)),
        receives=tuple(sorted(receives, key=lambda move: move.source)),
        exchanged=tuple(exchanged),
    )


class Exchange:
    """Brings this rank's generation shard together after each update of the training weights."""

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
        """All ranks of the world make it together with the same arguments (but `device`): it makes process groups.

        dtype: the generator's; elements are cast before they are sent. buffer_bytes: the most that this rank's buffers
        take: a third for each of the two buckets in progress, a third for casting what it takes from itself.
        timeout: of a collective; torch's default if left out.
        """
        self._rank = dist.get_rank()
        self._held: Shards = plan.sources.get(self._rank, {})
        self._wanted: Shards = plan.destinations.get(self._rank, {})
        self._dtype, self._device = dtype, device
        self._buckets = buckets(plan, model, self._rank, buffer_bytes // 3 // dtype.itemsize)
        self._members: tuple[int, ...] = ()
        self._group: dist.ProcessGroup | None = None
        for members in plan.exchange_groups:
            group = dist.new_group(list(members), timeout=timeout)
            if self._rank in members:
                self._members, self._group = members, group
        exchanged = chain.from_iterable(bucket.exchanged for bucket in self._buckets)
        self._slots = {move: slot for slot, move in enumerate(exchanged)}
        self.stats = ReshardStats()
        """Of the last reshard."""
        self.checksums: dict[str, int] = {}
        """Parameter -> `bit_sum` of this rank's generation shard as it arrived; of the last reshard."""

    def pieces(self, weights: Mapping[str, Tensor]) -> Iterator[WeightSlice]:
        """This rank's generation shard, piece by piece in the plan's order. Every rank must iterate to the end.

        weights: parameter -> this rank's training shard of it, which is only read. A piece is valid until the next one
        is asked for; it may be a view of a training weight. At the end NumericsError, on all ranks of the exchange
        group, if a part arrived with other bits than it was sent with.
        """
        own_type = next((weight.dtype for weight in weights.values()), self._dtype)
        to_cast = (move.slice.numel for bucket in self._buckets for move in bucket.needed if move.is_own)
        on_wire = max((_numel(bucket.sends) + _numel(bucket.receives) for bucket in self._buckets), default=0)
        sizes = [on_wire, on_wire, max(to_cast, default=0) if own_type != self._dtype else 0]
        one, other, cast = (torch.empty(size, dtype=self._dtype, device=self._device) for size in sizes)
        self.stats = ReshardStats(buffers=one.nbytes + other.nbytes + cast.nbytes)
        self.checksums = dict.fromkeys(self._wanted, 0)
        differences = torch.zeros(len(self._slots), dtype=torch.int64)
        ahead: PendingBucket | None = None
        for bucket in self._buckets:
            one, other = other, one
            behind, ahead = ahead, self._send(bucket, weights, one, differences)
            if behind:
                yield from self._deliver(behind, weights, cast, differences)
        if ahead:
            yield from self._deliver(ahead, weights, cast, differences)
        self._compare(differences)

    def _send(
        self, bucket: Bucket, weights: Mapping[str, Tensor], buffer: Tensor, differences: Tensor
    ) -> PendingBucket:
        """Cast and pack what other ranks need of a bucket, and start the collective."""
        given, got = _numel(bucket.sends), _numel(bucket.receives)
        sent, received = buffer[:given], buffer[given : given + got]
        for move, part in _views(bucket.sends, sent).items():
            part.copy_(self._local(move, weights))
            differences[self._slots[move]] = bit_sum(part)
        work = None
        if bucket.exchanged:
            receives = [_numel(move for move in bucket.receives if move.source == member) for member in self._members]
            sends = [_numel(move for move in bucket.sends if move.destination == member) for member in self._members]
            work = dist.all_to_all_single(
                received.view(torch.uint8),  # gloo knows fewer types than generators do
                sent.view(torch.uint8),
                [size * buffer.itemsize for size in receives],
                [size * buffer.itemsize for size in sends],
                group=self._group,
                async_op=True,
            )
            self.stats.collectives += 1
            self.stats.sent += sent.nbytes
            self.stats.received += received.nbytes
        return PendingBucket(bucket.needed, _views(bucket.receives, received), work)

    def _deliver(
        self, bucket: PendingBucket, weights: Mapping[str, Tensor], cast: Tensor, differences: Tensor
    ) -> Iterator[WeightSlice]:
        """Wait for a bucket and give its pieces: this rank's own, cast, and those of other ranks as they arrived."""
        if bucket.work is not None:
            bucket.work.wait()
        for move in bucket.needed:
            if move.is_own:
                piece = self._local(move, weights)
                if len(cast):
                    piece = cast[: move.slice.numel].view(move.slice.shape).copy_(piece)
            else:
                piece = bucket.received[move]
            total = bit_sum(piece)
            if not move.is_own:
                differences[self._slots[move]] = -total
            self.checksums[move.name] = (self.checksums[move.name] + total + 2**63) % 2**64 - 2**63  # as int64 wraps
            yield move.name, move.slice, piece

    def _compare(self, differences: Tensor) -> None:
        """NumericsError unless source and destination of each part counted the same: then the differences sum to 0."""
        if self._group is None:
            return
        differences = differences.to(self._device)
        dist.all_reduce(differences, group=self._group)
        self.stats.collectives += 1
        if not differences.any():
            return
        move = next(move for move, slot in self._slots.items() if differences[slot])
        raise NumericsError(
            f"{move.name}: what rank {move.destination} received of it is not what rank {move.source} sent (checksum)"
        )

    def _local(self, move: Move, weights: Mapping[str, Tensor]) -> Tensor:
        """The elements of a move, as a view of this rank's training weights."""
        weight, held = weights[move.name], self._held[move.name]
        assert weight.shape == held.shape, f"{move.name}: rank {self._rank} holds {tuple(weight.shape)}, not {held}"
        return weight.detach()[move.slice.within(held)]


def _views(moves: Sequence[Move], buffer: Tensor) -> dict[Move, Tensor]:
    """Views of a buffer in which the moves lie one after the other."""
    parts = torch.split(buffer, [move.slice.numel for move in moves]) if moves else ()
    return {move: part.view(move.slice.shape) for move, part in zip(moves, parts, strict=True)}


def _numel(moves: Iterable[Move]) -> int:
    return sum(move.slice.numel for move in moves)
