"""What a run may leave on the machine when it has ended: nothing but its folder."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "RLHF_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = 20
SECRETS = {"HF_TOKEN": "hf_planted000001", "AWS_SECRET_ACCESS_KEY": "planted000002", "WANDB_API_KEY": "planted000003"}
"""Planted into the environment of every run; none may be seen again."""


@contextmanager
def nothing_left_behind() -> Iterator[dict[str, str]]:
    """Gives variables for a run's environment; when the block ends nothing of the run may be left.

    That is no process that inherited them (and so no socket), and no segment in /dev/shm that nobody holds.
    """
    token, folder = uuid.uuid4().hex, tempfile.mkdtemp(prefix="ray")
    before = set(SHARED_MEMORY.iterdir())
    try:
        yield {MARK: token, "RAY_TMPDIR": folder, **SECRETS}
        family = marked(token)
        _, alive = psutil.wait_procs(family, timeout=GRACE_SECONDS)
        assert not alive, f"still running: {[process.cmdline() for process in alive]}"
        # semaphores of multiprocessing are left out: a run makes none, and tests beside it do
        there = {path for path in SHARED_MEMORY.iterdir() if not path.name.startswith("sem.mp-")}
        new = there - before
        held = held_segments()
        leaked = [str(path) for path in new if str(path) not in held and path.exists()]  # others' segments come and go
        assert not leaked, f"held by nobody: {leaked}"
    finally:
        for process in marked(token):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def marked(token: str) -> list[psutil.Process]:
    """The living processes that inherited the mark of a run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def held_segments() -> set[str]:
    """Files in /dev/shm that some process maps or holds open: those of other programs on this machine."""
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            held |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
        with suppress(OSError):
            held |= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return held


def planted_in(text: str, folder: Path) -> list[str]:
    """Where the value of a secret is seen: in what was printed, or in a file of a run folder."""
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen = {"output": text.encode(), **files}
    return [f"{secret} in {place}" for place, found in seen.items() for secret in SECRETS if _in(secret, found)]


def _in(secret: str, found: bytes) -> bool:
    return SECRETS[secret].encode() in found
