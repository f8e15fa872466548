"""What each rank of a group is sent of a call's batch, and how the ranks' outputs become the call's result."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import ray

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, BatchSlice, RowBlock
from rlhf_trainer.protocols import TransferProtocol
from rlhf_trainer.types import Transfer

Batches = BatchFuture | Sequence[BatchFuture]
"""One batch for a group or, by a protocol that distributes nothing (`by_rank`), a batch for each of its ranks."""


class Readers:
    """The methods of all groups of a run, by the fields that they read.

    A producer of a field makes a row block for each reader's rows, so that a reader fetches no rows of others.
    """

    def __init__(self) -> None:
        self._by_field: dict[str, set[tuple[TransferProtocol, ParallelSizes]]] = {}
        self._known: dict[tuple[str, int], tuple[list[int], bool]] = {}

    def add(self, layout: ParallelSizes, transfer: Transfer) -> None:
        """Add a method of a model of this layout."""
        self._known.clear()
        for name in (*transfer.reads, *transfer.reads_if_there):
            self._by_field.setdefault(name, set()).add((transfer.protocol, layout))

    def cuts(self, name: str, held: range, *, rows: int) -> list[range]:
        """The blocks into which a rank cuts a field; `held`: the rows that it holds of a batch of `rows`.

        A reader that gets no rows takes an empty block, which only tells the field's type and shape.
        """
        starts, some_are_empty = self._starts(name, rows)
        inside = starts[bisect_right(starts, held.start) : bisect_left(starts, held.stop)]
        parts = [range(start, stop) for start, stop in pairwise([held.start, *inside, held.stop]) if start < stop]
        needs_empty = some_are_empty or not parts
        return [*([range(held.start, held.start)] if needs_empty else []), *parts]

    def _starts(self, name: str, rows: int) -> tuple[list[int], bool]:
        """(first row of every reader, sorted; whether any reader gets no rows), remembered for each batch size."""
        if (name, rows) not in self._known:
            read = [
                part
                for protocol, layout in self._by_field.get(name, ())
                if not protocol.by_rank
                for part in protocol.distribute(layout, rows)
            ]
            self._known[name, rows] = sorted({part.start for part in read}), not all(read)
        return self._known[name, rows]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """One rank's part of a call."""

    batch: BatchFuture
    rows: range
    """The rows of the batch that the rank gets."""
    cuts: Mapping[str, Sequence[range]]
    """For each field that the rank adds to the result, the rows of the blocks that it makes."""

    def inputs(self, transfer: Transfer, *, reader: str) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """What the rank is sent, and the references to the blocks of the fields that it reads."""
        return self.batch.slice(self.rows, transfer.fields_read(self.batch.fields), reader=reader)

    @property
    def local_cuts(self) -> dict[str, list[slice]]:
        """The cuts, counted from the rank's first row."""
        first = self.rows.start
        return {
            name: [slice(part.start - first, part.stop - first) for part in parts] for name, parts in self.cuts.items()
        }

    def blocks(self, outputs: Sequence[ray.ObjectRef]) -> dict[str, list[RowBlock]]:
        """The blocks of each field, from the references to them in the order of the cuts."""
        references = iter(outputs)
        return {
            name: [RowBlock(part.start, part.stop, next(references)) for part in parts]
            for name, parts in self.cuts.items()
        }


def dispatch(
    batch: Batches, transfer: Transfer, layout: ParallelSizes, readers: Readers, *, name: str
) -> list[RankPart]:
    """The part of every rank. ValueError if the batch or the outputs of the call `name` do not fit its protocol."""
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
    return [
        RankPart(
            batch=one,
            rows=rows,
            cuts={field: readers.cuts(field, rows, rows=one.size) for field in transfer.adds if rank in collected},
        )
        for rank, (one, rows) in enumerate(given)
    ]


def _require_each_row_once(
    transfer: Transfer, layout: ParallelSizes, given: Sequence[tuple[BatchFuture, range]], *, name: str
) -> None:
    """ValueError if what is collected is not the rows of the batch, each once and in order."""
    if not transfer.adds:
        return
    parts = [[given[rank][1] for rank in ranks] for ranks in transfer.protocol.collect(layout)]
    stops = [part[0].stop for part in parts]
    is_whole = [0, *stops] == [*(part[0].start for part in parts), given[0][0].size]
    if not is_whole or any(rows != part[0] for part in parts for rows in part):
        raise ValueError(f"{name}: {transfer.protocol.name} does not give each row once, so it can add no fields")


def collect(
    batch: Batches,
    transfer: Transfer,
    layout: ParallelSizes,
    parts: Sequence[RankPart],
    outputs: Sequence[Sequence[ray.ObjectRef]],
) -> Batches:
    """The batch, or the batch of each rank, with the fields that the ranks add. `outputs`: each rank's references."""
    blocks = [part.blocks(references) for part, references in zip(parts, outputs, strict=True)]
    if not isinstance(batch, BatchFuture):
        return [one.with_fields(mine) for one, mine in zip(batch, blocks, strict=True)]
    ranks = [rank for group in transfer.protocol.collect(layout) for rank in group]
    return batch.with_fields(
        {
            name: sorted(
                (block for rank in ranks for block in blocks[rank][name]), key=lambda block: (block.start, block.stop)
            )
            for name in transfer.adds
        }
    )
