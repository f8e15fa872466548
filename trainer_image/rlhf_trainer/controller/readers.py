"""Who reads each field of a batch, so that its producers cut it where its consumers do."""

from __future__ import annotations

from itertools import pairwise

from rlhf_trainer.protocols import Layout, TransferProtocol
from rlhf_trainer.types import Transfer


class Readers:
    """The methods of all groups of a run, by the fields that they read."""

    def __init__(self) -> None:
        self._by_field: dict[str, set[tuple[TransferProtocol, Layout]]] = {}

    def add(self, layout: Layout, transfer: Transfer) -> None:
        """A method of a group of this layout."""
        for name in transfer.reads:
            self._by_field.setdefault(name, set()).add((transfer.protocol, layout))

    def cuts(self, name: str, share: range, *, rows: int) -> list[range]:
        """Where a rank that holds the rows `share` of a batch cuts a field, so that a reader fetches its rows only.

        A reader without any row takes an empty piece, which only says what a row is like.
        """
        shares = [
            part
            for protocol, layout in self._by_field.get(name, ())
            if not protocol.by_rank
            for part in protocol.distribute(layout, rows)
        ]
        inside = {part.start for part in shares if share.start < part.start < share.stop}
        parts = [range(start, stop) for start, stop in pairwise(sorted({share.start, *inside, share.stop}))]
        needs_empty = not parts or not all(shares)
        return [*([range(share.start, share.start)] if needs_empty else []), *parts]
