"""A run folder belongs to the newest attempt of its job: the trainer of an older one stops before it writes more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

from rlhf_trainer.attempt import BEAT_SECONDS, EXIT, LIFE, MARK, marked_attempt, own_attempt, read_exit, replace
from rlhf_trainer.errors import EnvironmentProblem

SETTLE_SECONDS: Final = 1.0
"""An older attempt that looked at the mark just before it changed has written by then."""


def require_newest(output: Path) -> None:
    """EnvironmentProblem if a newer attempt than that of this process has begun in the run folder."""
    mine, newest = own_attempt(), marked_attempt(output)
    if mine is not None and newest > mine:
        raise EnvironmentProblem(f"{output}: attempt {newest} of this job has begun, so attempt {mine} writes no more")


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
    older = marked_attempt(output)
    may_live = older not in (0, attempt) and read_exit(output, older) is None
    (output / EXIT).unlink(missing_ok=True)
    replace(output / MARK, f"{attempt}\n")
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


def _beat(output: Path, attempt: int, ended: Event) -> None:
    """Show again and again that this process lives, until it ends or its attempt is over."""
    count = 0
    while marked_attempt(output) <= attempt:
        with suppress(OSError):  # a full disk is told by whoever has something to write
            replace(output / LIFE, f"{attempt} {count}\n")
        count += 1
        if ended.wait(BEAT_SECONDS):
            return
