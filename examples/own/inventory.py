"""A tool: what a shop has."""

from __future__ import annotations

STOCK = {"apples": 12, "pears": 0}


def count_of(thing: str) -> int:
    """How many of a thing the shop has.

    Args:
        thing: Its name, in the plural.
    """
    return STOCK.get(thing, 0)
