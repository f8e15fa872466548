"""Judges responses in child processes with limits: whatever a response does there, it gets a number, or 0.

For a process with one thread, such as that of a guard; a child is forked, so what is imported is there at once.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

MEBIBYTE = 2**20
ANSWER = struct.Struct("16sd")
"""A key that only this process and the child know, and the number: a response may write anything into the pipe."""
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one item may take."""

    seconds: float
    memory: int
    """Bytes of address space beyond what this process has."""
    prepare: Callable[[], None] | None = None
    """Called in the child, before its item; it is then the only one of its child."""


def judged(
    judge: Callable[[Item], float], items: Sequence[Item], limits: Limits, *, until: float
) -> list[float | None]:
    """judge(item) for each item; 0 where it raises, ends the process, or takes more than the limits.

    None for the items that are left at `until`, a time of the monotonic clock.
    """
    found: list[float | None] = []
    child: _Child | None = None
    try:
        for place in range(len(items)):
            if (left := until - time.monotonic()) <= 0:
                return found + [None] * (len(items) - place)
            child = child or _Child(judge, items[place : place + 1] if limits.prepare else items[place:], limits)
            number = child.answer(min(limits.seconds, left))
            if number is None and left < limits.seconds and time.monotonic() >= until:
                return found + [None] * (len(items) - place)
            found.append(0.0 if number is None else number)
            if number is None or limits.prepare:
                child.end()
                child = None
    finally:
        if child:
            child.end()
    return found


class _Child:
    """A process that judges items, one after the other."""

    def __init__(self, judge: Callable[[Item], float], items: Sequence[Item], limits: Limits) -> None:
        self._answers, theirs = os.pipe()
        self._key = os.urandom(16)
        self._process = os.fork()
        if self._process == 0:
            try:
                _serve(judge, items, limits, answers=theirs, key=self._key)
            finally:
                os._exit(0)
        os.close(theirs)

    def answer(self, seconds: float) -> float | None:
        """The next number; None if there is none in time, no process any more, or something else."""
        events = select.poll()
        events.register(self._answers, select.POLLIN)
        if not events.poll(1000 * seconds):
            return None
        answer = os.read(self._answers, ANSWER.size)
        key, number = ANSWER.unpack(answer) if len(answer) == ANSWER.size else (b"", 0.0)
        return float(number) if key == self._key else None

    def end(self) -> None:
        os.close(self._answers)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _serve(judge: Callable[[Item], float], items: Sequence[Item], limits: Limits, *, answers: int, key: bytes) -> None:
    """Write a number for each item; a child that is `prepare`d has no open file but that and the standard ones."""
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.memory
    most = {resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0}
    if limits.prepare:
        os.closerange(3, answers)
        os.closerange(answers + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        most |= {resource.RLIMIT_CPU: int(limits.seconds) + 1, resource.RLIMIT_FSIZE: 0}
    for kind, limit in most.items():
        resource.setrlimit(kind, (limit, limit))
    if limits.prepare:
        limits.prepare()
    for item in items:
        try:
            number = float(judge(item))
        except Exception:  # noqa: BLE001 a response that cannot be judged is wrong
            number = 0.0
        os.write(answers, ANSWER.pack(key, number))
