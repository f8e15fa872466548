"""A batch as the controller sees it: references to rows that workers hold, never the bytes."""

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
class Piece:
    """Rows [start, stop) of one field, held by the worker that made them; pieces of the same rows are added up."""

    start: int
    stop: int
    reference: ray.ObjectRef


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """What one rank is sent beside the tensors of its fields' pieces: their rows, and which of them are its own."""

    step: int
    rows: range
    pieces: Mapping[str, Sequence[range]]
    """For each field the rows of its pieces, in the order of the tensors."""

    def filled(self, tensors: Sequence[Tensor]) -> Batch:
        """This rank's rows of the fields; runs in the worker."""
        recorder.add("bytes/transfer", tensor_bytes(tensors))
        arrived = iter(tensors)
        fields = {
            name: self._joined([(piece, next(arrived)) for piece in pieces]) for name, pieces in self.pieces.items()
        }
        return Batch(step=self.step, start=self.rows.start, size=len(self.rows), fields=fields)

    def _joined(self, held: Sequence[tuple[range, Tensor]]) -> Tensor:
        """This rank's rows of one field, from pieces that cover them in order."""
        parts: dict[tuple[int, int], Tensor] = {}
        for piece, tensor in held:
            key, mine = (piece.start, piece.stop), tensor[self._within(piece)]
            parts[key] = parts[key] + mine if key in parts else mine
        return concatenate(list(parts.values()))

    def _within(self, piece: range) -> slice:
        """The part of a piece that belongs to this rank."""
        return slice(max(self.rows.start, piece.start) - piece.start, min(self.rows.stop, piece.stop) - piece.start)


@dataclass(frozen=True, kw_only=True)
class BatchFuture:
    """A step's batch: number of rows, and for each field the pieces that make it up, sorted by their rows."""

    step: int
    size: int
    fields: Mapping[str, Sequence[Piece]] = field(default_factory=dict)

    def with_fields(self, added: Mapping[str, Sequence[Piece]]) -> BatchFuture:
        """This batch with further fields."""
        return replace(self, fields={**self.fields, **added})

    def with_prefixed(self, **others: BatchFuture) -> BatchFuture:
        """This batch, and the fields of others of the same rows as `<name>_<field>`."""
        return self.with_fields(prefixed(others))

    def slice(self, rows: range, names: Sequence[str], *, reader: str) -> tuple[BatchSlice, list[ray.ObjectRef]]:
        """What a rank needs of the named fields for its rows, and the references to it.

        A missing field is a mistake of the algorithm file.
        """
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise KeyError(
                f"{reader} reads {', '.join(missing)}; the batch holds {', '.join(self.fields) or 'nothing'}"
            )
        needed = {name: self._needed(name, rows) for name in names}
        places = {name: [range(piece.start, piece.stop) for piece in pieces] for name, pieces in needed.items()}
        references = [piece.reference for pieces in needed.values() for piece in pieces]
        return BatchSlice(step=self.step, rows=rows, pieces=places), references

    def _needed(self, name: str, rows: range) -> Sequence[Piece]:
        """The pieces of a field that hold any of the rows; for no rows the first one, which may be empty."""
        pieces = self.fields[name]
        if not rows:
            return pieces[:1]
        first = bisect_right(pieces, rows.start, key=lambda piece: piece.stop)
        last = bisect_left(pieces, rows.stop, key=lambda piece: piece.start)
        return [piece for piece in pieces[first:last] if piece.start < piece.stop]
