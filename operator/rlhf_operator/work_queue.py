"""A work queue like that of client-go: one worker at a time has a key, and a key is never in the queue twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Final, Generic, TypeVar

K = TypeVar("K")

FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 120.0
"""Seconds before a key that failed comes again: twice as long after each failure."""
SHORTEST_WAIT: Final = 0.05


class WorkQueue(Generic[K]):
    """Keys that wait for a worker, now or at a time.

    A key that is added while a worker has it comes once more after that. It has one time at most, the one set last.
    """

    def __init__(self) -> None:
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._busy: dict[K, float] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: Counter[K] = Counter()

    def __len__(self) -> int:
        """Keys that wait for a worker now."""
        return len(self._dirty)

    def knows(self, key: K) -> bool:
        """Whether the key will come, or a worker has it."""
        return key in self._dirty or key in self._busy or key in self._timers

    def add(self, key: K) -> None:
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._busy:
            self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float | None) -> None:
        """Adds the key after so many seconds, instead of the time set before; None: clears that time."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(max(seconds, SHORTEST_WAIT), self._due, key)

    def retry(self, key: K) -> float:
        """After a pause that grows with each failure and is spread; the pause in seconds."""
        self._failures[key] += 1
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures[key] - 1, 20), LONGEST_PAUSE) * random.uniform(0.75, 1.25)
        self.add_after(key, pause)
        return pause

    def succeeded(self, key: K) -> None:
        """Forget the failures of a key."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The next key; `done` gives it back."""
        key = await self._ready.get()
        self._dirty.discard(key)
        self._busy[key] = asyncio.get_running_loop().time()
        return key

    def done(self, key: K) -> None:
        del self._busy[key]
        if key in self._dirty:
            self._ready.put_nowait(key)

    def longest_busy(self) -> tuple[K, float] | None:
        """(the key that a worker has had for longest, seconds)."""
        if not self._busy:
            return None
        key = min(self._busy, key=lambda each: self._busy[each])
        return key, asyncio.get_running_loop().time() - self._busy[key]

    def close(self) -> None:
        """No key comes at a time any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)
