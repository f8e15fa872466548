"""Prefixes that texts have in common, as a tree: each text shares what it can with one earlier text."""

from bisect import bisect

import numpy as np

from rlhf_trainer.training.branches import TOKEN, Branch

SHARE_DIVISOR = 16
"""A prefix shorter than 1 / 16 of the text that would share it is not shared. Otherwise a first token that all texts
have would put all texts in one bundle, and load balancing could move nothing."""


class PrefixTree:
    """A set of texts, which finds the longest prefix that a new text has in common with an earlier one."""

    def __init__(self, *, shares: bool = True) -> None:
        """shares: whether texts share prefixes at all."""
        self._shares = shares
        self._texts: list[tuple[bytes, int]] = []
        """(key, number) of each text, sorted, so that those with the longest common prefixes are neighbours."""

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
