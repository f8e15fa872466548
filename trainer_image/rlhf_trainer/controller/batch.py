"""A batch as the controller sees it: references to rows that workers hold, never the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray

from rlhf_trainer.types import Batch, concatenate, prefixed


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of one field, held by the worker that made them."""

    start: int
    stop: int
    reference: ray.ObjectRef


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """What one rank is sent: its rows, and the references it needs to fetch them."""

    step: int
    rows: range
    pieces: Mapping[str, Sequence[Piece]]

    def fetch(self) -> Batch:
        """Get this rank's rows of the fields; runs in the worker, and takes as long as the calls that make them."""
        references = [piece.reference for pieces in self.pieces.values() for piece in pieces]
        tensors = iter(ray.get(references))
        fields = {}
        for name, pieces in self.pieces.items():
            held = [(piece, next(tensors)) for piece in pieces]
            fields[name] = concatenate([tensor[self._within(piece)] for piece, tensor in held])
        return Batch(step=self.step, start=self.rows.start, size=len(self.rows), fields=fields)

    def _within(self, piece: Piece) -> slice:
        """The part of a piece that belongs to this rank."""
        return slice(max(self.rows.start, piece.start) - piece.start, min(self.rows.stop, piece.stop) - piece.start)


@dataclass(frozen=True, kw_only=True)
class BatchFuture:
    """A step's batch: number of rows, and for each field the pieces that make it up, in order."""

    step: int
    size: int
    fields: Mapping[str, Sequence[Piece]] = field(default_factory=dict)

    def having(self, added: Mapping[str, Sequence[Piece]]) -> BatchFuture:
        """This batch with further fields."""
        return replace(self, fields={**self.fields, **added})

    def beside(self, **others: BatchFuture) -> BatchFuture:
        """This batch, and the fields of others of the same rows as `<name>_<field>`."""
        return self.having(prefixed(others))

    def slice(self, rows: range, names: Sequence[str], *, reader: str) -> BatchSlice:
        """What a rank needs of the named fields for its rows; a missing field is a mistake of the algorithm file."""
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise KeyError(
                f"{reader} reads {', '.join(missing)}; the batch holds {', '.join(self.fields) or 'nothing'}"
            )
        pieces = {
            name: [piece for piece in self.fields[name] if piece.start < rows.stop and rows.start < piece.stop]
            for name in names
        }
        return BatchSlice(step=self.step, rows=rows, pieces=pieces)
