"""`kubectl rlhf` as a user calls it: the real kubectl finds the plugin on PATH."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.client import Cluster
from tests.patience import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS


def rlhf(cluster: Cluster, *words: object, columns: int = 80, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `kubectl rlhf WORDS` did, in a terminal's width of so many columns."""
    return kubectl(cluster, "rlhf", *words, columns=columns, **variables)


def kubectl(cluster: Cluster, *words: object, columns: int = 80, **variables: str) -> subprocess.CompletedProcess[str]:
    """What kubectl did, with the plugin on its PATH."""
    path = f"{cluster.programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {**os.environ, **cluster.environment(), "PATH": path, "COLUMNS": str(columns), **variables}
    command = ["kubectl", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


def told(cluster: Cluster, *words: object, columns: int = 80) -> str:
    """What it printed; AssertionError if it failed."""
    done = rlhf(cluster, *words, columns=columns)
    assert done.returncode == 0, done.stderr
    return done.stdout
