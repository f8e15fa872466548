"""An order of the rows: short prompts in the first epoch, all prompts in the others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any


def order(rows: Sequence[dict[str, Any]], epoch: int, seed: int) -> list[int]:
    """Return the indices of the rows to read in an epoch, shuffled: in epoch 0 the shorter half, twice."""
    numbers = sorted(range(len(rows)), key=lambda number: len(rows[number]["prompt"]))
    if epoch == 0:
        numbers = (2 * numbers[: (len(rows) + 1) // 2])[: len(rows)]
    Random(seed + epoch).shuffle(numbers)
    return numbers
