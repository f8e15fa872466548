"""The controller's record of generating calls that hand out finished rows in groups (`row_groups`) before they end."""

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
    """Streams of row groups of a job (`rollout.stream`), by the number of the generating call."""

    def __init__(self) -> None:
        self.are_on = False
        """Whether the generating calls of this job hand out row groups."""
        self._ranks: dict[int, Sequence[ray.actor.ActorHandle]] = {}
        """Number of a generating call -> handles of the ranks that hand out its row groups."""
        self._scored: set[tuple[int, str]] = set()
        """(number of a generating call, name of a scoring call made on its row groups but not yet on all rows)."""

    def begin(
        self, call: int, transfer: Transfer, batch: Batches | None, ranks: Sequence[ray.actor.ActorHandle]
    ) -> bool:
        """Return whether a call hands out row groups; record then that these ranks do."""
        leaves = self.are_on and transfer.in_groups and isinstance(batch, BatchFuture) and batch.step > 0
        if leaves:
            self._ranks[call] = ranks
        return leaves

    def forget(self) -> None:
        """Forget which scoring calls of the last step were made on row groups."""
        self._scored.clear()

    def groups(self, batch: BatchFuture) -> Iterator[list[ray.ObjectRef]]:
        """Yield the row groups of the batch's newest generating call, each as a list of references, one a rank."""
        call = max(made.call for made in batch.fields.values() if made.call in self._ranks)
        ranks = self._ranks.pop(call)
        for number in range(len(STREAM_SHARES)):
            yield [each.row_group.options(concurrency_group=OUTLETS).remote(call, number) for each in ranks]

    def read(
        self, name: str, batch: Batches | None, transfer: Transfer, *, in_groups: bool
    ) -> tuple[int | None, Transfer]:
        """Return (number of the generating call whose row groups the call `name` uses, mark with the fields to read).

        in_groups: the call is made on a row group, which brings some fields along. Otherwise, if the call was made on
        all row groups before, its results are already there, and no field is read. (None, the given mark) if the call
        uses no row groups.
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
