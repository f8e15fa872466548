"""Dispatch of a call: the rows and fields for each rank, and the result of the call from the ranks' outputs."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, chain, pairwise

import ray

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.spec.rollout import STREAM_SHARES
from rlhf_trainer.controller.batch import BatchFuture, BatchSlice, FieldFuture, Holders, RowBlock
from rlhf_trainer.controller.slot_process import OUTLETS
from rlhf_trainer.protocols import TransferProtocol
from rlhf_trainer.types import Transfer

Batches = BatchFuture | Sequence[BatchFuture]
"""Batch argument of a call: one batch for the whole worker group, or a batch for each rank (protocols `by_rank`)."""


@dataclass(frozen=True)
class Fetched:
    """Rows of a field that processes other than their producer read."""

    pieces: Sequence[range]
    """Row ranges in order, cut where a reader's rows begin or end."""
    some_are_empty: bool
    """Whether some reading rank gets no rows of the batch."""

    def cuts(self, made: range) -> list[range]:
        """Return the row ranges of the blocks that a rank sends; `made`: the rows that the rank computes.

        A reader that gets no rows takes an empty block, which only tells the field's type and shape.
        """
        first = bisect_right(self.pieces, made.start, key=lambda piece: piece.stop)
        last = bisect_left(self.pieces, made.stop, key=lambda piece: piece.start)
        inside = [range(max(piece.start, made.start), min(piece.stop, made.stop)) for piece in self.pieces[first:last]]
        return [*([range(made.start, made.start)] if self.some_are_empty else []), *inside]


class Readers:
    """Index of the worker methods of a job by the fields that the methods read.

    The producer of a field puts rows that another process reads into Ray's object store, in a block for each reader's
    rows. Rows that every reader has in its own process are not sent at all.
    """

    def __init__(self) -> None:
        self._by_field: dict[str, set[tuple[TransferProtocol, ParallelSizes, str]]] = {}
        self.fetched = cache(self._fetched)
        """Function (field, its holders, rows of the batch) -> rows of the field that other processes read."""

    def add(self, pool: str, layout: ParallelSizes, transfer: Transfer) -> None:
        """Add a method of a model with this pool and layout to the index; `transfer` says which fields it reads."""
        self.fetched.cache_clear()
        for name in (*transfer.reads, *transfer.reads_if_there):
            self._by_field.setdefault(name, set()).add((transfer.protocol, layout, pool))

    def remove(self, pool: str) -> None:
        """Remove the methods of the models of a pool from the index."""
        self.fetched.cache_clear()
        for name, readers in self._by_field.items():
            self._by_field[name] = {reader for reader in readers if reader[-1] != pool}

    def _fetched(self, name: str, holders: Holders, rows: int) -> Fetched:
        read: list[range] = []
        for read_name, readers in self._by_field.items():
            if read_name != name and not read_name.endswith(f"_{name}"):  # as `with_prefixed` names it
                continue
            for protocol, layout, pool in readers:
                if protocol.by_rank:
                    read.append(range(rows))
                    continue
                given = enumerate(protocol.distribute(layout, rows))
                read += [part for rank, part in given if not holders.keep(part, pool=pool, rank=rank)]
        change: Counter[int] = Counter()  # row -> readers that begin there less readers that end there
        for part in read:
            change[part.start] += 1
            change[part.stop] -= 1
        places = sorted(change)
        readers_from = accumulate(change[place] for place in places)
        pieces = [range(*ends) for ends, count in zip(pairwise(places), readers_from, strict=False) if count]
        return Fetched(pieces, some_are_empty=not all(read))


@dataclass(frozen=True)
class RankPart:
    """Part of a call that one rank runs: its rows of the batch, and the blocks of rows to read and to send."""

    rows: range = range(0)
    cuts: Mapping[str, Sequence[range]] = field(default_factory=dict)
    """Row ranges of the blocks (tensors) that the rank sends to other processes, by name of the added field."""
    batch: BatchSlice | None = None
    references: Sequence[ray.ObjectRef] = ()
    """References to the blocks that the rank reads from other processes."""

    @property
    def local_cuts(self) -> dict[str, list[slice]]:
        """Field -> slices of the rank's own rows that other ranks read, counted from the rank's first row."""
        first, cuts = self.rows.start, self.cuts.items()
        return {name: [slice(part.start - first, part.stop - first) for part in parts] for name, parts in cuts}

    def blocks(self, references: Iterator[ray.ObjectRef]) -> dict[str, list[RowBlock]]:
        """Return the blocks of rows that the rank sends, by added field, without fetching them.

        references: to the tensors of these blocks in Ray, in the order of `cuts`.
        """
        cuts = self.cuts.items()
        return {name: [RowBlock(part.start, part.stop, next(references)) for part in parts] for name, parts in cuts}


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Distribution of a call's batch over the ranks of a worker group."""

    call: int
    batch: Batches
    transfer: Transfer
    layout: ParallelSizes
    parts: Sequence[RankPart]
    holders: Holders
    """Processes that keep the fields which the call adds."""

    def collect(self, outputs: Sequence[Sequence[ray.ObjectRef]]) -> Batches:
        """Return the batch, or each rank's batch, with the fields that the ranks add.

        outputs: for each rank the references to the blocks that it sends, in the order of its `cuts`.
        """
        blocks = [part.blocks(iter(references)) for part, references in zip(self.parts, outputs, strict=True)]
        if not isinstance(self.batch, BatchFuture):
            return [
                one.with_fields({name: self._field(name, own) for name, own in mine.items()})
                for one, mine in zip(self.batch, blocks, strict=True)
            ]
        ranks = [rank for group in self.transfer.protocol.collect(self.layout) for rank in group]
        added = {name: [block for rank in ranks for block in blocks[rank][name]] for name in self.transfer.adds or ()}
        return self.batch.with_fields({name: self._field(name, found) for name, found in added.items()})

    def _field(self, name: str, blocks: Sequence[RowBlock]) -> FieldFuture:
        ordered = sorted(blocks, key=lambda block: (block.start, block.stop))
        return FieldFuture(call=self.call, name=name, holders=self.holders, blocks=ordered)


def dispatch(
    batch: Batches, transfer: Transfer, readers: Readers, *, pool: str, layout: ParallelSizes, call: int, name: str
) -> Dispatch:
    """Distribute a call's batch over the ranks of a pool.

    ValueError if the batch or the outputs of the call `name` do not fit its transfer protocol; KeyError for a field
    that the batch lacks.
    """
    protocol, adds = transfer.protocol, transfer.adds or ()
    given = _given(batch, transfer, layout, name=name)
    collected = set(chain.from_iterable(protocol.collect(layout)))
    keep = protocol.holders(layout)
    holders = Holders(pool, tuple(rows if rank in keep else None for rank, (_, rows) in enumerate(given)))
    size = given[0][0].size
    fetched = {added: None if protocol.by_rank else readers.fetched(added, holders, size) for added in adds}
    parts = []
    for rank, (one, rows) in enumerate(given):
        sent = fetched.items() if rank in collected else ()
        cuts = {added: read.cuts(rows) if read else [rows] for added, read in sent}
        fields = transfer.fields_read(one.fields)
        parts.append(RankPart(rows, cuts, *one.slice(rows, fields, pool=pool, rank=rank, reader=name)))
    return Dispatch(call=call, batch=batch, transfer=transfer, layout=layout, parts=parts, holders=holders)


def _given(
    batch: Batches, transfer: Transfer, layout: ParallelSizes, *, name: str
) -> Sequence[tuple[BatchFuture, range]]:
    protocol = transfer.protocol
    if protocol.by_rank:
        batches = [batch] if isinstance(batch, BatchFuture) else batch
        if len(batches) != layout.world_size:
            raise ValueError(f"{name}: {protocol.name} needs a batch for each of {layout.world_size} ranks")
        return [(one, range(one.size)) for one in batches]
    if not isinstance(batch, BatchFuture):
        raise ValueError(f"{name}: {protocol.name} takes one batch and distributes it itself")
    given = protocol.distribute(layout, batch.size)
    if misfit := protocol.misfit(layout, given, batch.size, adds=bool(transfer.adds)):
        raise ValueError(f"{name}: {misfit}")
    return [(batch, rows) for rows in given]


class Streams:
    """Record of generating calls that hand out row groups: finished responses, scored while others are generated."""

    def __init__(self) -> None:
        self.are_on = False
        """Whether generating calls of this job hand out their finished responses in row groups before they end."""
        self._ranks: dict[int, Sequence[ray.actor.ActorHandle]] = {}
        """Number of a generating call -> handles of the ranks that hand out its row groups."""
        self._scored: set[tuple[int, str]] = set()
        """Pairs (number of a generating call, name of a scoring call made on its row groups, not yet on all rows)."""

    def begin(
        self, call: int, transfer: Transfer, batch: Batches | None, ranks: Sequence[ray.actor.ActorHandle]
    ) -> bool:
        """Return whether a call hands out row groups (finished responses); if so, record the ranks that hold them."""
        leaves = self.are_on and transfer.in_groups and isinstance(batch, BatchFuture) and batch.step > 0
        if leaves:
            self._ranks[call] = ranks
        return leaves

    def forget(self) -> None:
        """Forget which scoring calls of the last step have scored row groups (finished responses)."""
        self._scored.clear()

    def groups(self, batch: BatchFuture) -> Iterator[list[ray.ObjectRef]]:
        """Yield lists of references to row groups (finished responses), one group of each generating rank in a list.

        The groups are of the batch's newest generating call, and come in the order in which the responses end.
        """
        call = max(made.call for made in batch.fields.values() if made.call in self._ranks)
        ranks = self._ranks.pop(call)
        for number in range(len(STREAM_SHARES)):
            yield [each.row_group.options(concurrency_group=OUTLETS).remote(call, number) for each in ranks]

    def read(
        self, name: str, batch: Batches | None, transfer: Transfer, *, in_groups: bool
    ) -> tuple[int | None, Transfer]:
        """Return (number of the generating call whose row groups the call `name` uses, `transfer` with fields to read).

        transfer: protocol of the call, with all fields that it reads and adds. in_groups: the call is made on a row
        group. The group brings the generating call's fields, so the call reads only fields of earlier calls. A call on
        all rows finds the results of earlier calls on the row groups, and reads no field. A call that uses no row
        groups gets None and the given `transfer`.
        """
        if not isinstance(batch, BatchFuture) or not transfer.row_by_row:
            return None, transfer
        made = {each: batch.fields[each].call for each in transfer.fields_read(batch.fields) if each in batch.fields}
        if in_groups:
            stream = max(made.values())
            self._scored.add((stream, name))
            before = tuple(each for each, call in made.items() if call != stream)
            return stream, replace(transfer, reads=before, reads_if_there=(), adds=None)
        for stream in made.values():
            if (stream, name) in self._scored:
                self._scored.remove((stream, name))
                return stream, replace(transfer, reads=(), reads_if_there=())
        return None, transfer
