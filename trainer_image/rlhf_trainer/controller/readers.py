"""Who reads each field of a batch, so that its producers cut it where its consumers do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.protocols import TransferProtocol
from rlhf_trainer.types import Transfer


class Readers:
    """The methods of all groups of a run, by the fields that they read."""

    def __init__(self) -> None:
        self._by_field: dict[str, set[tuple[TransferProtocol, ParallelSizes]]] = {}
        self._known: dict[tuple[str, int], tuple[list[int], bool]] = {}

    def add(self, layout: ParallelSizes, transfer: Transfer) -> None:
        """A method of a group of this layout."""
        self._known.clear()
        for name in (*transfer.reads, *transfer.reads_if_there):
            self._by_field.setdefault(name, set()).add((transfer.protocol, layout))

    def cuts(self, name: str, share: range, *, rows: int) -> list[range]:
        """Where a rank that holds the rows `share` of a batch cuts a field, so that a reader fetches its rows only.

        A reader without any row takes an empty piece, which only says what a row is like.
        """
        starts, some_are_empty = self._starts(name, rows)
        inside = starts[bisect_right(starts, share.start) : bisect_left(starts, share.stop)]
        parts = [range(start, stop) for start, stop in pairwise([share.start, *inside, share.stop]) if start < stop]
        needs_empty = some_are_empty or not parts
        return [*([range(share.start, share.start)] if needs_empty else []), *parts]

    def _starts(self, name: str, rows: int) -> tuple[list[int], bool]:
        """(the first rows of all readers' shares, sorted; whether any share is empty), worked out once a batch size."""
        if (name, rows) not in self._known:
            shares = [
                share
                for protocol, layout in self._by_field.get(name, ())
                if not protocol.by_rank
                for share in protocol.distribute(layout, rows)
            ]
            self._known[name, rows] = sorted({share.start for share in shares}), not all(shares)
        return self._known[name, rows]
