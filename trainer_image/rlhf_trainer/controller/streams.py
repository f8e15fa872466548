"""The calls whose rows leave them in groups (`row_groups`), as the controller sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import ray

from rlhf_api.spec.rollout import STREAM_SHARES
from rlhf_trainer.controller.batch import BatchFuture
from rlhf_trainer.controller.dispatch import Batches
from rlhf_trainer.controller.slot_process import OUTLETS
from rlhf_trainer.types import Transfer


class Streams:
    """Streams of row groups of a job, by the number of the call that gives them."""

    def __init__(self) -> None:
        self.are_on = False
        """Whether calls give groups."""
        self._ranks: dict[int, Sequence[ray.actor.ActorHandle]] = {}
        """The handles of the ranks that give them."""
        self._scored: set[tuple[int, str]] = set()
        """(call that gives groups, name of a scoring call made on its groups and not yet on all rows)."""

    def begin(self, call: int, ranks: Sequence[ray.actor.ActorHandle]) -> None:
        """The rows of a call leave these ranks in groups."""
        self._ranks[call] = ranks

    def forget(self) -> None:
        """Forget the scoring calls of the last step."""
        self._scored.clear()

    def groups(self, batch: BatchFuture) -> Iterator[list[ray.ObjectRef]]:
        """Each group of rows of the newest such call in a batch: a reference for every rank."""
        call = max(made.call for made in batch.fields.values() if made.call in self._ranks)
        ranks = self._ranks.pop(call)
        for number in range(len(STREAM_SHARES)):
            yield [each.row_group.options(concurrency_group=OUTLETS).remote(call, number) for each in ranks]

    def read(
        self, name: str, batch: Batches | None, transfer: Transfer, *, in_groups: bool
    ) -> tuple[int | None, Transfer]:
        """Return (number of the call whose groups a call `name` reads or has read, fields that it still reads).

        in_groups: the call is made on a group, which brings some of its fields along. Otherwise, if the call was made
        on all groups before, its results are there, and nothing is read.
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
