"""A step at real sizes by the product's own code under fake tensors stays inside GPUs of 80 GB."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.repo.tree import ROOT

SHORT = "two-layers-of-qwen2.5-7b"
WHOLE = ("qwen2.5-7b-8", "llama-3-8b-8")


@cache
def counted(name: str) -> dict[str, Any]:
    """What `python -m tests.real_size` prints of a case; it needs a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.real_size", "--json", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[name]
    return row


def test_no_rank_holds_the_logits_of_all_tokens() -> None:
    update = counted(SHORT)["phases"]["actor update"]
    whole = 8192 * 152064 * 4 / 1e9  # float32 logits of one micro-batch
    assert update["kinds"].get("logits", 0) < whole / 2


def test_a_reshard_is_a_handful_of_collectives_without_a_wait() -> None:
    reshard = counted(SHORT)["phases"]["reshard"]
    assert 0 < sum(reshard["collectives"].values()) <= 64
    assert reshard["waits"] == 0


def test_an_update_waits_for_the_gpu_a_few_times_a_micro_batch() -> None:
    assert counted(SHORT)["phases"]["actor update"]["waits"] < 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WHOLE)
def test_every_phase_of_a_step_stays_inside_the_gpu(name: str) -> None:
    row = counted(name)
    assert row["fits"], row["peak"]
