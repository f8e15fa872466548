"""Rows that leave a call before it ends, so that models of other pools score them while the longest are generated.

The inter-stage fusion of RLHFuse (arXiv:2409.13221, section 4). A call gives its rows in groups, in the order in which
they end. Another pool runs a method on each group as it comes; the method's own call then only puts its results, which
are there, into the order of the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_trainer.errors import TrainerError
from rlhf_trainer.types import Batch, Fields, concatenate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows that have ended."""

    rows: Tensor
    """int64 [n]: of the step's batch."""
    fields: Fields
    """[n] or [n, t], t as wide as the longest of these rows."""
    width: int = 0
    """T of the batch; only the last group of a rank knows it, of which `is_last` is true."""

    @property
    def is_last(self) -> bool:
        return self.width > 0


class Outlet:
    """The groups of one rank's call, which other processes fetch by their numbers."""

    def __init__(self) -> None:
        self._groups: dict[int, RowGroup] = {}
        self._error: TrainerError | None = None
        self._changed = threading.Condition()

    def put(self, number: int, group: RowGroup) -> None:
        """Give a group."""
        with self._changed:
            self._groups[number] = group
            self._changed.notify_all()

    def fail(self, error: TrainerError) -> None:
        """There will be no further groups."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, number: int) -> RowGroup:
        """Wait for a group; the error of the call if it has failed before."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._groups or self._error)
            if number not in self._groups:
                assert self._error is not None
                raise self._error
            return self._groups.pop(number)


@dataclass
class Gathered:
    """What a method gave for the groups of a stream, on one rank."""

    rows: range
    """Of the step's batch, that this rank scores."""
    error: TrainerError | None = None
    """Of a group that could not be scored."""
    parts: list[tuple[Tensor, Fields]] = field(default_factory=list)
    """Rows of the batch, and what was added for them."""
    width: int = 0
    widths: list[int] = field(default_factory=list)
    """Of the text of each part."""

    def batch_of(self, whole: Batch, groups: Sequence[RowGroup]) -> Batch:
        """The rows of these groups that are this rank's; whole: its rows with the fields that were there before."""
        import torch

        inside = [(each.rows >= self.rows.start) & (each.rows < self.rows.stop) for each in groups]
        rows = torch.cat([each.rows[mine] for each, mine in zip(groups, inside, strict=True)])
        fields = {name: table[rows - self.rows.start] for name, table in whole.fields.items()}
        for name in groups[0].fields:
            fields[name] = concatenate([each.fields[name][mine] for each, mine in zip(groups, inside, strict=True)])
        self.parts.append((rows, {}))
        self.widths.append(max(table.shape[1] for table in fields.values() if table.dim() > 1))
        self.width = max(self.width, *(each.width for each in groups))
        return Batch(step=whole.step, start=whole.start, size=len(rows), fields=fields)

    def add(self, fields: Fields) -> None:
        """What the method gave for the last of `batch_of`."""
        self.parts[-1] = (self.parts[-1][0], {name: table.cpu() for name, table in fields.items()})

    def result(self) -> Fields:
        """What the method would have given for all rows at once: [B] or [B, T]; the error if a group has failed."""
        import torch

        if self.error:
            raise self.error
        order = torch.cat([rows for rows, _ in self.parts]).argsort()
        return {name: self._joined([fields[name] for _, fields in self.parts])[order] for name in self.parts[0][1]}

    def _joined(self, tables: Sequence[Tensor]) -> Tensor:
        """The parts below each other; what is as wide as the text of its part becomes as wide as the batch."""
        import torch

        is_text = all(table.shape[1:2] == (width,) for table, width in zip(tables, self.widths, strict=True))
        joined = concatenate(tables)
        return torch.nn.functional.pad(joined, (0, self.width - joined.shape[1])) if is_text else joined
