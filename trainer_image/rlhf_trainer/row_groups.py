"""Groups of finished rows that leave a generation early, so that other pools score them meanwhile.

This is the inter-stage fusion of RLHFuse (arXiv:2409.13221, section 4). A generating call gives its rows in groups, in
the order in which the rows end. Another pool runs a scoring method on each group as it comes. The method's call in the
step then only brings the results into the order of the rows.
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
    """Rows of a batch whose generation has ended, while other rows are still generated."""

    rows: Tensor
    """Indices of the group's rows in the step's batch, int64 [n]."""
    fields: Fields
    """Fields of the group's rows, [n] or [n, t], where t is the width of the longest of these rows."""
    width: int = 0
    """Width T of the whole batch, which only the last group of a rank knows; 0 in all earlier groups."""

    @property
    def is_last(self) -> bool:
        return self.width > 0


class Outlet:
    """Groups of finished rows of one rank's generating call, which other processes fetch by number, from 0."""

    def __init__(self) -> None:
        self._groups: dict[int, RowGroup] = {}
        self._error: TrainerError | None = None
        self._changed = threading.Condition()

    def put(self, number: int, group: RowGroup) -> None:
        """Store a row group under its number and wake the threads that wait for it in `take`."""
        with self._changed:
            self._groups[number] = group
            self._changed.notify_all()

    def fail(self, error: TrainerError) -> None:
        """Record the error of the generating call; no further row groups come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, number: int) -> RowGroup:
        """Wait for a row group, remove and return it. Raises the error of a call that failed before."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._groups or self._error)
            if number not in self._groups:
                assert self._error is not None
                raise self._error
            return self._groups.pop(number)


@dataclass
class Gathered:
    """Results of a scoring method on one rank, for the groups of finished rows of one generating call."""

    rows: range
    """Indices of the rows of the step's batch that this rank scores."""
    error: TrainerError | None = None
    """Error of a row group that could not be scored."""
    parts: list[tuple[Tensor, Fields]] = field(default_factory=list)
    """(indices of the group's rows in the batch, fields that the method added for these rows) for each scored group."""
    width: int = 0
    widths: list[int] = field(default_factory=list)
    """Padded width of the text of each scored group in `parts`, in tokens."""

    def batch_of(self, whole: Batch, groups: Sequence[RowGroup]) -> Batch:
        """Return this rank's rows of the groups as a batch; `whole`: all rows of the rank with their earlier fields."""
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
        """Store the fields that the scoring method computed for the batch that `batch_of` returned last."""
        self.parts[-1] = (self.parts[-1][0], {name: table.cpu() for name, table in fields.items()})

    def result(self) -> Fields:
        """Return the result for all rows in their order, fields [B] or [B, T]. Raises the error of a failed group."""
        import torch

        if self.error:
            raise self.error
        order = torch.cat([rows for rows, _ in self.parts]).argsort()
        return {name: self._joined([fields[name] for _, fields in self.parts])[order] for name in self.parts[0][1]}

    def _joined(self, tables: Sequence[Tensor]) -> Tensor:
        """Concatenate a field's tensors of all parts; tensors as wide as their text are padded to the batch's width."""
        import torch

        is_text = all(table.shape[1:2] == (width,) for table, width in zip(tables, self.widths, strict=True))
        joined = concatenate(tables)
        return torch.nn.functional.pad(joined, (0, self.width - joined.shape[1])) if is_text else joined
