"""Rows of a data set: sums to ask for."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any


def rows(*, count: int, largest: int) -> Iterator[dict[str, Any]]:
    """Yield the same rows in each call: every rank calls this, and so does a run that is resumed."""
    random = Random(0)
    for _ in range(count):
        one, two = random.randint(0, largest), random.randint(0, largest)
        yield {"prompt": f"{one} + {two} =", "chosen": f" {one + two}"}
