"""50 runs of PPO on two pools, whose calls, collectives and messages come late at random, leave the same bits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist

from rlhf_api.names import Role
from rlhf_trainer.controller.slot_process import SlotProcess
from tests.trainer.placement.light_ray import Reference
from tests.trainer.placement.sweep import Outcome, pools_of, run, small_job
from tests.trainer.placement.test_every_placement_gives_the_same_losses import SPLIT, require_same_bits

pytestmark = pytest.mark.slow

RUNS, LONGEST_SECONDS, SHARE = 50, 0.1, 0.3
"""Number of runs; longest delay, and share of calls, collectives and messages that come late."""
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor")


def delayed(function: Callable[..., Any], drawn: Random, noted: Path) -> Callable[..., Any]:
    """The function, which is often late; each delay adds a letter to a file."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if drawn.random() < SHARE:
            with noted.open("a") as file:
                file.write("x")
            time.sleep(drawn.random() * LONGEST_SECONDS)
        return function(*arguments, **named)

    return call


def delay_worker(seed: int, noted: Path) -> None:
    """Make the calls, collectives and results of this process late; each process draws other delays."""
    drawn = Random(f"{seed} {os.getpid()}")
    for place, name in [(SlotProcess, "run"), (Reference, "put"), *((dist, each) for each in COLLECTIVES)]:
        setattr(place, name, delayed(getattr(place, name), drawn, noted))


@pytest.fixture(scope="module")
def undisturbed(folders: Mapping[Role, str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder, small_job(folder, "PPO", folders, pools_of(SPLIT, slots=(2, 1))), folders)


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_with_delays_leaves_the_same_bits(
    seed: int, undisturbed: Outcome, folders: Mapping[Role, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, job = tmp_path / "delays", small_job(tmp_path, "PPO", folders, pools_of(SPLIT, slots=(2, 1)))
    monkeypatch.setattr(Reference, "put", delayed(Reference.put, Random(seed), noted))  # what the controller sends
    found = run(tmp_path, job, folders, prepare=partial(delay_worker, seed, noted))
    require_same_bits(found, undisturbed)
    assert len(noted.read_text()) > 50, "enough came late"
