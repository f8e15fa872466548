"""Copies the logs of Ray and its workers to the run folder, on a volume, when the pod ends.

`python -m rlhf_trainer.pods.ray_logs RUN_FOLDER` copies the end of each file of Ray's session into the run folder. The
program uses the standard library only: it must be done long before the kubelet kills the pod.
"""

import argparse
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rlhf_trainer.run_folder.attempt import AttemptId, own_attempt

LOGS: Final = Path("/tmp/ray/session_latest/logs")
"""Folder of Ray's logs in a pod; both containers of the head pod mount it."""
FOLDER: Final = "ray-logs"
"""Name of the folder for Ray's logs in the run folder; it holds `a<attempt>/<pod>/`."""
KEPT_ATTEMPTS: Final = 3
MAX_FILE_BYTES: Final = 1 << 20
MAX_POD_BYTES: Final = 32 << 20
FREE_SHARE: Final = 10
"""Divisor of the disk's size: 1 / FREE_SHARE of the disk stays free for checkpoints."""


def keep(logs: Path, output: Path, attempt: AttemptId, pod: str) -> None:
    """Copy the ends of Ray's log files, the last changed first; a file that cannot be read or written is left out."""
    kept = output / FOLDER / f"a{attempt.number}"
    with suppress(OSError):
        older = sorted((each for each in kept.parent.iterdir() if each != kept), key=lambda each: each.stat().st_mtime)
        for each in older[: -KEPT_ATTEMPTS + 1]:
            shutil.rmtree(each, ignore_errors=True)
    disk = shutil.disk_usage(output)
    room = max(min(MAX_POD_BYTES, disk.free - disk.total // FREE_SHARE), 0)
    files = [each for each in logs.rglob("*") if each.is_file()]
    for file in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        with suppress(OSError), file.open("rb") as source:
            source.seek(max(file.stat().st_size - min(MAX_FILE_BYTES, room), 0))
            end = source.read(min(MAX_FILE_BYTES, room))
            if not end:
                continue
            target = kept / pod / file.relative_to(logs)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(end)
            room -= len(end)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: copy the logs of this pod's Ray to the run folder."""
    parser = argparse.ArgumentParser("python -m rlhf_trainer.pods.ray_logs")
    parser.add_argument("output", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--logs", type=Path, default=LOGS, help=f"folder of Ray's logs; default {LOGS}")
    given, attempt = parser.parse_args(arguments), own_attempt()
    if attempt is not None:
        keep(given.logs, given.output, attempt, socket.gethostname())


if __name__ == "__main__":
    main()
