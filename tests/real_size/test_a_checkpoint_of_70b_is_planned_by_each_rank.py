"""A checkpoint of 70B on 64 ranks: each rank writes and reads its own part, and none waits for another."""

import json
import subprocess
import sys

import pytest

from tests.repo.tree import ROOT

RANKS, PARAMETERS, ADAM = 64, 70.55e9, 3


@pytest.mark.slow
def test_a_rank_saves_and_loads_its_share_without_a_collective() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size.checkpoint"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = PARAMETERS * ADAM * 4 / 1e9
    assert found["files"] == 2 * RANKS  # shards, and random states
    assert found["collectives"] == {"save": 0, "load": 0}
    assert found["gb_of_all"] == pytest.approx(whole, rel=0.01)
    assert found["gb_of_rank"] == found["gb_read_by_rank"] == pytest.approx(whole / RANKS, rel=0.02)
