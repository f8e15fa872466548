"""Attempts: on a cluster a job is tried more than once, and all its pods share one run folder.

The mark in the run folder says which attempt it belongs to, the sign of life that its trainer lives, and exit.json how
that ended. A pod of an older attempt, which nobody may know to be alive, writes nothing any more. A folder may outlive
its RLHFJob and be given to a new one of the same name, whose attempts begin with 1 again; the uid tells them apart.

Standard library only, for the side-car's sake.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "RLHF_ATTEMPT"
JOB_UID_VARIABLE: Final = "RLHF_JOB_UID"
LONGEST = 300
"""Digits of a whole number that each float has room for."""
MARK, EXIT, LIFE, LOCK, STATUS = ".attempt", "exit.json", ".alive", ".lock", "status.json"
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""Without a beat for so long a trainer is dead; a volume may show another machine's writes some seconds late."""
FREED_SECONDS: Final = 5.0
"""Without a beat for so long it is dead if nobody holds its lock; it frees that before it writes exit.json."""


class WrongAttempt(ValueError):  # noqa: N818 a sentence for a user, like the trainer's other errors
    """RLHF_ATTEMPT is no number."""

    exit_code = 4


@dataclass(frozen=True)
class Attempt:
    """One try of one RLHFJob."""

    number: int
    job_uid: str = ""

    def __str__(self) -> str:
        """As a mark shows it."""
        return f"{self.number} {self.job_uid}".strip()


def own_attempt() -> Attempt | None:
    """The attempt that this process belongs to; None for a run without an operator. Raises WrongAttempt."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WrongAttempt(f"{VARIABLE} is {text!r}, expected the number of an attempt")
    return Attempt(int(text), os.environ.get(JOB_UID_VARIABLE, ""))


def marked_attempts(folder: Path) -> list[Attempt]:
    """The last attempt of each RLHFJob that has had a folder, oldest first: to the last one it belongs."""
    try:
        lines = [line.split() for line in (folder / MARK).read_text().splitlines()]
    except OSError:
        return []
    return [Attempt(int(words[0]), *words[1:2]) for words in lines if words and words[0].isdecimal()]


def owner(folder: Path) -> Attempt | None:
    """The attempt that a folder belongs to."""
    return next(reversed(marked_attempts(folder)), None)


def newer_attempt(output: Path, attempt: Attempt) -> Attempt | None:
    """The attempt to which the run folder belongs where this one's time in it is over.

    An RLHFJob that has left no mark yet counts as the newest.
    """
    marked = marked_attempts(output)
    if all(each.job_uid != attempt.job_uid for each in marked):
        return None
    is_over = marked[-1].job_uid != attempt.job_uid or marked[-1].number > attempt.number
    return marked[-1] if is_over else None


def mark(folder: Path, attempt: Attempt) -> None:
    """From now on the folder belongs to this attempt."""
    earlier = [each for each in marked_attempts(folder) if each.job_uid != attempt.job_uid]
    replace(folder / MARK, "".join(f"{each}\n" for each in (*earlier, attempt)))


def lock_file(output: Path, attempt: Attempt | None) -> Path:
    """What the trainer of an attempt, or that of a run without an operator, has locked as long as it runs."""
    return output / "-".join((LOCK, *str(attempt or "").split()))


def write_exit(output: Path, code: int, *, reason: str, message: str) -> None:
    """Say in the run folder how the trainer of this attempt ended, if the disk lets it."""
    with suppress(OSError, WrongAttempt):
        attempt = own_attempt()
        if attempt is None or newer_attempt(output, attempt):
            return
        whose = {"attempt": attempt.number, "jobUid": attempt.job_uid}
        replace(output / EXIT, json.dumps({**whose, "exitCode": code, "reason": reason, "message": message}) + "\n")


def read_exit(output: Path, attempt: Attempt) -> Mapping[str, Any] | None:
    """What `write_exit` of an attempt left; None while it has left nothing that can be read."""
    found = read_object(output / EXIT)
    is_its = (found.get("attempt"), found.get("jobUid", "")) == (attempt.number, attempt.job_uid)
    return found if is_its and isinstance(found.get("exitCode"), int) else None


def read_status(job_folder: Path, attempt: Attempt) -> dict[str, Any]:
    """The status that the trainer of an attempt has left in the folder of its job; empty while there is none.

    The folder has a mark of its own, written after the status: it says of which RLHFJob that is.
    """
    last = owner(job_folder)  # first: a status that is read after it is that one's, or a later one
    status = read_object(job_folder / STATUS)
    is_its = (status.get("attempt"), last.job_uid if last else "") == (attempt.number, attempt.job_uid)
    return status if is_its else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or half of one."""
    try:
        found = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def from_json(text: str | bytes) -> Any:
    """JSON, in which a whole number beyond all floats is infinite, as 1e400 is. Raises ValueError."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST else float(digits))


def replace(path: Path, text: str) -> None:
    """Write a file in one piece, so that neither a reader nor a crash ever leaves half of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


class Watch:
    """Whether the trainer of an attempt is alive, as any pod can see it: it leaves a sign of life every few seconds."""

    def __init__(self, output: Path, attempt: Attempt, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds: what counts is when this process sees a beat, for machines' clocks differ."""
        self._output, self._attempt, self._clock = output, attempt, clock
        self._seen, self._since = "", clock()

    def is_alive(self) -> bool:
        """True until it says that it has ended, or has been silent for too long; ask often."""
        if owner(self._output) != self._attempt or read_exit(self._output, self._attempt):
            return False
        with suppress(OSError):
            beat = (self._output / LIFE).read_text()
            if beat != self._seen and beat.startswith(f"{self._attempt} "):
                self._seen, self._since = beat, self._clock()
        return self._clock() - self._since < (FREED_SECONDS if self.has_freed_its_lock() else SILENCE_SECONDS)

    def has_freed_its_lock(self) -> bool:
        """Whether the trainer is dead for sure; False on other machines, to which a volume may not tell of locks."""
        if self._seen.split()[-1:] != [socket.gethostname()]:
            return False
        try:
            with lock_file(self._output, self._attempt).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
