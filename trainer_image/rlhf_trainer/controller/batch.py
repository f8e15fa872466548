"""A batch as the controller sees it: references to rows that lie in Ray's object store, never the bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
from torch import Tensor

from rlhf_trainer.controller.payload import tensor_bytes
from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import Batch, concatenate, prefixed


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, stop) of one field, as the worker that computed them put them into Ray's object store.

    Blocks of the same rows are partial sums: a reader adds them up.
    """

    start: int
    stop: int
    reference: ray.ObjectRef


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Tells a rank which rows are its own, and which rows lie in the blocks whose tensors it is sent with it."""

    step: int
    rows: range
    blocks: Mapping[str, Sequence[range]]
    """For each field the rows of its blocks, in the order of the tensors."""

    def filled(self, tensors: Sequence[Tensor]) -> Batch:
        """This rank's rows of all fields, from the tensors of the blocks; runs in the worker."""
        recorder.add("bytes/transfer", tensor_bytes(tensors))
        arrived = iter(tensors)
        fields = {
            name: self._joined([(block, next(arrived)) for block in blocks]) for name, blocks in self.blocks.items()
        }
        return Batch(step=self.step, start=self.rows.start, size=len(self.rows), fields=fields)

    def _joined(self, held: Sequence[tuple[range, Tensor]]) -> Tensor:
        """This rank's rows of one field, from blocks that cover them in order; those of the same rows are added up."""
        parts: dict[tuple[int, int], Tensor] = {}
        for block, tensor in held:
            key, mine = (block.start, block.stop), tensor[self._within(block)]
            parts[key] = parts[key] + mine if key in parts else mine
        return concatenate(list(parts.values()))

    def _within(self, block: range) -> slice:
        """The part of a block that belongs to this rank."""
        return slice(max(self.rows.start, block.start) - block.start, min(self.rows.stop, block.stop) - block.start)


@dataclass(frozen=True, kw_only=True)
class BatchFuture:
    """A step's batch: the number of its rows, and for each field the blocks that make it up, sorted by their rows."""

    step: int
    size: int
    fields: Mapping[str, Sequence[RowBlock]] = field(default_factory=dict)

    def with_fields(self, added: Mapping[str, Sequence[RowBlock]]) -> BatchFuture:
        """This batch with further fields."""
        return replace(self, fields={**self.fields, **added})

    def with_prefixed(self, **others: BatchFuture) -> BatchFuture:
        """This batch, and the fields of others of the same rows as `<name>_<field>`."""
        return self.with_fields(prefixed(others))

    def slice(self, rows: range, names: Sequence[str], *, reader: str) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """What a rank is sent of the named fields for its rows: which blocks they are, and the references to them.

        KeyError for a field that the batch lacks, which is a mistake of the algorithm.
        """
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise KeyError(
                f"{reader} reads {', '.join(missing)}; the batch holds {', '.join(self.fields) or 'nothing'}"
            )
        needed = {name: self._needed(name, rows) for name in names}
        described = {name: [range(block.start, block.stop) for block in blocks] for name, blocks in needed.items()}
        references = [block.reference for blocks in needed.values() for block in blocks]
        return BatchSlice(step=self.step, rows=rows, blocks=described), references

    def _needed(self, name: str, rows: range) -> Sequence[RowBlock]:
        """The blocks of a field that hold any of the rows; for no rows the first one, which may be empty."""
        blocks = self.fields[name]
        if not rows:
            return blocks[:1]
        first = bisect_right(blocks, rows.start, key=lambda block: block.stop)
        last = bisect_left(blocks, rows.stop, key=lambda block: block.start)
        return [block for block in blocks[first:last] if block.start < block.stop]
