"""Groups a rank's rows into micro-batches of similar length under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trainer.types import Fields


def micro_batches(lengths: Tensor, *, token_budget: int) -> list[Tensor]:
    """Row numbers (int64, longest rows first) of each micro-batch.

    lengths: int64 [B], tokens of each row. A micro-batch holds rows * longest <= token_budget, but at least one row.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    groups: list[list[int]] = []
    width = 0
    for row in order.tolist():
        if not groups or (len(groups[-1]) + 1) * width > token_budget:
            groups.append([])
            width = max(1, int(lengths[row]))
        groups[-1].append(row)
    return [torch.tensor(group) for group in groups]


def even_micro_batches(lengths: Tensor, *, token_budget: int, at_least: int) -> list[Tensor]:
    """The same for pipelining, whose micro-batches must have one shape: equally many rows of the longest row's length.

    There are at least `at_least` micro-batches, if there are so many rows.
    """
    if not len(lengths):
        return []
    rows = max(1, min(token_budget // max(1, int(lengths.max())), -(-len(lengths) // at_least)))
    return list(torch.split(torch.argsort(lengths, descending=True, stable=True), rows))


def padded_alike(parts: Sequence[Fields], *, at_least: int) -> list[Fields]:
    """The fields of micro-batches in one shape: padded with 0 to the largest number of rows and the largest width.

    There are at least `at_least`; those that are added hold only zeros.
    """
    rows = max(len(field) for part in parts for field in part.values())
    width = max(field.shape[1] for part in parts for field in part.values() if field.dim() > 1)
    even = [{name: _zeros_around(field, rows, width) for name, field in part.items()} for part in parts]
    nothing = {name: torch.zeros_like(field) for name, field in even[0].items()}
    return even + [nothing] * (at_least - len(even))


def _zeros_around(field: Tensor, rows: int, width: int) -> Tensor:
    columns = (0, width - field.shape[1]) if field.dim() > 1 else ()
    return pad(field, (*columns, 0, rows - len(field)))


def padding_waste(lengths: Tensor, groups: list[Tensor], *, even: bool = False) -> tuple[float, float]:
    """(padding tokens, all tokens) of the micro-batches, each padded to its longest row or, if `even`, to one shape."""
    if even and groups:
        padded = len(groups) * max(map(len, groups)) * int(lengths.max())
    else:
        padded = sum(len(rows) * int(lengths[rows].max()) for rows in groups)
    return float(padded - int(lengths[torch.cat(groups)].sum())) if groups else 0.0, float(padded)
