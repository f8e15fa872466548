"""Every rung on a GPU where there is one, and its rehearsal on the CPU: the same way through the code."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.ladder import RUNGS, climb
from tests.repo.tree import ROOT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_holds_on_a_gpu(name: str) -> None:
    line = climb(name, rehearse=False)
    assert line["ok"], line["failed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNGS)
def test_a_rung_holds_in_rehearsal(name: str) -> None:
    line = climb(name, rehearse=True)
    assert line["ok"], line["failed"]
    assert line["device"] == "cpu"
    assert line["figures"]


def run(*options: str) -> dict[str, Any]:
    """The line of a rung that takes a minute."""
    program = """
import time
from tests.gpu.rung import main

def measure(rung):
    with rung.part("one"):
        time.sleep(60)

main(measure)
"""
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == int(not line["ok"])
    return line


@pytest.mark.slow
def test_a_rung_whose_time_is_up_says_what_it_has() -> None:
    line = run("--rehearse", "--seconds", "1")
    assert line["failed"] == {"time": "did not end in 1 s"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rung_without_a_gpu_says_so() -> None:
    assert "no CUDA device" in run()["failed"]["start"]
