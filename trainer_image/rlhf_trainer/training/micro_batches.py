"""Groups a rank's bundles of rows into micro-batches of about as many tokens, within a budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, *, token_budget: int, at_least: int = 1) -> list[Tensor]:
    """Numbers (int64) of the bundles of each micro-batch: as few micro-batches as the budget allows, at least
    `at_least`, some perhaps empty.

    lengths: int64 [bundles], tokens of each. A micro-batch holds token_budget tokens at most, or one bundle. Without
    bundles there are no micro-batches.
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
    found = torch.tensor(longest_first(lengths.tolist(), count))
    return [(found == group).nonzero()[:, 0] for group in range(count)]


def longest_first(costs: Sequence[int], count: int) -> list[int]:
    """Which of `count` groups each cost joins: the largest cost first, each goes to the group with least so far.

    The largest sum is at most 4/3 of the best one (Graham 1969, "Bounds on multiprocessing timing anomalies").
    """
    least, found = [(0, group) for group in range(count)], [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda each: -costs[each]):
        total, group = least[0]
        heapq.heapreplace(least, (total + costs[place], group))
        found[place] = group
    return found
