"""Groups a rank's rows into micro-batches of about as many tokens, within a budget."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, *, token_budget: int, at_least: int = 1) -> list[Tensor]:
    """Row numbers (int64) of each micro-batch: as few as the budget allows, at least `at_least`, some perhaps empty.

    lengths: int64 [B], tokens of each row. A micro-batch holds token_budget tokens at most, or one row. Rows go, the
    longest first, to the micro-batch with the fewest tokens (Graham 1969, "Bounds on multiprocessing timing
    anomalies"). Without rows there are no micro-batches.
    """
    if not len(lengths):
        return []
    count = max(at_least, -(-int(lengths.clamp(max=token_budget).sum()) // token_budget))
    while True:
        groups = _balanced(lengths, count)
        if all(len(rows) == 1 or int(lengths[rows].sum()) <= token_budget for rows in groups):
            return groups
        count += 1


def _balanced(lengths: Tensor, count: int) -> list[Tensor]:
    groups: list[list[int]] = [[] for _ in range(count)]
    smallest = [(0, number) for number in range(count)]
    order = torch.argsort(lengths, descending=True, stable=True)
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        tokens, number = heapq.heappop(smallest)
        groups[number].append(row)
        heapq.heappush(smallest, (tokens + length, number))
    return [torch.tensor(group, dtype=torch.int64) for group in groups]
