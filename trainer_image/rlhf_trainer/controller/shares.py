"""What each rank of a group gets of a call's batch, and what of its output belongs to the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, BatchSlice, Piece
from rlhf_trainer.controller.readers import Readers
from rlhf_trainer.types import Transfer

Batches = BatchFuture | Sequence[BatchFuture]
"""A batch for a group or, by a protocol that distributes nothing, one for each of its ranks."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a call."""

    batch: BatchFuture
    rows: range
    cuts: Mapping[str, Sequence[range]]
    """For each field that the rank gives to the result, the rows of its pieces."""

    def sent(self, transfer: Transfer, *, reader: str) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """What the rank is sent, and the references to the pieces of its fields."""
        return self.batch.slice(self.rows, transfer.read_of(self.batch.fields), reader=reader)

    @property
    def places(self) -> dict[str, list[slice]]:
        """The cuts, counted from the rank's first row."""
        first = self.rows.start
        return {
            name: [slice(part.start - first, part.stop - first) for part in parts] for name, parts in self.cuts.items()
        }

    def pieces(self, outputs: Sequence[ray.ObjectRef]) -> dict[str, list[Piece]]:
        """The pieces of each field, from the references to them in the order of the cuts."""
        references = iter(outputs)
        return {
            name: [Piece(part.start, part.stop, next(references)) for part in parts]
            for name, parts in self.cuts.items()
        }


def shares_of(batch: Batches, transfer: Transfer, layout: ParallelSizes, readers: Readers, *, name: str) -> list[Share]:
    """The share of every rank. ValueError if the call, `name`, and its protocol do not fit together."""
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
        Share(
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


def result_of(
    batch: Batches,
    transfer: Transfer,
    layout: ParallelSizes,
    shares: Sequence[Share],
    outputs: Sequence[Sequence[ray.ObjectRef]],
) -> Batches:
    """The batch, or that of each rank, with the fields that the ranks give to the result."""
    pieces = [share.pieces(references) for share, references in zip(shares, outputs, strict=True)]
    if not isinstance(batch, BatchFuture):
        return [one.with_fields(mine) for one, mine in zip(batch, pieces, strict=True)]
    ranks = [rank for part in transfer.protocol.collect(layout) for rank in part]
    return batch.with_fields(
        {
            name: sorted(
                (piece for rank in ranks for piece in pieces[rank][name]), key=lambda piece: (piece.start, piece.stop)
            )
            for name in transfer.adds
        }
    )
