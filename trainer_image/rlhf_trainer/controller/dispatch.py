"""Dispatch of a call: the rows and fields for each rank, and the result of the call from the ranks' outputs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

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
class RankInput:
    """Input of one rank's part of a call."""

    batch: BatchSlice | None = None
    cuts: Mapping[str, Sequence[slice]] = field(default_factory=dict)
    """Rows of the blocks that other processes read, for each field that the rank adds; counted from its first row."""
    references: Sequence[ray.ObjectRef] = ()
    """References to the blocks that the rank reads from other processes."""


@dataclass(frozen=True)
class RankPart:
    """Input rows and output blocks of one rank in a call."""

    batch: BatchFuture
    rows: range
    """The rows of the batch that the rank gets."""
    cuts: Mapping[str, Sequence[range]]
    """Rows of the blocks that the rank sends, for each field that it adds to the result."""

    def blocks(self, references: Iterator[ray.ObjectRef]) -> dict[str, list[RowBlock]]:
        """Return the blocks of each added field, given the references to them in the order of `cuts`."""
        cuts = self.cuts.items()
        return {name: [RowBlock(part.start, part.stop, next(references)) for part in parts] for name, parts in cuts}


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Distribution of a call's batch over the ranks of a worker group."""

    call: int
    """Number of the distributed call, counted over the job."""
    name: str
    """Name of the distributed call, for messages."""
    batch: Batches
    transfer: Transfer
    layout: ParallelSizes
    parts: Sequence[RankPart]
    """Input rows and output blocks of each rank, in the order of the ranks."""
    holders: Holders
    """Processes that keep the fields which the call adds."""

    def inputs(self, groups: Sequence[ray.ObjectRef]) -> list[RankInput]:
        """Return the input of each rank; groups: references to row groups, which every rank gets, too."""
        found = []
        for rank, part in enumerate(self.parts):
            names, first = self.transfer.fields_read(part.batch.fields), part.rows.start
            batch, references = part.batch.slice(part.rows, names, pool=self.holders.pool, rank=rank, reader=self.name)
            cuts = {name: [slice(r.start - first, r.stop - first) for r in rows] for name, rows in part.cuts.items()}
            found.append(RankInput(batch, cuts, [*references, *groups]))
        return found

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
    protocol, adds = transfer.protocol, transfer.adds or ()
    given = _given(batch, transfer, layout, name=name)
    collected = set(chain.from_iterable(protocol.collect(layout)))
    keep = protocol.holders(layout)
    holders = Holders(pool, tuple(rows if rank in keep else None for rank, (_, rows) in enumerate(given)))
    size = given[0][0].size
    fetched = {added: None if protocol.by_rank else readers.fetched(added, holders, rows=size) for added in adds}
    parts = []
    for rank, (one, rows) in enumerate(given):
        sent = fetched.items() if rank in collected else ()
        parts.append(RankPart(one, rows, {added: read.cuts(rows) if read else [rows] for added, read in sent}))
    return Dispatch(call=call, name=name, batch=batch, transfer=transfer, layout=layout, parts=parts, holders=holders)


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
    given = [(batch, rows) for rows in protocol.distribute(layout, batch.size)]
    _require_each_row_once(transfer, layout, given, name=name)
    return given


def _require_each_row_once(
    transfer: Transfer, layout: ParallelSizes, given: Sequence[tuple[BatchFuture, range]], *, name: str
) -> None:
    if not transfer.adds:
        return
    parts = [[given[rank][1] for rank in ranks] for ranks in transfer.protocol.collect(layout)]
    stops = [part[0].stop for part in parts]
    is_whole = [0, *stops] == [*(part[0].start for part in parts), given[0][0].size]
    if not is_whole or any(rows != part[0] for part in parts for rows in part):
        raise ValueError(f"{name}: {transfer.protocol.name} does not give each row once, so it can add no fields")
