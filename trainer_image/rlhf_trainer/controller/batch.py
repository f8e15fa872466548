"""References on the controller to a batch, whose rows lie in workers' processes or in Ray's object store.

`PayloadMeter` counts the tensor bytes that the controller's process itself (de)serialises: by design 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlhf_trainer.telemetry import recorder
from rlhf_trainer.types import Batch, HasFields, concatenate

if TYPE_CHECKING:
    from torch import Tensor

SMALL = {str, bytes, bool, int, float, range, slice, type(None)}
"""Types whose values hold no tensors; `tensor_bytes` tests for these first, as most sent values have such a type."""


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, stop) of one field in Ray's object store, put there by the worker that computed the rows.

    Blocks of the same rows are partial sums: a reader adds them up.
    """

    start: int
    stop: int
    reference: ray.ObjectRef


@dataclass(frozen=True)
class Kept:
    """Location of rows of a field in the process that ran the call which added the field."""

    call: int
    name: str
    """Name that the field had when the call added it, without a prefix of `with_prefixed`."""
    rows: range


@dataclass(frozen=True)
class Holders:
    """Processes of a pool, and the rows of an added field that each process keeps for later calls."""

    pool: str
    rows: tuple[range | None, ...]
    """Rows of the field that each rank keeps, by rank; None for a rank from whose process no call may read them."""

    def keep(self, rows: range, *, pool: str, rank: int) -> bool:
        """Whether a reading rank has all the rows that it reads (`rows`) in its own process."""
        mine = self.rows[rank] if pool == self.pool else None
        return mine is not None and mine.start <= rows.start and rows.stop <= mine.stop


@dataclass(frozen=True, kw_only=True)
class FieldFuture:
    """References to one field of a batch: processes that keep its rows, and its blocks in Ray's store in row order."""

    call: int
    name: str
    """Name that the field had when the call added it, without a prefix of `with_prefixed`."""
    holders: Holders
    blocks: Sequence[RowBlock] = ()

    def needed(self, rows: range) -> Sequence[RowBlock]:
        """Return the blocks of the field that hold any of `rows`; for no rows the first block, which may be empty."""
        if not rows:
            return self.blocks[:1]
        first = bisect_right(self.blocks, rows.start, key=lambda block: block.stop)
        last = bisect_left(self.blocks, rows.stop, key=lambda block: block.start)
        found = [block for block in self.blocks[first:last] if block.start < block.stop]
        sent = range(found[0].start, found[-1].stop) if found else range(0)
        assert all(row in sent for row in (rows[0], rows[-1])), f"{self.name}: {rows} was not sent"
        return found


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Description of one rank's rows of a batch: fields that the rank's process keeps, and fields sent as blocks."""

    step: int
    rows: range
    kept: Mapping[str, Kept]
    """Fields whose rows the rank's own process keeps, by name."""
    blocks: Mapping[str, Sequence[range]]
    """Row ranges of the received blocks of each field that is not in `kept`, in the order of the received tensors."""

    def filled(self, tensors: Sequence[Tensor], kept: Callable[[Kept], Tensor]) -> Batch:
        """Return this rank's rows of all fields, from kept fields and from received blocks; runs in the worker."""
        arrived = iter(tensors)
        fields = {name: kept(place) for name, place in self.kept.items()}
        recorder.add("bytes/transfer", tensor_bytes(tensors) + tensor_bytes(fields))
        for name, blocks in self.blocks.items():
            fields[name] = self._joined((block, next(arrived)) for block in blocks)
        return Batch(step=self.step, start=self.rows.start, size=len(self.rows), fields=fields)

    def _joined(self, held: Iterable[tuple[range, Tensor]]) -> Tensor:
        """Join blocks of one field, in the order of rows, to this rank's rows; blocks of the same rows are added up."""
        parts: dict[tuple[int, int], Tensor] = {}
        for block, tensor in held:
            first, last = max(self.rows.start, block.start), min(self.rows.stop, block.stop)
            key, mine = (block.start, block.stop), tensor[first - block.start : last - block.start]
            parts[key] = parts[key] + mine if key in parts else mine
        return concatenate(list(parts.values()))


@dataclass(frozen=True, kw_only=True)
class BatchFuture(HasFields[FieldFuture]):
    """A step's batch on the controller: the number of rows and, by field name, references to the field's rows."""

    size: int

    def slice(
        self, rows: range, names: Sequence[str], *, pool: str, rank: int, reader: str
    ) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """Return the slice of the named fields for a rank's rows, and references to the blocks that the slice needs.

        KeyError for a field that the batch lacks, which is a mistake of the algorithm.
        """
        if missing := [name for name in names if name not in self.fields]:
            held = ", ".join(self.fields) or "nothing"
            raise KeyError(f"{reader} reads {', '.join(missing)}; the batch holds {held}")
        kept, described = {}, {}
        references: list[ray.ObjectRef] = []
        for name in names:
            found = self.fields[name]
            if found.holders.keep(rows, pool=pool, rank=rank):
                kept[name] = Kept(found.call, found.name, rows)
                continue
            blocks = found.needed(rows)
            described[name] = [range(block.start, block.stop) for block in blocks]
            references += [block.reference for block in blocks]
        return BatchSlice(step=self.step, rows=rows, kept=kept, blocks=described), references


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields; empty for any other class."""
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else ()


def tensor_bytes(value: object) -> int:
    """Return the bytes of all tensors and arrays inside a value, through containers and dataclasses."""
    counted = 0
    rest: list[Any] = [value]
    while rest:
        each = rest.pop()
        kind = each.__class__
        if kind in SMALL:
            continue
        if names := field_names(kind):
            rest += [getattr(each, name) for name in names]
        elif isinstance(each, list | tuple | set | frozenset):
            rest += each
        elif isinstance(each, Mapping):
            rest += each.values()
        elif isinstance(each, np.ndarray):
            counted += int(each.nbytes)
        else:
            import torch

            if isinstance(each, torch.Tensor):
                counted += each.numel() * each.element_size()
    return counted


class PayloadMeter:
    """Meter of the tensor bytes that go through Ray's serialiser in this process."""

    def __init__(self) -> None:
        self._bytes = 0

    def read(self) -> int:
        """Return the tensor bytes that went through Ray's serialiser in this process since the last call of `read`."""
        counted, self._bytes = self._bytes, 0
        return counted

    @contextmanager
    def watching(self) -> Iterator[PayloadMeter]:
        """Count this process's tensor bytes in the `with` block: call arguments and `ray.put` out, `ray.get` in."""
        context = ray._private.worker.global_worker.get_serialization_context()  # noqa: SLF001 there is no public hook
        serialize, deserialize = context.serialize, context.deserialize_objects

        def counted_serialize(value: object) -> object:
            self._bytes += tensor_bytes(value)
            return serialize(value)

        def counted_deserialize(*args: object, **kwargs: object) -> object:
            values = deserialize(*args, **kwargs)
            self._bytes += tensor_bytes(values)
            return values

        context.serialize, context.deserialize_objects = counted_serialize, counted_deserialize
        try:
            yield self
        finally:
            context.serialize, context.deserialize_objects = serialize, deserialize
