"""Attempts of a job on a cluster; the pods of all attempts share one run folder.

The mark file (.attempt) of the run folder names the attempt that owns the folder. The sign of life shows that its
trainer runs, and exit.json says how the trainer ended. A pod of an older attempt may still run, but writes nothing
more. A folder may outlive its RLHFJob and serve a new job of the same name, whose attempts begin with 1 again; the uid
differs.

Only the standard library is imported, as the side-car imports this module.
"""

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
MAX_MESSAGE = 2000
"""Most characters of an error in exit.json."""
MAX_DIGITS = 300
"""Number of digits from which a whole number in JSON is read as a float; any shorter number fits into a float."""
MARK, EXIT, LIFE, LOCK, STATUS = ".attempt", "exit.json", ".alive", ".lock", "status.json"
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""Seconds without a sign of life after which a trainer counts as dead; a volume may show remote writes late."""
FREED_SECONDS: Final = 5.0
"""Seconds of silence after which a trainer that freed its lock counts as dead; exit.json is written after that."""


class WrongAttempt(ValueError):  # noqa: N818 a sentence for a user, like the trainer's other errors
    """Error for an RLHF_ATTEMPT that is no number."""

    exit_code = 4


@dataclass(frozen=True)
class AttemptId:
    """One attempt to run an RLHFJob: its number, and the uid of the RLHFJob."""

    number: int
    job_uid: str = ""

    def __str__(self) -> str:
        """Return the attempt as a line of the mark file: its number, and the uid of its job if there is one."""
        return f"{self.number} {self.job_uid}".strip()


def own_attempt() -> AttemptId | None:
    """Return the attempt of this process; None for a run without an operator. Raises WrongAttempt."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise WrongAttempt(f"{VARIABLE} is {text!r}, expected the number of an attempt")
    return AttemptId(int(text), os.environ.get(JOB_UID_VARIABLE, ""))


def marked_attempts(folder: Path) -> list[AttemptId]:
    """Return the last attempt of each RLHFJob that has used a folder, oldest first; the last one owns the folder."""
    with suppress(OSError):
        lines = [line.split() for line in (folder / MARK).read_text().splitlines()]
        return [AttemptId(int(words[0]), *words[1:2]) for words in lines if words and words[0].isdecimal()]
    return []


def owner(folder: Path) -> AttemptId | None:
    """Return the attempt that owns a folder by the mark file; None if there is none."""
    return next(reversed(marked_attempts(folder)), None)


def newer_attempt(output: Path, attempt: AttemptId) -> AttemptId | None:
    """Return a run folder's owner if it is newer than this attempt; else None, also if the mark file lacks this job."""
    attempts = marked_attempts(output)
    if all(each.job_uid != attempt.job_uid for each in attempts):
        return None
    is_over = attempts[-1].job_uid != attempt.job_uid or attempts[-1].number > attempt.number
    return attempts[-1] if is_over else None


def mark(folder: Path, attempt: AttemptId) -> None:
    """Write the mark file of a folder, so that this attempt is the folder's owner."""
    earlier = [each for each in marked_attempts(folder) if each.job_uid != attempt.job_uid]
    replace(folder / MARK, "".join(f"{each}\n" for each in (*earlier, attempt)))


def lock_file(output: Path, attempt: AttemptId | None) -> Path:
    """Return the file that the trainer of an attempt, or of a run without an operator, keeps locked while it runs."""
    return output / "-".join((LOCK, *str(attempt or "").split()))


def write_exit(output: Path, code: int, *, reason: str, message: str) -> None:
    """Write exit.json, which says how the trainer of this attempt ended; a full disk is ignored."""
    with suppress(OSError, WrongAttempt):
        attempt = own_attempt()
        if attempt is None or newer_attempt(output, attempt):
            return
        whose = {"attempt": attempt.number, "jobUid": attempt.job_uid}
        ending = {**whose, "exitCode": code, "reason": reason, "message": message[:MAX_MESSAGE]}
        replace(output / EXIT, json.dumps(ending) + "\n")


def read_exit(output: Path, attempt: AttemptId) -> Mapping[str, Any] | None:
    """Return the content of exit.json; None if the file is missing, damaged, or of another attempt."""
    found = read_object(output / EXIT)
    is_its = (found.get("attempt"), found.get("jobUid", "")) == (attempt.number, attempt.job_uid)
    return found if is_its and isinstance(found.get("exitCode"), int) else None


def read_status(job_folder: Path, attempt: AttemptId) -> dict[str, Any]:
    """Return status.json of a job's folder if the trainer of this attempt wrote the file; else an empty mapping."""
    last = owner(job_folder)  # read first: a status read later belongs to this owner or to a later one
    status = read_object(job_folder / STATUS)
    is_its = (status.get("attempt"), last.job_uid if last else "") == (attempt.number, attempt.job_uid)
    return status if is_its else {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or holds no whole object."""
    with suppress(OSError, ValueError):
        found = from_json(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def from_json(text: str | bytes) -> Any:
    """Parse JSON; a whole number beyond all floats becomes infinite, as 1e400 does. Raises ValueError."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < MAX_DIGITS else float(digits))


def replace(path: Path, text: str) -> None:
    """Write a text file by renaming a finished one, so that neither a reader nor a crash ever sees half of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


class Watch:
    """Observer of the trainer of an attempt from any pod; the trainer leaves a sign of life every few seconds."""

    def __init__(self, output: Path, attempt: AttemptId, clock: Callable[[], float] = time.monotonic) -> None:
        """Start to observe; `clock` (seconds) of this machine times the signs of life, as machines' clocks differ."""
        self._output, self._attempt, self._clock = output, attempt, clock
        self._seen, self._since = "", clock()

    def is_alive(self) -> bool:
        """Return False once the trainer has written exit.json or has been silent for too long; call this often."""
        if owner(self._output) != self._attempt or read_exit(self._output, self._attempt):
            return False
        with suppress(OSError):
            beat = (self._output / LIFE).read_text()
            if beat != self._seen and beat.startswith(f"{self._attempt} "):
                self._seen, self._since = beat, self._clock()
        return self._clock() - self._since < (FREED_SECONDS if self.has_freed_its_lock() else SILENCE_SECONDS)

    def has_freed_its_lock(self) -> bool:
        """Return True if the trainer's file lock is free, as after its death; False if it ran on another machine."""
        if self._seen.split()[-1:] != [socket.gethostname()]:  # a volume may not show the locks of other machines
            return False
        with suppress(OSError), lock_file(self._output, self._attempt).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False
