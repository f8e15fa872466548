"""Rows of token ids of different lengths in one flat array."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Ragged:
    """Rows of token ids of different lengths. A token takes 4 bytes, for any number of rows."""

    def __init__(self, flat: Tensor, lengths: Tensor) -> None:
        """Keep the rows: `flat`, int32 [sum of lengths], has them one after the other; `lengths` is int64 [rows]."""
        self.flat = flat
        self.lengths = lengths
        self._starts = lengths.cumsum(0) - lengths

    @classmethod
    def of(cls, rows: Iterable[list[int]]) -> "Ragged":
        """Return the array of some rows of token ids, in their order."""
        flat: list[int] = []
        lengths: list[int] = []
        for row in rows:
            flat.extend(row)
            lengths.append(len(row))
        return cls(torch.tensor(flat, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64))

    @classmethod
    def joined(cls, parts: list["Ragged"]) -> "Ragged":
        """Return one array with the rows of all parts, in their order."""
        return cls(torch.cat([part.flat for part in parts]), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """Return the token ids of one row, int32 [length]."""
        start = int(self._starts[row])
        return self.flat[start : start + int(self.lengths[row])]

    def selected(self, rows: Tensor) -> "Ragged":
        """Return the array of the rows at these indices, int64 [rows], in the order of the indices."""
        kept = [self[row] for row in rows.tolist()]
        return Ragged(torch.cat(kept) if kept else self.flat[:0], self.lengths[rows])

    def after(self, other: "Ragged") -> "Ragged":
        """Return an array whose row i is row i of `other`, followed by row i of this array."""
        pieces = [piece for row in range(len(self)) for piece in (other[row], self[row])]
        return Ragged(torch.cat(pieces) if pieces else self.flat[:0], self.lengths + other.lengths)

    def padded(self, width: int, pad_id: int) -> tuple[Tensor, Tensor]:
        """Return (ids int64 [rows, width], right-padded with `pad_id`; mask float32 [rows, width], 1 on the ids)."""
        mask = torch.arange(width) < self.lengths[:, None]
        ids = torch.full(mask.shape, pad_id, dtype=torch.int64)
        ids[mask] = self.flat.long()
        return ids, mask.float()


def swapped(one: Ragged, other: Ragged, where: Tensor) -> tuple[Ragged, Ragged]:
    """Return both arrays, with their rows exchanged at the indices at which `where`, bool [rows], is true."""
    both, rows = Ragged.joined([one, other]), torch.arange(len(one))
    there = torch.where(where, len(one), 0)
    return both.selected(rows + there), both.selected(rows + len(one) - there)
