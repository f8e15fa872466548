"""Jobs, shapes and clusters for which the mapper is asked: written down, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.hardware import GB, GPUS, Cluster, Gpu, NodeGroup
from tests.mapper.oracles.testbed import MODELS

HEAD = {"apiVersion": "rlhf.hybridflow.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "job"}}
SCORERS: tuple[Role, ...] = ("critic", "reward", "cost", "cost_critic")
OFFLINE = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.offline)
ROLES: dict[str, tuple[Role, ...]] = {
    name: tuple(role for role in algorithm.trained + algorithm.frozen if role != "reference")
    for name, algorithm in ALGORITHMS.items()
}
"""Roles that a manifest has to name."""


def job_of(algorithm: str, models: dict[str, Any] | None = None, **changes: Any) -> Job:
    """A job of 64 rows a step; models: what a role has besides its URI; data: besides train."""
    if algorithm == "Merge":
        merged = {"name": algorithm, "models": [{"uri": "hf://org/model"}] * 2}
        return Job.parse({**HEAD, "spec": {"algorithm": merged, **changes}})
    roles = ROLES[algorithm]
    options = changes.pop("options", {})
    spec: dict[str, Any] = {
        "algorithm": {"name": algorithm, **options},
        "models": {role: {"uri": "hf://org/model", **(models or {}).get(role, {})} for role in roles},
        "data": {"train": {"uri": "hf://org/data"}, **changes.pop("data", {})},
        "training": {"totalSteps": 1, ("batchSize" if algorithm in OFFLINE else "promptBatchSize"): 64}
        | changes.pop("training", {}),
        **changes,
    }
    return Job.parse({**HEAD, "spec": spec})


def shapes_of(job: Job, model: Architecture = MODELS["7B"]) -> dict[Role, Architecture]:
    """All models of a job in one shape."""
    return {role: replace(model, scores=role in SCORERS) for role in job.models()}


def cluster_of(*groups: tuple[str, int, int]) -> Cluster:
    """(GPU type, nodes, GPUs of a node) of each group."""
    return Cluster(tuple(NodeGroup(gpu=GPUS[gpu], count=count, gpus_per_node=gpus) for gpu, count, gpus in groups))


def an_architecture(draw: random.Random) -> Architecture:
    heads = draw.choice([4, 8, 12, 16, 32])
    return Architecture(
        layers=draw.randint(2, 40),
        hidden=heads * 128,
        heads=heads,
        kv_heads=draw.choice([each for each in (1, 2, 4, 8, heads) if heads % each == 0]),
        head_size=128,
        ffn=heads * draw.choice([256, 336, 344]),
        vocabulary=draw.choice([32000, 151936]),
        tied=draw.random() < 0.3,
    )


def a_job(draw: random.Random) -> Job:
    """An algorithm with lengths, batches and choices of its models."""
    algorithm = draw.choice(["PPO", "PPO", "SafeRLHF", "SafeRLHF", "GRPO", "ReMax", "DPO", "SFT"])
    recomputed = draw.choice([{}, {"gradientCheckpointing": True}, {"gradientCheckpointing": False}])
    training: dict[str, Any] = {"microBatchTokens": draw.choice([4096, 16384])}
    size = draw.choice([16, 32, 48, 64, 96])
    if algorithm in OFFLINE:
        training["batchSize"] = size
    else:
        training |= {"promptBatchSize": size, "miniBatchSize": size // draw.choice([1, 2, 4])}
    return job_of(
        algorithm,
        models={"actor": recomputed, **({"critic": recomputed} if "critic" in ROLES[algorithm] else {})},
        data={"maxPromptTokens": draw.choice([64, 512, 2048]), "maxResponseTokens": draw.choice([64, 1024])},
        training=training,
        **({"rollout": {"samplesPerPrompt": 4}} if algorithm == "GRPO" else {}),
    )


def a_cluster(draw: random.Random) -> Cluster:
    """One or two groups of few nodes."""
    types: Sequence[Gpu] = draw.sample([GPUS[name] for name in ("a100-80g", "h100-80g", "l40s-48g", "a10-24g")], 2)
    return Cluster(
        tuple(
            NodeGroup(
                gpu=gpu,
                count=draw.randint(1, 3),
                gpus_per_node=draw.choice([4, 6, 8]),
                node_bandwidth=draw.choice([None, 12.5 * GB, 50 * GB]),
                gpu_hour_price=draw.choice([0.8, 2.0, 3.5]),
            )
            for gpu in types[: draw.randint(1, 2)]
        )
    )


def drawn(seed: int) -> tuple[Job, Cluster, dict[Role, Architecture]]:
    """A job, a cluster and a shape for each of the job's models."""
    draw = random.Random(seed)
    job, cluster = a_job(draw), a_cluster(draw)
    return job, cluster, {role: replace(an_architecture(draw), scores=role in SCORERS) for role in job.models()}
