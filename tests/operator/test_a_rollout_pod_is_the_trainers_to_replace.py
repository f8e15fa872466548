"""A worker pod that only generates may be lost while the trainer runs; if the trainer ends after all, it says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.running_jobs import failed, running
from tests.operator.simulated import SFT, World

TRAINS, GENERATES = "train", "writers"
POOLS = [
    {"name": TRAINS, "models": ["actor"], "slotsPerNode": 1},
    {"name": GENERATES, "models": ["rollout"], "slotsPerNode": 1},
]
GRPO = {
    **SFT,
    "algorithm": {"name": "GRPO", "kl": {"coefficient": 0.0}},
    "models": {**SFT["models"], "reward": {"entrypoint": "rlhf_examples.helpful.rule:score"}},
    "data": {**SFT["data"], "maxPromptTokens": 64, "maxResponseTokens": 64},
    "training": {"totalSteps": SFT["training"]["totalSteps"], "promptBatchSize": 8},
    "resources": {"device": "CPU"},
    "placement": {"mode": "Manual", "pools": POOLS},
}


def job(**rollout: Any) -> World:
    """A job with a pool that generates at step 12, whose pods know their pools."""
    world = running(spec={**GRPO, "rollout": {"samplesPerPrompt": 4, **rollout}})
    workers = [pod.name for pod in world.pods.values() if pod.role == "worker"]
    for name, pool in zip(workers, (TRAINS, GENERATES), strict=True):
        world.change(name, pool=pool)
    return world


def pod_of(world: World, pool: str) -> str:
    (name,) = (pod.name for pod in world.pods.values() if pod.pool == pool)
    return name


def end(world: World, pod: str) -> None:
    world.change(pod, phase="Failed", ready=False)


def preempt(world: World, pod: str) -> None:
    world.change(pod, phase="Failed", ready=False, disruption="PreemptionByScheduler")


def take_away(world: World, pod: str) -> None:
    del world.pods[pod]


LOSSES = [(end, "WorkerLost"), (preempt, "Preempted"), (take_away, "WorkerLost")]
Lose = Callable[[World, str], None]


@pytest.mark.parametrize(("lose", "reason"), LOSSES)
def test_the_attempt_goes_on_without_a_pod_that_generates(lose: Lose, reason: str) -> None:
    world = job()
    lose(world, pod_of(world, GENERATES))
    world.settle()
    assert (world.phase, world.status.last_failure) == ("Running", None)
    world.end(8, "rank 0 of pool writers died")
    world.ray_tells()
    world.settle()
    assert (failed(world).reason, failed(world).exit_code) == (reason, 8)


@pytest.mark.parametrize(("lose", "reason"), LOSSES)
def test_a_pod_that_trains_ends_it(lose: Lose, reason: str) -> None:
    world = job()
    lose(world, pod_of(world, TRAINS))
    world.settle()
    assert failed(world).reason == reason


def test_a_trainer_that_streams_cannot_do_without() -> None:
    world = job(stream=True)
    end(world, pod_of(world, GENERATES))
    world.settle()
    assert failed(world).reason == "WorkerLost"
