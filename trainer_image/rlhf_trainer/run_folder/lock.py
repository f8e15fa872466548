"""A run folder belongs to one run at a time, and to the newest attempt of its job.

The trainer of an older attempt stops before it writes more.
"""

from __future__ import annotations

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
    Attempt,
    lock_file,
    mark,
    newer_attempt,
    own_attempt,
    owner,
    read_exit,
    replace,
)

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
LOOK_SECONDS: Final = 0.1
"""Longer than `is_running` holds a lock."""
SETTLE_SECONDS: Final = 1.0
"""An older attempt that looked at the mark just before it changed has written by then."""


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other runs out of the run folder while the block runs; the kernel frees it however the process ends.

    An attempt of a cluster has a lock of its own, for that of a dead one may live on: the file server was not told.
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
            # the operator starts an attempt once, so on its volumes a lock is a second safety
            if attempt is None or error.errno not in WITHOUT_LOCKS:
                raise EnvironmentProblem(f"--output {output}: cannot be locked: {error.strerror}") from error
        for older in output.glob(f"{LOCK}-*"):
            if older != Path(lock.name):  # its attempt is over
                older.unlink(missing_ok=True)
        with marked(output):
            yield


def _lock(lock: IO[str]) -> None:
    """Lock a file, or raise BlockingIOError; who only asks whether it is locked (`is_running`) is in nobody's way."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(LOOK_SECONDS)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_running(output: Path) -> bool:
    """Whether a run of this machine is using the folder now."""
    try:
        with lock_file(output, None).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, or no run has ever been in it
        return False
    return False


def require_newest(output: Path) -> None:
    """EnvironmentProblem if a newer attempt than that of this process has begun in the run folder."""
    mine = own_attempt()
    newer = newer_attempt(output, mine) if mine else None
    if mine and newer:
        whose = "this job" if newer.job_uid == mine.job_uid else "a newer job of this name"
        begun = f"attempt {newer.number} of {whose} has begun"
        raise EnvironmentProblem(f"{output}: {begun}, so attempt {mine.number} writes no more")


@contextmanager
def marked(output: Path) -> Iterator[None]:
    """The run folder belongs to this process's attempt, and shows that it is alive while the block runs.

    What an older attempt has left of the kind is replaced. Raises EnvironmentProblem where there is a newer one.
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


def _beat(output: Path, attempt: Attempt, ended: Event) -> None:
    """Show again and again that this process lives, until it ends or its attempt is over."""
    count = 0
    while not newer_attempt(output, attempt):
        with suppress(OSError):  # a full disk is told by whoever has something to write
            replace(output / LIFE, f"{attempt} {count} {socket.gethostname()}\n")
        count += 1
        if ended.wait(BEAT_SECONDS):
            return
