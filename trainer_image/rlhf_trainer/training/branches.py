"""Branches of rows that are trees of tokens (`PARENTS`), and the prefixes that texts have in common."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlhf_trainer.types import PARENTS, Batch

if TYPE_CHECKING:  # `model_input` imports this module
    from rlhf_trainer.training.model_input import TokenBatch

TOKEN = np.dtype(np.int32)
SHARE_DIVISOR = 16
"""A prefix shorter than 1 / 16 of the text that would share it is not shared. Otherwise a first token that all texts
have would put all texts in one bundle, and load balancing could move nothing."""
Runs = Sequence[tuple[int, int]]
"""Tokens of a branch as runs (start, stop) of neighbouring tokens of its row."""


@dataclass(frozen=True)
class Branch:
    """A text that a model reads: a row or, if the row is a tree, its tokens from a first token to a leaf."""

    number: int
    """Index among all branches, which are ordered by `TokenBatch`, then by row."""
    row: int
    """Index of the row in the stacked rows of all `TokenBatch`es."""
    runs: Runs
    key: bytes
    """Ids of the branch's tokens (`TOKEN`)."""
    forks: bool
    """Whether an earlier branch of the row has the first tokens of this one."""

    @property
    def size(self) -> int:
        return len(self.key) // TOKEN.itemsize


def branches_in_order(texts: Sequence[TokenBatch]) -> list[tuple[int, list[Branch]]]:
    """Return (row, branches of all its texts) of all rows, sorted so that rows with common prefixes are neighbours."""
    numbers, rows = count(), [list[Branch]() for _ in texts[0].lengths]
    for position, text in enumerate(texts):
        parents = [None] * len(rows) if text.parents is None else text.parents
        lengths = text.lengths.tolist()
        for row, (ids, size, given) in enumerate(zip(text.tokens.int().numpy(), lengths, parents, strict=True)):
            roots = set[int]()
            for runs in runs_of(given, size):
                key, root = b"".join(ids[start:stop].tobytes() for start, stop in runs), runs[0][0]
                rows[row].append(Branch(next(numbers), position * len(rows) + row, runs, key, forks=root in roots))
                roots.add(root)
    return sorted(enumerate(rows), key=lambda each: [branch.key for branch in each[1]])


def runs_of(parents: Tensor | None, size: int) -> list[Runs]:
    """Return the branches of a row of `size` tokens, ordered by their leaves; the last ends with the row's last token.

    parents: the row's `PARENTS`, int64 [T]; None: the row is one branch.
    """
    if parents is None or not size:
        return [[(0, size)]]
    before, place = parents[:size].numpy(), np.arange(size)
    assert (before < place).all(), "the token before a token of a tree has a lower index"
    starts = np.flatnonzero((before != place - 1) | (place == 0))
    is_leaf = np.ones(size, dtype=bool)
    is_leaf[before[before >= 0]] = False
    found: list[Runs] = []
    for leaf in np.flatnonzero(is_leaf).tolist():
        runs, last = list[tuple[int, int]](), leaf
        while last >= 0:
            start = int(starts[starts.searchsorted(last, "right") - 1])
            runs.insert(0, (start, last + 1))
            last = int(before[start])
        found.append(runs)
    return found


def indices_of(runs: Runs) -> Tensor:
    """Return the indices in its row of a branch's tokens, int64 [tokens], ascending."""
    return torch.cat([torch.arange(*run) for run in runs])


def branches_of(batch: Batch, row: int) -> list[Tensor]:
    """Return the branches of one of this rank's rows as indices of their tokens, in the order of `runs_of`."""
    parents = batch[PARENTS][row] if PARENTS in batch.fields else None
    return [indices_of(runs) for runs in runs_of(parents, int(batch["attention_mask"][row].sum()))]


class PrefixTree:
    """A set of texts, which finds the longest prefix that a new text has in common with an earlier one."""

    def __init__(self, *, shares: bool = True) -> None:
        """shares: whether texts share prefixes at all."""
        self._shares = shares
        self._texts: list[tuple[bytes, int]] = []
        """(key, number) of each text, sorted, so that texts with the longest common prefixes are neighbours."""

    def add(self, text: Branch) -> tuple[int, int]:
        """Add a text; returns (shared tokens, earlier text): the longest common prefix, and the text that has it.

        The prefix may be the whole text. Branches of a row that is a tree share any prefix. (0, the text's number):
        nothing is shared. The cost is linear in the tokens of the text.
        """
        key, number = text.key, text.number
        if not self._shares:
            return 0, number
        place = bisect(self._texts, (key, number))
        beside = self._texts[max(place - 1, 0) : place + 1]
        self._texts.insert(place, (key, number))
        shared, earlier = max(((_common_tokens(key, other), each) for other, each in beside), default=(0, number))
        is_shared = shared and (text.forks or shared * SHARE_DIVISOR >= text.size)
        return (shared, earlier) if is_shared else (0, number)


def _common_tokens(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other)) // TOKEN.itemsize
    differs = np.frombuffer(one, TOKEN, size) != np.frombuffer(other, TOKEN, size)
    return int(differs.argmax()) if differs.any() else size
