"""A run folder belongs to one run at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_trainer.errors import EnvironmentProblem

LOCK = ".lock"


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Keep other runs out of the run folder while the block runs; the kernel frees it however the process ends."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / LOCK).open("a")
    except OSError as error:
        raise EnvironmentProblem(f"--output {output}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentProblem(f"--output {output}: another rlhf run is using this folder") from None
        yield


def is_running(output: Path) -> bool:
    """Whether a run is using the folder now."""
    try:
        with (output / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no folder, or no run has ever been in it
        return False
    return False
