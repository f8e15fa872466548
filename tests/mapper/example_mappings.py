"""Mappings with predictions to show: one pool, four pools of two GPU types, and a laptop. The figures are made up."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import (
    PHASES,
    Device,
    DeviceMapping,
    Infeasible,
    MappedPool,
    ModelPrediction,
    Phase,
    Prediction,
    Rejected,
    Stage,
)

PHASES_OF: dict[Stage, tuple[Phase, ...]] = {
    "generation": ("reshard", "generation"),
    "preparation": ("scoring",),
    "training": ("update",),
}
TRAINED = ("actor", "critic")


def sizes(pipeline: int, tensor: int, data: int, *, generation: tuple[int, int] | None = None) -> ParallelSizes:
    p_g, t_g = generation or (pipeline, tensor)
    return ParallelSizes(
        pipeline=pipeline, tensor=tensor, data=data, replicas=1, generation_pipeline=p_g, generation_tensor=t_g
    )


def memory_of(role: Role, weights: float) -> dict[Stage, dict[str, float]]:
    """Bytes of a slot: a trained model holds its states all the time, the actor's generator in its stage."""
    held = {"weights": weights}
    if role in TRAINED:
        held |= {"gradients": weights, "optimizer": 6 * weights}
    generating = {"generator": 2 * weights, "kv_cache": 5 * weights} if role == "actor" else {}
    return {
        "generation": held | generating,
        "preparation": held | {"activations": weights / 4},
        "training": held | ({"activations": 2 * weights} if role in TRAINED else {}),
    }


def mapping(
    pools: tuple[MappedPool, ...],
    cut: dict[Role, ParallelSizes],
    seconds: Mapping[Role, Mapping[Phase, float]],
    *,
    weights: float,
    limits: dict[str, float],
    device: Device = "GPU",
    rejected: tuple[Rejected, ...] = (),
) -> DeviceMapping:
    """A mapping whose stages last as long as their slowest pools; `weights` are those of each model on a slot."""
    work = {
        stage: max(sum(seconds[role].get(phase, 0.0) for role in pool.models for phase in phases) for pool in pools)
        for stage, phases in PHASES_OF.items()
    }
    totals = [
        (phase, max(sum(seconds[role].get(phase, 0.0) for role in pool.models) for pool in pools)) for phase in PHASES
    ]
    models = {
        role: ModelPrediction(
            micro_batch=8,
            offload="Optimizer" if role in TRAINED else "Parameters",
            seconds=seconds[role],
            memory=memory_of(role, weights),
        )
        for role in cut
    }
    step = sum(work.values())
    prediction = Prediction(
        step_seconds=step,
        low=0.75 * step,
        high=1.5 * step,
        tokens_per_second=2048 * 1024 / step,
        phases={phase: total for phase, total in totals if total},
        stages=work,
        models=models,
        memory_limit=limits,
        gpu_memory_utilization=0.62,
    )
    return DeviceMapping(device=device, pools=pools, sizes=cut, prediction=prediction, rejected=rejected)


COLOCATED = mapping(
    (
        MappedPool(
            name="all",
            models=("actor", "critic", "reference", "reward"),
            slots_per_machine=(8, 8),
            gpu="a100-80g",
        ),
    ),
    {
        "actor": sizes(1, 8, 2, generation=(1, 2)),
        "critic": sizes(1, 8, 2),
        "reference": sizes(1, 4, 4),
        "reward": sizes(1, 2, 8),
    },
    {
        "actor": {"reshard": 0.412, "generation": 31.3, "scoring": 2.9, "update": 24.7},
        "critic": {"scoring": 2.8, "update": 23.9},
        "reference": {"scoring": 2.7},
        "reward": {"scoring": 2.6},
    },
    weights=2.6e9,
    limits={"all": 76.5e9},
    rejected=(
        Rejected(
            pools=((("actor", "critic", "reward"), "a100-80g", 12), (("reference",), "a100-80g", 4)),
            step_seconds=96.1,
            reason="training waits for the actor and the critic, which have 12 GPUs instead of 16",
        ),
        Rejected(
            pools=((("actor", "reference"), "a100-80g", 8), (("critic", "reward"), "a100-80g", 8)),
            step_seconds=101.4,
            reason="the pool of critic and reward is idle during generation, 52.1 s of a step",
        ),
    ),
)
SPLIT = mapping(
    (
        MappedPool(name="actor", models=("actor",), slots_per_machine=(8,) * 8, gpu="h100-80g"),
        MappedPool(name="critic", models=("critic", "cost_critic"), slots_per_machine=(8,) * 4, gpu="a100-80g"),
        MappedPool(name="reference", models=("reference",), slots_per_machine=(8, 8), gpu="a100-80g"),
        MappedPool(name="reward-and-cost", models=("reward", "cost"), slots_per_machine=(4, 4, 8), gpu="a100-80g"),
    ),
    {
        "actor": sizes(4, 8, 2, generation=(1, 4)),
        "critic": sizes(2, 8, 2),
        "cost_critic": sizes(2, 8, 2),
        "reference": sizes(2, 8, 1),
        "reward": sizes(1, 8, 2),
        "cost": sizes(1, 8, 2),
    },
    {
        "actor": {"reshard": 1.2, "generation": 58.4, "scoring": 6.1, "update": 101.0},
        "critic": {"scoring": 5.2, "update": 61.0},
        "cost_critic": {"scoring": 5.2, "update": 61.0},
        "reference": {"scoring": 12.3},
        "reward": {"scoring": 4.8},
        "cost": {"scoring": 4.9},
    },
    weights=3.1e9,
    limits={"actor": 76.5e9, "critic": 76.5e9, "reference": 76.5e9, "reward-and-cost": 36e9},
    rejected=(
        Rejected(
            pools=(
                (("actor", "reference"), "h100-80g", 64),
                (("critic", "cost_critic"), "a100-80g", 48),
                (("reward", "cost"), "a100-80g", 16),
            ),
            step_seconds=195.2,
            reason="preparation takes 18.4 s instead of 12.3 s: the reference waits for the actor on the same GPUs",
        ),
        Rejected(
            pools=((("actor", "critic", "cost_critic", "reference", "reward", "cost"), "a100-80g", 64),),
            step_seconds=412.0,
            reason="a pool never spans GPU types, so half of the cluster stands idle",
        ),
    ),
)
LAPTOP = mapping(
    (MappedPool(name="all", models=("actor", "reference", "reward"), slots_per_machine=(2,)),),
    {"actor": sizes(1, 1, 2), "reference": sizes(1, 1, 2), "reward": sizes(1, 1, 2)},
    {
        "actor": {"reshard": 0.0021, "generation": 0.412, "scoring": 0.019, "update": 0.143},
        "reference": {"scoring": 0.017},
        "reward": {"scoring": 0.0004},
    },
    weights=0.55e6,
    limits={"all": 8e9},
    device="CPU",
)
UNKNOWN = DeviceMapping(device="CPU", pools=LAPTOP.pools, sizes=LAPTOP.sizes)
TOO_BIG = Infeasible(
    short_bytes=412.5e9,
    smallest=(("a100-80g", 24), ("h200-141g", 16)),
    options=("16 x b200-180g", "spec.training.batchSize: 128"),
    reason="the states of actor and critic take 1,692 GB, and 16 GPUs of 80 GB may hold 1,280 GB",
)
