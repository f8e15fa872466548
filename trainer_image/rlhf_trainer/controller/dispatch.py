"""Dispatch of a call: the rows and fields for each rank, and the result of the call from the ranks' outputs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import ray

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, BatchSlice, FieldFuture, Holders, RowBlock
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
        self._known: dict[tuple[str, Holders, int], Fetched] = {}

    def add(self, pool: str, layout: ParallelSizes, transfer: Transfer) -> None:
        """Add a worker method, given by its mark `transfer`, of a model with this layout on a pool."""
        self._known.clear()
        for name in (*transfer.reads, *transfer.reads_if_there):
            self._by_field.setdefault(name, set()).add((transfer.protocol, layout, pool))

    def fetched(self, name: str, holders: Holders, *, rows: int) -> Fetched:
        """Return the rows of a field that other processes read, in a batch of `rows` rows; results are cached."""
        key = (name, holders, rows)
        if key not in self._known:
            self._known[key] = self._fetched(*key)
        return self._known[key]

    def _fetched(self, name: str, holders: Holders, rows: int) -> Fetched:
        read = [
            part
            for field, readers in self._by_field.items()
            if field == name or field.endswith(f"_{name}")  # as `with_prefixed` names it
            for protocol, layout, pool in readers
            for rank, part in enumerate([range(rows)] if protocol.by_rank else protocol.distribute(layout, rows))
            if protocol.by_rank or not holders.keep(part, pool=pool, rank=rank)
        ]
        change: dict[int, int] = {}  # row -> readers that begin there less readers that end there
        for part in read:
            change[part.start] = change.get(part.start, 0) + 1
            change[part.stop] = change.get(part.stop, 0) - 1
        places = sorted(change)
        readers_from = accumulate(change[place] for place in places)
        pieces = [range(*ends) for ends, count in zip(pairwise(places), readers_from, strict=False) if count]
        return Fetched(pieces, some_are_empty=not all(read))


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Input rows and output blocks of one rank in a call."""

    pool: str
    rank: int
    batch: BatchFuture
    rows: range
    """The rows of the batch that the rank gets."""
    cuts: Mapping[str, Sequence[range]]
    """Rows of the blocks that the rank sends, for each field that it adds to the result."""

    def inputs(self, transfer: Transfer, *, reader: str) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """Return the rank's slice of the batch, and the references to the blocks of the fields that the rank reads."""
        names = transfer.fields_read(self.batch.fields)
        return self.batch.slice(self.rows, names, pool=self.pool, rank=self.rank, reader=reader)

    @property
    def local_cuts(self) -> dict[str, list[slice]]:
        """Field -> slices of the rank's own rows that other ranks read, counted from the rank's first row."""
        first = self.rows.start
        return {
            name: [slice(part.start - first, part.stop - first) for part in parts] for name, parts in self.cuts.items()
        }

    def blocks(self, outputs: Sequence[ray.ObjectRef]) -> dict[str, list[RowBlock]]:
        """Return the blocks of each added field, given the references to them in the order of `cuts`."""
        references = iter(outputs)
        return {
            name: [RowBlock(part.start, part.stop, next(references)) for part in parts]
            for name, parts in self.cuts.items()
        }


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Distribution of a call's batch over the ranks of a worker group."""

    call: int
    """Number of the distributed call, counted over the job."""
    parts: Sequence[RankPart]
    """Input rows and output blocks of each rank, in the order of the ranks."""
    holders: Holders
    """Processes that keep the fields which the call adds."""

    def collect(
        self, batch: Batches, transfer: Transfer, layout: ParallelSizes, outputs: Sequence[Sequence[ray.ObjectRef]]
    ) -> Batches:
        """Return the batch, or each rank's batch, with the fields that the ranks add.

        outputs: for each rank the references to the blocks that it sends.
        """
        blocks = [part.blocks(references) for part, references in zip(self.parts, outputs, strict=True)]
        if not isinstance(batch, BatchFuture):
            return [
                one.with_fields({name: self._field(name, own) for name, own in mine.items()})
                for one, mine in zip(batch, blocks, strict=True)
            ]
        ranks = [rank for group in transfer.protocol.collect(layout) for rank in group]
        return batch.with_fields(
            {
                name: self._field(name, [block for rank in ranks for block in blocks[rank][name]])
                for name in transfer.adds or ()
            }
        )

    def _field(self, name: str, blocks: Sequence[RowBlock]) -> FieldFuture:
        ordered = sorted(blocks, key=lambda block: (block.start, block.stop))
        return FieldFuture(call=self.call, name=name, holders=self.holders, blocks=ordered)


def dispatch(
    batch: Batches,
    transfer: Transfer,
    readers: Readers,
    *,
    pool: str,
    layout: ParallelSizes,
    call: int,
    name: str,
) -> Dispatch:
    """Distribute a call's batch over the ranks of a pool.

    ValueError if the batch or the outputs of the call `name` do not fit its transfer protocol.
    """
    protocol = transfer.protocol
    if protocol.by_rank:
        batches = [batch] if isinstance(batch, BatchFuture) else list(batch)
        if len(batches) != layout.world_size:
            raise ValueError(f"{name}: {protocol.name} needs a batch for each of {layout.world_size} ranks")
        given = [(one, range(one.size)) for one in batches]
    else:
        if not isinstance(batch, BatchFuture):
            raise ValueError(f"{name}: {protocol.name} takes one batch and distributes it itself")
        given = [(batch, rows) for rows in protocol.distribute(layout, batch.size)]
        _require_each_row_once(transfer, layout, given, name=name)
    collected = {rank for ranks in protocol.collect(layout) for rank in ranks}
    keep = protocol.holders(layout)
    holders = Holders(pool, tuple(rows if rank in keep else None for rank, (_, rows) in enumerate(given)))

    adds = transfer.adds or ()
    fetched = (
        {} if protocol.by_rank else {field: readers.fetched(field, holders, rows=given[0][0].size) for field in adds}
    )

    def cuts(rows: range) -> dict[str, list[range]]:
        return {field: fetched[field].cuts(rows) if fetched else [rows] for field in adds}

    parts = [
        RankPart(pool=pool, rank=rank, batch=one, rows=rows, cuts=cuts(rows) if rank in collected else {})
        for rank, (one, rows) in enumerate(given)
    ]
    return Dispatch(call=call, parts=parts, holders=holders)


def _require_each_row_once(
    transfer: Transfer, layout: ParallelSizes, given: Sequence[tuple[BatchFuture, range]], *, name: str
) -> None:
    """Raise ValueError unless the collected outputs are the rows of the batch, each once and in order."""
    if not transfer.adds:
        return
    parts = [[given[rank][1] for rank in ranks] for ranks in transfer.protocol.collect(layout)]
    stops = [part[0].stop for part in parts]
    is_whole = [0, *stops] == [*(part[0].start for part in parts), given[0][0].size]
    if not is_whole or any(rows != part[0] for part in parts for rows in part):
        raise ValueError(f"{name}: {transfer.protocol.name} does not give each row once, so it can add no fields")
