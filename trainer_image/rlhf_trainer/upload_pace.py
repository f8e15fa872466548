"""Pace of checkpoint uploads: one token bucket for all processes of a node, so that steps keep the network."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event

SHARE = 1 / 20
"""Share of a link that uploads take: what a step sends beside them takes at most 1.053 times as long."""
BUCKET = Path(tempfile.gettempdir()) / f"rlhf-uploads-{os.getuid()}"
"""File that a process locks while it waits for its tokens; all jobs of a user on a node share it."""


class UploadPace:
    """Token bucket from which each part of an upload is taken before it is sent."""

    def __init__(
        self, bytes_per_second: float, bucket: Path = BUCKET, wait: Callable[[float], object] | None = None
    ) -> None:
        """bytes_per_second: of all processes with this bucket together. wait: waits some seconds, or until `lift`."""
        self._rate, self._bucket, self._lifted = bytes_per_second, bucket, Event()
        self._wait = wait or self._lifted.wait

    def take(self, size: int) -> None:
        """Wait until the bucket has `size` bytes for this process; processes wait one after another."""
        if self._lifted.is_set():
            return
        with self._bucket.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._wait(size / self._rate)

    def lift(self) -> None:
        """Stop pacing this upload: a step, or the end of the run, waits for the rest of it."""
        self._lifted.set()
