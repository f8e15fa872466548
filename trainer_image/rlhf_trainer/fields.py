"""Type and shape of each field of a batch; workers' results are checked by it, and step graphs count bytes by it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rlhf_api.tables import read_table


class Width(Enum):
    """Number of values in a row of a batch's field."""

    ONE = "[B]"
    PROMPT = "[B, P]"
    """One value per token of the longest prompt of the batch (P)."""
    TEXT = "[B, T]"
    """One value per token of the longest prompt with its response (T)."""
    EXPERTS = "[B, T, E]"
    """E bytes per token of the longest text (`expert_rows`); a plan does not know E."""
    TOKENS = "[B, T, 2K]"
    """Ids, then log-probabilities, of K tokens for each token of the longest text; a plan knows K only from topK."""
    BYTES = "[B, C]"
    """One value per byte of the batch's longest JSON text (C), such as a row's data columns; a plan does not know C."""


Widths = Mapping[Width, int]


@dataclass(frozen=True)
class FieldType:
    """Type and shape of a field of a batch."""

    dtype: torch.dtype
    width: Width

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.width.value}"

    def row_bytes(self, widths: Widths) -> int:
        """Return the bytes of a row of the field; `widths`: the number of values of each Width."""
        return self.dtype.itemsize * widths[self.width]

    def fits(self, tensor: Tensor, *, rows: int) -> bool:
        """Whether a tensor has the field's type and number of dims, and `rows` rows."""
        dims = 1 + self.width.value.count(",")
        return tensor.dtype == self.dtype and tensor.dim() == dims and len(tensor) == rows


_TYPES = (FieldType(dtype, width) for dtype in (torch.float32, torch.int64, torch.uint8) for width in Width)
_BY_TEXT = {str(each): each for each in _TYPES}
_NAMES = read_table(__package__, "fields.yaml", dict[str, list[str]])
FIELDS: Mapping[str, FieldType] = {name: _BY_TEXT[text] for text, names in _NAMES.items() for name in names}
"""Name -> type of the fields of all algorithms. Of a field that is not listed only the number of rows is checked."""
UNDECLARED = FieldType(torch.float32, Width.BYTES)
"""The type that a step graph assumes for a field without a declaration."""


def require_declared(added: object, names: Collection[str], *, rows: int) -> None:
    """Raise TypeError or ValueError unless a worker's method added fields of these names, of declared type and shape.

    A rank may add none of them: a stage of a pipeline that is not the last has no output.
    """
    if not isinstance(added, Mapping) or (added and added.keys() != set(names)):
        found = ", ".join(added) if isinstance(added, Mapping) else type(added).__name__
        raise TypeError(f"gave {found}; registered are {', '.join(names) or 'none'}")
    for name, tensor in added.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, expected a tensor")
        if name in FIELDS and not FIELDS[name].fits(tensor, rows=rows):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} of {rows} rows is {found}, declared as {FIELDS[name]}")
        if not tensor.dim() or len(tensor) != rows:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {rows} rows")
