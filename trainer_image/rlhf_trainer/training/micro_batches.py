"""Cuts a rank's rows into micro-batches of rows of like length under a token budget."""

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


def padding_waste(lengths: Tensor, groups: list[Tensor]) -> tuple[float, float]:
    """(padding tokens, all tokens) of the micro-batches, each padded to its longest row."""
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in groups)
    return float(padded - int(lengths[torch.cat(groups)].sum())) if groups else 0.0, float(padded)
