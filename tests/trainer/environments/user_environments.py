"""Environments of a user, for tests."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

IMPORTED_BY = os.getpid()


class Counting:
    """Says the number of the turn and rewards it; over after some turns."""

    def __init__(self, turns: int = 3) -> None:
        self._turns, self._turn = turns, 0

    def reset(self, row: dict[str, Any]) -> str | None:
        return row.get("begin")

    def step(self, response: str) -> tuple[str, float, bool]:
        self._turn += 1
        return f" {self._turn}:{response} ", float(self._turn), self._turn == self._turns


class Forked(Counting):
    """Rewards a turn by the number of the process that has imported this file."""

    def step(self, response: str) -> tuple[str, float, bool]:
        return response, float(IMPORTED_BY), True


class Asynchronous(Counting):
    """The same by coroutines."""

    async def reset(self, row: dict[str, Any]) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(row)

    async def step(self, response: str) -> tuple[str, float, bool]:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(response)


class Where:
    """Says which process has imported the module, and which one it is in."""

    def reset(self, _: dict[str, Any]) -> str:
        return f"{IMPORTED_BY} {os.getpid()}"

    def step(self, _: str) -> tuple[None, float, bool]:
        return None, 0.0, True


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raise_(error: Exception) -> None:
    raise error


def escape() -> tuple[None, float, bool]:
    """Leave a program that is in no group and session of the episode."""
    if os.fork() == 0:
        os.setsid()
        os.execlp("sleep", "sleep", "1000")
    return None, 1.0, True


class Unruly:
    """Does what its row says, in its first step."""

    def reset(self, row: dict[str, Any]) -> None:
        self._does = row["does"]

    def step(self, _: str) -> Any:
        does: dict[str, Any] = {
            "well": lambda: (None, 1.0, True),
            "raise": lambda: 1 / 0,
            "mutter": lambda: raise_(UnspeakableError()),
            "exit": lambda: sys.exit("bye"),
            "die": lambda: os._exit(3),
            "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "hang": lambda: time.sleep(1000),
            "leave": lambda: subprocess.run(["sleep", "1000"], check=True),
            "escape": escape,
            "lie": lambda: (None, float("nan"), True),
            "mumble": lambda: 7,
            "nothing": lambda: (None, 0.0, False),
            "objects": lambda: ([object()], 0.0, False),
        }
        return does[self._does]()


class Throwing:
    """Says what dice it has thrown."""

    def reset(self, _: dict[str, Any]) -> str:
        return f"{random.random()} {np.random.random()}"


class Sleeping:
    """Takes its time."""

    def reset(self, row: dict[str, Any]) -> None:
        time.sleep(row["seconds"])


class Failing:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("the game is not there")


class Deaf:
    """Does not take the row."""

    def reset(self) -> None: ...


def add(one: int, other: int) -> int:
    """Add two numbers.

    Args:
        one: The first.
        other: The second.
    """
    return one + other


async def divide(one: float, other: float) -> str:
    """Divide a number by another.

    Args:
        one: The first.
        other: The second.
    """
    return str(one / other)


def keys() -> dict[tuple[int, int], int]:
    """Give what is no JSON."""
    return {(0, 0): 1}


def secret(one: int) -> int:
    return one


NO_FUNCTION = 3


class Judging:
    """Two turns, each rewarded by the length of the answer; fails where the row of the data says so."""

    def reset(self, row: dict[str, Any]) -> None:
        self._turn = 0
        if row["prompt"] in row.get("fails", ()):
            raise ValueError("no such game")

    def step(self, response: str) -> tuple[str, float, bool]:
        self._turn += 1
        if "fail" in response:
            raise ValueError("the game is broken")
        return " well done ", len(response) % 7 / 7 + self._turn, self._turn == 2
