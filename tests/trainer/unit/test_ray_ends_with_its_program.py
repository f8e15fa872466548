"""Processes of our own Ray, and their children, end with the program that started Ray, even by a kill."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import PATIENCE_SECONDS

PROGRAM = """
import sys
from rlhf_trainer.run.session import OwnProcess
made = OwnProcess(["/bin/sh", "-c", "sleep 3600 & wait"], preexec_fn=lambda: None)
print(made.pid, flush=True)
sys.stdin.read()
made.kill()
made.wait()
"""


@pytest.mark.parametrize("end", ["is killed", "kills it"])
def test_a_process_and_its_children_end_with_the_program(end: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True) as program:
        assert program.stdin
        assert program.stdout
        process = psutil.Process(int(program.stdout.readline()))
        while not (children := process.children()):
            pass
        others = psutil.Process(program.pid).children()
        for other in others:
            other.send_signal(signal.SIGTERM)  # as service managers send it to all
        if end == "is killed":
            program.kill()
        else:
            program.stdin.close()
        _, left = psutil.wait_procs([*others, *children], timeout=PATIENCE_SECONDS)
    assert not left
