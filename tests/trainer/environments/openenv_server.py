"""A guessing game on a server of the package `openenv`; started by `python -m` with the port."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):  # type: ignore[misc]
    number: int


class Hint(Observation):  # type: ignore[misc]
    text: str = ""


class Guessing(Environment):  # type: ignore[misc]
    """Which number is it? A session has its own."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, **given: Any) -> Hint:
        self._number, self._left = given.get("number", 0), 3
        return Hint(text=given.get("question", "Which number is it?"), done=False, reward=None)

    def step(self, action: Guess, *_: Any, **__: Any) -> Hint:
        if action.number < 0:
            raise ArithmeticError("a guess of less than nothing")
        self._left -= 1
        right = action.number == self._number
        hint = "right" if right else "more" if action.number < self._number else "less"
        return Hint(text=hint, done=right or not self._left, reward=float(right))

    @property
    def state(self) -> State:
        return State(step_count=3 - self._left)

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def list_tasks(self, split: str) -> list[Any]:
        return [{"question": f"{split}?", "number": number} for number in range(2)] if split == "train" else ["a", "b"]


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8, env_name="guessing")
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
