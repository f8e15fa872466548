"""Groups a rank's rows into micro-batches of similar length under a token budget."""

from __future__ import annotations

import torch
from torch import Tensor


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


def padding_waste(lengths: Tensor, groups: list[Tensor], *, even: bool = False) -> tuple[float, float]:
    """(padding tokens, all tokens) of the micro-batches, each padded to its longest row or, if `even`, to one shape."""
    if even and groups:
        padded = len(groups) * max(map(len, groups)) * int(lengths.max())
    else:
        padded = sum(len(rows) * int(lengths[rows].max()) for rows in groups)
    return float(padded - int(lengths[torch.cat(groups)].sum())) if groups else 0.0, float(padded)
