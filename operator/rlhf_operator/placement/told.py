"""The mapper's answer as the status of a job shows it."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast, get_args

from rlhf_api.job import Job
from rlhf_api.names import PlacedRole, Role
from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, MappedPool, MappedSizes
from rlhf_mapper.mapping import DeviceMapping, Prediction

ENGINE_SHARE, MOST_SHARE = 0.05, 0.95
"""Of a GPU's memory: what the generator needs besides its weights and KV cache, and the most that it may take."""


def told(job: Job, mapping: DeviceMapping, digest: str) -> MappedPlacement:
    """A mapping without what is only of interest to `rlhf plan`."""
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
        gpu_memory_utilization=_share(job, on_gpus),
        micro_batch_tokens=_tokens(job, on_gpus),
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


def _share(job: Job, prediction: Prediction | None) -> float | None:
    """Of a GPU's memory for generation: as the job says, or as mapped."""
    if job.spec.algorithm.offline or job.spec.rollout.gpu_memory_utilization or prediction is None:
        return job.spec.rollout.gpu_memory_utilization
    return min(prediction.gpu_memory_utilization + ENGINE_SHARE, MOST_SHARE)


def _tokens(job: Job, prediction: Prediction | None) -> int | None:
    """Of a forward pass, so that the largest model has room; never more than the job says."""
    if prediction is None:
        return None
    sequence = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    least = min(model.micro_batch for model in prediction.models.values()) * sequence
    return min(job.spec.training.micro_batch_tokens, max(least, 1))
