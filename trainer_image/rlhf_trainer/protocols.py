"""Transfer protocols: which rows a rank gets, and whose outputs make up the result (HybridFlow, Table 3).

A protocol is two plain functions; one of your own is made the same way and given to `types.register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Layout:
    """Ranks of a worker group; rank r is data-parallel rank r."""

    data: int

    @property
    def world_size(self) -> int:
        return self.data


@dataclass(frozen=True, kw_only=True)
class TransferProtocol:
    """How a call is distributed over the ranks of a group and its outputs are collected."""

    name: str
    distribute: Callable[[Layout, int], list[range]]
    """(layout, rows of the batch) -> the rows that each rank gets."""
    collect: Callable[[Layout], list[int]]
    """layout -> the ranks whose outputs are gathered, in the order of their rows."""


def all_rows(layout: Layout, rows: int) -> list[range]:
    """Broadcast: every rank gets every row."""
    return [range(rows)] * layout.world_size


def rows_by_data_rank(layout: Layout, rows: int) -> list[range]:
    """Split into contiguous blocks, one a data-parallel rank; where it does not divide the first are longer by one."""
    short, longer = divmod(rows, layout.data)
    starts = [rank * short + min(rank, longer) for rank in range(layout.data + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def every_rank(layout: Layout) -> list[int]:
    """The outputs of all ranks."""
    return list(range(layout.world_size))


ONE_TO_ALL = TransferProtocol(name="ONE_TO_ALL", distribute=all_rows, collect=every_rank)
DP_PROTO = TransferProtocol(name="DP_PROTO", distribute=rows_by_data_rank, collect=every_rank)
