"""Attempts: on a cluster a job is tried more than once, and all its pods share one run folder.

The mark in the run folder says which attempt it belongs to, the sign of life that its trainer lives, and exit.json how
that ended. A pod of an older attempt, which nobody may know to be alive, writes nothing any more.

Standard library only, for the side-car's sake.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "RLHF_ATTEMPT"
MARK, EXIT, LIFE = ".attempt", "exit.json", ".alive"
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""Without a beat for so long a trainer is dead; a volume may show another machine's writes some seconds late."""


class WrongAttempt(ValueError):  # noqa: N818 a sentence for a user, like the trainer's other errors
    """RLHF_ATTEMPT is no number."""

    exit_code = 4


def own_attempt() -> int | None:
    """The attempt that this process belongs to; None for a run without an operator. Raises WrongAttempt."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WrongAttempt(f"{VARIABLE} is {text!r}, expected the number of an attempt")
    return int(text)


def marked_attempt(output: Path) -> int:
    """The attempt that a run folder belongs to; 0 if to none."""
    try:
        text = (output / MARK).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def leave_exit(output: Path, code: int, *, reason: str, message: str) -> None:
    """Say in the run folder how the trainer of this attempt ended, if the disk lets it."""
    with suppress(OSError, WrongAttempt):
        attempt = own_attempt()
        if attempt is None or marked_attempt(output) > attempt:
            return
        document = {"attempt": attempt, "exitCode": code, "reason": reason, "message": message}
        replace(output / EXIT, json.dumps(document) + "\n")


def read_exit(output: Path, attempt: int) -> Mapping[str, Any] | None:
    """What `leave_exit` of an attempt left; None while it has left nothing that can be read."""
    found = read_object(output / EXIT)
    return found if found.get("attempt") == attempt and isinstance(found.get("exitCode"), int) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or half of one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace(path: Path, text: str) -> None:
    """Write a file in one piece, so that neither a reader nor a crash ever leaves half of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


class Watch:
    """Whether the trainer of an attempt is alive, as any pod can see it: it leaves a sign of life every few seconds."""

    def __init__(self, output: Path, attempt: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds: what counts is when this process sees a beat, for machines' clocks differ."""
        self._output, self._attempt, self._clock = output, attempt, clock
        self._seen, self._since = "", clock()

    def is_alive(self) -> bool:
        """True until it says that it has ended, or has been silent for too long; ask often."""
        if marked_attempt(self._output) != self._attempt or read_exit(self._output, self._attempt):
            return False
        with suppress(OSError):
            if (beat := (self._output / LIFE).read_text()) != self._seen:
                self._seen, self._since = beat, self._clock()
        return self._clock() - self._since < SILENCE_SECONDS
