"""`status.mapping`: the mapper's answer without the details that only `rlhf plan` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from rlhf_api.job import Job
from rlhf_api.names import PlacedRole, PoolRole, Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, MappedPool, MappedSizes
from rlhf_mapper import mapping as mapper
from rlhf_planning.mapped_fields import gpu_memory_utilization, micro_batch_tokens


def status_mapping(
    job: Job, mapping: mapper.DeviceMapping, digest: str, prices: Mapping[str, float]
) -> MappedPlacement:
    """Return `status.mapping` for a mapping.

    digest: its inputHash; prices: price of a GPU for an hour, by GPU type.
    """
    on_gpus, slots = mapping.device == "GPU", sum(pool.size for pool in mapping.pools)
    prediction = mapping.prediction if on_gpus else None
    roles: tuple[PlacedRole, ...] = _only(mapping.sizes, PlacedRole)
    has_price = on_gpus and all(pool.gpu in prices for pool in mapping.pools)
    pools = tuple(
        MappedPool(
            name=pool.name,
            models=_only(pool.models, PoolRole),
            nodes=len(pool.slots_per_machine),
            slots_per_node=max(pool.slots_per_machine),
            gpu=pool.gpu or None if on_gpus else None,
            zones=pool.zones or None,
        )
        for pool in mapping.pools
    )
    return MappedPlacement(
        input_hash=digest,
        device=mapping.device,
        slots=slots,
        gpus=slots if on_gpus else 0,
        price_per_hour=sum(pool.size * prices[pool.gpu] for pool in mapping.pools) if has_price else None,
        pools=pools,
        sizes=tuple(_sizes(job, role, mapping.sizes, prediction) for role in roles),
        gpu_memory_utilization=(
            gpu_memory_utilization(job, prediction) if prediction else job.spec.rollout.gpu_memory_utilization
        ),
        micro_batch_tokens=micro_batch_tokens(job, map(prediction.models.__getitem__, roles)) if prediction else None,
        predicted_step_seconds=mapping.prediction.step_seconds if mapping.prediction else None,
        predicted_tokens_per_second=mapping.prediction.tokens_per_second if mapping.prediction else None,
    )


def _only(roles: Iterable[Role], kind: Any) -> tuple[Any, ...]:
    """Return those roles that are values of a Literal type."""
    return tuple(role for role in roles if role in get_args(kind))


def _sizes(
    job: Job, role: PlacedRole, mapped_sizes: Mapping[Role, ParallelSizes], prediction: mapper.Prediction | None
) -> MappedSizes:
    """Parallel sizes of one model; for the actor also those of its generator, perhaps in another pool."""
    generator: tuple[int | None, int | None] = (None, None)
    if role == "actor" and not (job.spec.algorithm.offline or job.generates_elsewhere):
        own, rollout = mapped_sizes[role], mapped_sizes.get("rollout")
        generator = (rollout.pipeline, rollout.tensor) if rollout else (own.generation_pipeline, own.generation_tensor)
    model, mapped = job.models()[role], prediction.models[role] if prediction else None
    mapper_decides = model.optimizer is not None and model.gradient_checkpointing is None
    document = {
        "role": role,
        "offload": mapped.offload if mapped and model.offload == "None" else None,
        "gradient_checkpointing": mapped.recomputes if mapped and mapper_decides else None,
        **asdict(mapped_sizes[role]),
        "generation_pipeline": generator[0],
        "generation_tensor": generator[1],
    }
    return MappedSizes.model_validate(document, by_name=True)
