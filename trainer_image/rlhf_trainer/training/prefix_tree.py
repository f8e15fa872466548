"""Prefixes that texts have in common, as a tree: each text shares what it can with one earlier text."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # whose module imports this one
    from rlhf_trainer.training.model_input import TokenBatch

SHARE_DIVISOR = 16
"""A prefix shorter than 1 / 16 of the text that would share it is not shared. Otherwise a first token that all texts
have would put all texts in one bundle, and load balancing could move nothing."""
TOKEN = np.dtype(np.int32)


class PrefixTree:
    """A set of texts, which finds the longest prefix that a new text has in common with an earlier one."""

    def __init__(self) -> None:
        self._texts: list[tuple[bytes, int]] = []
        """(key, number) of each text, sorted, so that those with the longest common prefixes are neighbours."""

    def add(self, key: bytes, number: int) -> tuple[int, int]:
        """Add a text; returns (shared tokens, earlier text): the longest common prefix, and the text that has it.

        The prefix may be the whole text. (0, number): nothing is shared. The cost is linear in the tokens of the text.
        """
        place = bisect(self._texts, (key, number))
        beside = self._texts[max(place - 1, 0) : place + 1]
        self._texts.insert(place, (key, number))
        shared, earlier = max(((_common_tokens(key, other), each) for other, each in beside), default=(0, number))
        return (shared, earlier) if shared and shared * SHARE_DIVISOR * TOKEN.itemsize >= len(key) else (0, number)


def keys_in_order(texts: Sequence[TokenBatch]) -> list[tuple[int, tuple[bytes, ...]]]:
    """Return (row, keys of its texts) of all rows, sorted by keys, so that rows with common prefixes are neighbours."""
    keys = [
        [row[:size].tobytes() for row, size in zip(each.tokens.int().numpy(), each.lengths.tolist(), strict=True)]
        for each in texts
    ]
    return sorted(enumerate(zip(*keys, strict=True)), key=lambda each: each[1])


def _common_tokens(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other)) // TOKEN.itemsize
    differs = np.frombuffer(one, TOKEN, size) != np.frombuffer(other, TOKEN, size)
    return int(differs.argmax()) if differs.any() else size
