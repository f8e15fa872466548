"""Partitions of a job's models over pools, and what a few steps of each measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.place import place
from rlhf_trainer.run.job_run import Lookahead
from rlhf_trainer.run.on_ray import RayRuntime
from rlhf_trainer.run.slots import Slots
from rlhf_trainer.telemetry import merge
from tests.trainer.jobs import job
from tests.trainer.placement.light_ray import LightRay, no_preparation
from tests.trainer.placement.sampler import PlainSampler

Partition = Sequence[Sequence[str]]
STEPS = 3
ROLES: dict[str, tuple[Role, ...]] = {
    "PPO": ("actor", "critic", "reference", "reward"),
    "SafeRLHF": ("actor", "critic", "reference", "reward", "cost"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left."""

    records: list[dict[str, float]]
    """What each step measured."""
    weights: Mapping[str, torch.Tensor]
    """The trained model's."""
    processes: int
    """How many the models lived in."""
    ended: int
    """How many of them had ended before the job did."""


def partitions(models: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to divide the models into groups, the groups in order of their first model."""
    if not models:
        yield []
        return
    for rest in partitions(models[1:]):
        yield [[models[0]], *rest]
        for number, group in enumerate(rest):
            yield [[models[0], *group], *rest[:number], *rest[number + 1 :]]


def name_of(partition: Partition) -> str:
    return " | ".join("+".join(group) for group in partition)


def small_job(
    folder: Path,
    algorithm: str,
    folders: Mapping[Role, str],
    pools: list[dict[str, Any]],
    *,
    offload: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Job:
    """Few and short rows; two mini-batches, two epochs, running normalisation of the rewards.

    changes: fields of the spec that are others.
    """
    trained = {"optimizer": {"learningRate": 1e-3, "warmupSteps": 2}, "offload": "All" if offload else "None"}
    frozen = {"offload": "Parameters" if offload else "None"}
    models = {role: {"uri": f"file://{folders[role]}", **frozen} for role in ROLES[algorithm]}
    spec = {
        "algorithm": {"name": algorithm, "rewards": {"normalization": "Running"}},
        "models": {**models, **{role: {**models[role], **trained} for role in ("actor", "critic")}},
        "data": {
            "train": {"uri": "package://rlhf_examples/helpful/train.jsonl", "limit": 40},
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
        },
        "training": {
            "totalSteps": STEPS,
            "promptBatchSize": 8,
            "miniBatchSize": 4,
            "updateEpochs": 2,
            "callDeadlineSeconds": 60,
        },
        "resources": {"device": "CPU"},
        "placement": {"mode": "Manual", "pools": pools},
    }
    return job(folder, "sweep", {**spec, **(changes or {})})


def pools_of(partition: Partition, *, slots: Sequence[int]) -> list[dict[str, Any]]:
    """A pool for each group; `slots` of them in turn."""
    return [
        {"name": f"pool-{number}", "models": list(group), "slotsPerNode": slots[number % len(slots)]}
        for number, group in enumerate(partition)
    ]


def run(
    folder: Path,
    one: Job,
    folders: Mapping[Role, str],
    sampler: Callable[..., PlainSampler] = PlainSampler,
    prepare: Callable[[], None] = no_preparation,
) -> Outcome:
    """The steps of a job by the product's runtime, on processes without Ray, with this in vLLM's place."""
    placed = place(one, (0,))
    light, saved = LightRay(folder / "light", sampler, prepare), one.saved
    with light.patched():
        runtime = RayRuntime(one, placed, folders, slots=Slots(), path=folder)
        with runtime.running() as shape:
            records = steps(one, runtime, shape.total_steps)
            runtime.models[saved].save(folder=str(folder / saved)).result()
            ended = sum(not each.is_alive() for each in light.processes)
    weights = load_file(str(folder / saved / "model.safetensors"))
    return Outcome(records=records, weights=weights, processes=len(light.processes), ended=ended)


def steps(one: Job, runtime: RayRuntime, count: int) -> list[dict[str, float]]:
    """Run so many of the algorithm's steps; what each measured."""
    lookahead = Lookahead(one, runtime, first_step=1, total_steps=count)
    records = []
    for number in range(1, count + 1):
        one.spec.algorithm.step(lookahead.batch(number), **runtime.step_models)
        records.append(merge(runtime.drain(number)))
    return records
