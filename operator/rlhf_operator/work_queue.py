"""A work queue like that of client-go: a key is with at most one worker, and never in the queue twice."""

import asyncio
import random
from collections import Counter
from typing import Final, Generic, TypeVar

K = TypeVar("K")

FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 120.0
"""Longest pause in seconds before a failed key is queued again; the pause doubles after each failure."""
SHORTEST_WAIT: Final = 0.05
REST_SECONDS: Final = 0.25
"""Seconds for which a key rests after a worker had it; one pass then handles all events of that time."""


class WorkQueue(Generic[K]):
    """Queue of keys that wait for a worker, now or from a set time on.

    A key that is added while a worker has it, or while it rests, is queued again afterwards. A new set time of a key
    replaces the earlier one.
    """

    def __init__(self) -> None:
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._busy: dict[K, float] = {}
        self._resting: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self.failures: Counter[K] = Counter()
        """Number of failures of each key since its last success; a key without failures is missing."""

    def __len__(self) -> int:
        """Return the number of keys that wait for a worker now."""
        return len(self._dirty)

    def knows(self, key: K) -> bool:
        """Whether a key waits, now or for a set time, or is with a worker."""
        return key in self._dirty or key in self._busy or key in self._timers

    def add(self, key: K) -> None:
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._busy and key not in self._resting:
            self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float | None) -> None:
        """Queue the key after `seconds`, instead of at the time set before; None only clears that time."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(max(seconds, SHORTEST_WAIT), self._due, key)

    def retry(self, key: K) -> float:
        """Queue a failed key again after a pause, which grows with each failure; return the pause in seconds."""
        self.failures[key] += 1
        pause = min(FIRST_PAUSE * 2.0 ** min(self.failures[key] - 1, 20), LONGEST_PAUSE) * random.uniform(0.75, 1.25)
        self.add_after(key, pause)
        return pause

    def succeeded(self, key: K) -> None:
        self.failures.pop(key, None)

    async def get(self) -> K:
        """Wait for the next key, and return it; the worker gives it back by `done`."""
        key = await self._ready.get()
        self._dirty.discard(key)
        self._busy[key] = asyncio.get_running_loop().time()
        return key

    def done(self, key: K) -> None:
        del self._busy[key]
        self._resting.add(key)
        asyncio.get_running_loop().call_later(REST_SECONDS, self._end_rest, key)

    def longest_busy(self) -> tuple[K, float] | None:
        """Return (key that a worker has had for longest, seconds); None if no worker has a key."""
        if not self._busy:
            return None
        key = min(self._busy, key=lambda each: self._busy[each])
        return key, asyncio.get_running_loop().time() - self._busy[key]

    def close(self) -> None:
        """Cancel all set times, so that no timer queues a key any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _end_rest(self, key: K) -> None:
        self._resting.discard(key)
        if key in self._dirty:
            self._ready.put_nowait(key)

    def _due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)
