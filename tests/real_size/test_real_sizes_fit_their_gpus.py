"""A step at real sizes by the product's own code under fake tensors stays inside GPUs of 80 GB."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.repo.tree import ROOT

pytestmark = pytest.mark.slow

SHORT = "two-layers-of-qwen2.5-7b"
IN_HOST = "llama-3-8b-1-optimizer-in-host"
WHOLE = (
    "qwen2.5-7b-8",
    "llama-3-8b-8",
    IN_HOST,
    "qwen3-32b-32",
    "qwen3-32b-32-first-stage",
    "qwen3-32b-32-last-stage",
    "llama-3-70b-64",
    "llama-3-70b-64-last-rank",
)
CHUNK = 0.07
"""GB that the reader reads at once: 64 MiB."""


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


def held_while_loading(name: str) -> dict[str, float]:
    """The most GB of tensors, on GPU or host, in each phase of loading beyond those that stay."""
    phases = counted(name)["phases"].items()
    loads = {phase: of for phase, of in phases if phase.startswith("load")}
    return {phase: max(of["peak"] - of["after"], of["host_peak"] - of["host_after"]) for phase, of in loads.items()}


def test_loading_holds_a_chunk_besides_the_shards() -> None:
    assert max(held_while_loading(SHORT).values()) < CHUNK
    assert all(counted(SHORT)["phases"][phase]["waits"] < 10 for phase in held_while_loading(SHORT))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WHOLE)
def test_every_phase_of_a_step_stays_inside_the_gpu(name: str) -> None:
    row = counted(name)
    assert row["fits"], row["peak"]
    assert max(held_while_loading(name).values()) < CHUNK


@pytest.mark.timeout(900)
def test_gradients_leave_a_gpu_whose_optimizer_is_in_the_host() -> None:
    update = counted(IN_HOST)["phases"]["actor update"]
    assert update["kinds"].get("gradients", 0) < 16, "8 billion float32 gradients are 32 GB"
