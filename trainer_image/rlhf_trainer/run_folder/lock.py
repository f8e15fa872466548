"""A run folder belongs to one run at a time."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run_folder.attempt import LOCK, lock_file, own_attempt
from rlhf_trainer.run_folder.fence import marked, require_newest

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentProblem(f"--output {output}: another rlhf run is using this folder") from None
        except OSError as error:
            # the operator starts an attempt once, so on its volumes a lock is a second safety
            if attempt is None or error.errno not in WITHOUT_LOCKS:
                raise EnvironmentProblem(f"--output {output}: cannot be locked: {error.strerror}") from error
        _forget_older(output, lock)
        with marked(output):
            yield


def _forget_older(output: Path, held: TextIOWrapper) -> None:
    """Delete the locks of other attempts, all of which are over."""
    for file in output.glob(f"{LOCK}-*"):
        if file != Path(held.name):
            file.unlink(missing_ok=True)


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
