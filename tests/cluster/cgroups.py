"""The cgroup below which a node's kubelet makes those of its pods: version 1, hybrid or 2."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
WEIGHTS = {"cpu.shares": 16384, "cpu.weight": 1600}
"""16 times the default: all pods of a node together count as one process otherwise, and starve on a busy machine."""
TRIES, SECONDS_BETWEEN = 50, 0.1
"""Processes of a killed node take a moment to leave."""


def hierarchies() -> Iterator[Path]:
    """The roots of the hierarchies: one with version 2, one a controller with version 1."""
    if (ROOT / "cgroup.controllers").exists():
        yield ROOT
        return
    for path in ROOT.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield path


def make(name: str) -> None:
    """A new cgroup in every hierarchy; one that an earlier node left is removed first."""
    remove(name)
    for hierarchy in hierarchies():
        group = hierarchy / name.strip("/")
        group.mkdir(exist_ok=True)
        if hierarchy.name == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((hierarchy / file).read_text())
        for file, weight in WEIGHTS.items():
            if (group / file).exists():
                (group / file).write_text(str(weight))


def remove(name: str) -> None:
    """Take a cgroup and those below it away, as far as nothing runs there."""
    for hierarchy in hierarchies():
        group = hierarchy / name.strip("/")
        for _ in range(TRIES):
            if not group.exists():
                break
            _remove_tree(group)
            time.sleep(SECONDS_BETWEEN if group.exists() else 0)


def _remove_tree(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
