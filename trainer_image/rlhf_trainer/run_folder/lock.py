"""Lock of a run folder for one run at a time; on a cluster an older attempt stops before it writes more."""

import errno
import fcntl
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Final

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.attempt import (
    BEAT_SECONDS,
    EXIT,
    LIFE,
    LOCK,
    AttemptId,
    lock_file,
    mark,
    newer_attempt,
    own_attempt,
    owner,
    read_exit,
    replace,
)

LOOK_SECONDS: Final = 0.1
"""Seconds before a second try to lock the run folder; `is_running` holds the lock for a shorter time."""
SETTLE_SECONDS: Final = 1.0
"""Seconds that a new attempt waits, because an older attempt may be ending a write that it began as the owner."""


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other runs out of the run folder during the block; the kernel frees the lock however the process ends.

    Each attempt of a cluster has its own lock: a file server may keep the lock of a dead attempt.
    """
    attempt = own_attempt()
    try:
        output.mkdir(parents=True, exist_ok=True)
        require_newest(output)
        lock = lock_file(output, attempt).open("a")
    except OSError as error:
        raise EnvironmentProblem(f"--output {output}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            _lock(lock)
        except BlockingIOError:
            raise EnvironmentProblem(f"--output {output}: another rlhf run is using this folder") from None
        except OSError as error:
            # the operator starts an attempt once, so on its volumes the lock is a second safeguard
            if attempt is None or error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise EnvironmentProblem(f"--output {output}: cannot be locked: {error.strerror}") from error
        for older in output.glob(f"{LOCK}-*"):
            if older != Path(lock.name):  # the lock of an attempt that is over
                older.unlink(missing_ok=True)
        with owned(output):
            yield


def _lock(lock: IO[str]) -> None:
    """Lock a run folder's lock file, or raise BlockingIOError; a second try outlasts the brief lock of `is_running`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(LOOK_SECONDS)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_running(output: Path) -> bool:
    """Whether a run on this machine holds the lock of the run folder now."""
    try:
        with lock_file(output, None).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, or no run has ever been in it
        return False
    return False


def require_newest(output: Path) -> None:
    """Raise EnvironmentProblem if a newer attempt than this process's has begun in the run folder."""
    mine = own_attempt()
    newer = newer_attempt(output, mine) if mine else None
    if mine and newer:
        whose = "this job" if newer.job_uid == mine.job_uid else "a newer job of this name"
        begun = f"attempt {newer.number} of {whose} has begun"
        raise EnvironmentProblem(f"{output}: {begun}, so attempt {mine.number} writes no more")


@contextmanager
def owned(output: Path) -> Iterator[None]:
    """Make this process's attempt the owner of the run folder, and write its sign of life during the block.

    The mark file and sign of life of the older attempt are replaced, and exit.json is deleted. Raises
    EnvironmentProblem if there is a newer attempt.
    """
    attempt = own_attempt()
    if attempt is None:
        yield
        return
    require_newest(output)
    older = owner(output)
    may_live = older not in (None, attempt) and read_exit(output, older) is None
    (output / EXIT).unlink(missing_ok=True)
    mark(output, attempt)
    if may_live:
        time.sleep(SETTLE_SECONDS)
    ended = Event()
    beats = Thread(target=_beat, args=(output, attempt, ended), daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join()


def _beat(output: Path, attempt: AttemptId, ended: Event) -> None:
    """Write this attempt's sign of life every BEAT_SECONDS until `ended` is set or a newer attempt owns the folder."""
    count = 0
    while not newer_attempt(output, attempt):
        with suppress(OSError):  # a full disk is reported where something is written
            replace(output / LIFE, f"{attempt} {count} {socket.gethostname()}\n")
        count += 1
        if ended.wait(BEAT_SECONDS):
            return
