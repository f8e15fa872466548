"""Games with the interface of Gymnasium, whose observations and actions are texts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import gymnasium


class Game:
    """`gymnasium.make(id, **options)`; an answer is an action, and an observation is what the model is told.

    An episode begins with the first observation. Its seed is the column `seed` of the data, so that the responses to a
    prompt play the same game; without one each plays its own.
    """

    def __init__(self, *, id: str, **options: Any) -> None:  # noqa: A002 as gymnasium calls it
        self._game: gymnasium.Env[str, str] = gymnasium.make(id, **options)

    def reset(self, row: Mapping[str, Any]) -> str:
        """The first observation."""
        observation, _ = self._game.reset(seed=row.get("seed", random.getrandbits(31)))
        return observation

    def step(self, response: str) -> tuple[str, float, bool]:
        """(observation, reward, whether the game is over or its time is)."""
        observation, reward, terminated, truncated, _ = self._game.step(response)
        return observation, float(reward), terminated or truncated
