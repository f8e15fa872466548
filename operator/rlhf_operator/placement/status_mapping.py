"""Writes the mapper's answer into the status of a job."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast, get_args

from rlhf_api.job import Job
from rlhf_api.names import PlacedRole, Role
from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, MappedPool, MappedSizes
from rlhf_mapper.mapping import DeviceMapping, Prediction
from rlhf_planning.mapped_fields import gpu_memory_utilization, micro_batch_tokens


def status_mapping(job: Job, mapping: DeviceMapping, digest: str) -> MappedPlacement:
    """`status.mapping`: a mapping without the details that only `rlhf plan` shows; digest: its inputHash."""
    prediction = mapping.prediction
    on_gpus = prediction if mapping.device == "GPU" else None
    slots = sum(pool.size for pool in mapping.pools)
    return MappedPlacement(
        input_hash=digest,
        device=mapping.device,
        slots=slots,
        gpus=slots if mapping.device == "GPU" else 0,
        pools=tuple(
            MappedPool(
                name=pool.name,
                models=_placed(pool.models),
                nodes=len(pool.slots_per_machine),
                slots_per_node=max(pool.slots_per_machine),
                gpu=pool.gpu or None if mapping.device == "GPU" else None,
            )
            for pool in mapping.pools
        ),
        sizes=tuple(_sizes(job, role, mapping.sizes[role], on_gpus) for role in _placed(tuple(mapping.sizes))),
        gpu_memory_utilization=(
            gpu_memory_utilization(job, on_gpus) if on_gpus else job.spec.rollout.gpu_memory_utilization
        ),
        micro_batch_tokens=micro_batch_tokens(job, on_gpus.models.values()) if on_gpus else None,
        predicted_step_seconds=prediction.step_seconds if prediction else None,
        predicted_tokens_per_second=prediction.tokens_per_second if prediction else None,
    )


def _placed(roles: tuple[Role, ...]) -> tuple[PlacedRole, ...]:
    """Without those that come with another."""
    return tuple(cast("PlacedRole", role) for role in roles if role in get_args(PlacedRole))


def _sizes(job: Job, role: PlacedRole, sizes: ParallelSizes, prediction: Prediction | None) -> MappedSizes:
    generates = role == "actor" and not job.spec.algorithm.offline
    unset = {} if generates else {"generation_pipeline": None, "generation_tensor": None}
    offload = prediction.models[role].offload if prediction and job.models()[role].offload == "None" else None
    document = {"role": role, "offload": offload, **asdict(sizes), **unset}
    return MappedSizes.model_validate(document, by_name=True)
