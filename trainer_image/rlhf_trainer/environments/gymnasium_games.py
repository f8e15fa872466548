"""Games with the interface of Gymnasium, whose observations and actions are texts."""

import random
from collections.abc import Mapping
from typing import Any

import gymnasium


class Game:
    """Environment of the game `gymnasium.make(id, **options)`: the model writes actions and reads observations.

    An episode begins with the first observation. The data's column `seed` is the game's seed, so that all responses to
    a prompt play the same game. Without that column each response plays a game of its own.
    """

    def __init__(self, *, id: str, **options: Any) -> None:  # noqa: A002 as gymnasium calls it
        self._game: gymnasium.Env[str, str] = gymnasium.make(id, **options)

    def reset(self, row: Mapping[str, Any]) -> str:
        """Start a game; returns the first observation."""
        observation, _ = self._game.reset(seed=row.get("seed", random.getrandbits(31)))
        return observation

    def step(self, response: str) -> tuple[str, float, bool]:
        """Play the response as an action; returns (observation, reward, whether the game or its time is over)."""
        observation, reward, terminated, truncated, _ = self._game.step(response)
        return observation, float(reward), terminated or truncated
