"""`kubectl rlhf` as a user calls it: the real kubectl finds the plugin on PATH."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.client import Cluster
from tests.patience import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS


def rlhf(
    cluster: Cluster, *words: object, columns: int = 80, seconds: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `kubectl rlhf WORDS` did within so many seconds, in a terminal's width of so many columns."""
    return kubectl(cluster, "rlhf", *words, columns=columns, seconds=seconds, **variables)


def kubectl(
    cluster: Cluster, *words: object, columns: int = 80, seconds: float = SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What kubectl did within so many seconds, with the plugin on its PATH."""
    environment = {**_environment(cluster), "COLUMNS": str(columns), **variables}
    command = ["kubectl", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


@contextmanager
def served(cluster: Cluster, *words: object) -> Iterator[str]:
    """The address at which `kubectl rlhf WORDS` serves; it gets SIGINT at the end, and must end well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["kubectl", "rlhf", *map(str, words), "--port", str(port)]
    with subprocess.Popen(command, env=_environment(cluster), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert found
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(SECONDS)
    assert code == 0


def _environment(cluster: Cluster) -> dict[str, str]:
    path = f"{cluster.programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {**os.environ, **cluster.environment(), "PATH": path}


def told(cluster: Cluster, *words: object, columns: int = 80, seconds: float = SECONDS) -> str:
    """What it printed; AssertionError if it failed."""
    done = rlhf(cluster, *words, columns=columns, seconds=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout
