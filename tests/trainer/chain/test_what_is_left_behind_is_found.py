"""The check around every failing run can fail."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.trainer.chain import leftovers


def test_a_process_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_SECONDS", 0.5)
    left: list[subprocess.Popen[bytes]] = []
    with pytest.raises(AssertionError, match=r"still running: .*cat"), leftovers.nothing_left_behind() as marks:
        left.append(running({**os.environ, **marks}))
    assert left[0].wait(timeout=PATIENCE_SECONDS) < 0


def running(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A program that has answered: while it is being started, Linux shows an empty environment."""
    program = subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(b"x")
    program.stdin.flush()
    assert program.stdout.read(1) == b"x"
    return program


def test_a_segment_that_nobody_holds_is_found() -> None:
    segment = Path("/dev/shm") / uuid.uuid4().hex
    try:
        with pytest.raises(AssertionError, match=segment.name), leftovers.nothing_left_behind():
            segment.write_text("x")
    finally:
        segment.unlink()
