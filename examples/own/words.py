"""A game: the model is to answer in as many words as the game thinks of, and is told whether it needs more or fewer."""

from __future__ import annotations

from typing import Any


class Words:
    """An episode; each has a process of its own."""

    def __init__(self, *, wanted: int) -> None:
        self._wanted = wanted

    def reset(self, row: dict[str, Any]) -> None:
        """`row` is the prompt and the columns of the data. None: the episode begins with the prompt as it is."""

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Return (observation for the model, or None; reward of its answer; whether the episode is over)."""
        count = len(response.split())
        if count == self._wanted:
            return None, 1.0, True
        return (" More. " if count < self._wanted else " Fewer. "), -0.1, False
