"""Starts a cluster for a test session and takes it away."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.client import Cluster
from tests.cluster.processes import TAIL, FailedError, die_with_parent
from tests.cluster.settings import ROOT, Level
from tests.patience import PATIENCE_SECONDS

PREFIX = "rlhf-cluster-"
SECONDS_TO_START = PATIENCE_SECONDS
"""With the time that a cluster with pods waits for another one on this machine."""
SECONDS_TO_END = 20


@contextmanager
def cluster(level: Level, nodes: int = 1) -> Iterator[Cluster]:
    """A running cluster in a temporary folder; nothing of it is left, even if this process is killed."""
    remove_leftovers()
    base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    folder, log = base / "cluster", base / "supervisor.log"
    command = [sys.executable, "-m", "tests.cluster", level, str(folder), "--nodes", str(nodes)]
    with log.open("wb") as sink:
        supervisor = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # a Ctrl-C ends the tests first, then the cluster
            preexec_fn=die_with_parent,  # noqa: PLW1509 the child does nothing else before it is replaced
        )
    try:
        wait_until_ready(supervisor, folder, log)
        yield Cluster(folder)
    finally:
        supervisor.terminate()
        try:
            supervisor.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        shutil.rmtree(base, ignore_errors=True)


def wait_until_ready(supervisor: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
    """Until FOLDER/ready.json is there; FailedError with what the supervisor said if it ends before."""
    end = time.monotonic() + SECONDS_TO_START
    while not (folder / "ready.json").exists():
        if supervisor.poll() is not None or time.monotonic() > end:
            raise FailedError(f"the cluster does not start\n{log.read_text(errors='replace')[-TAIL:]}")
        time.sleep(0.05)


def remove_leftovers() -> None:
    """Folders of sessions that were killed; their processes ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
