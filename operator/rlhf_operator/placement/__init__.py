"""Decides where the models of a job will live: asks the auto-mapper about the nodes that there are.

It reads nothing but the snapshot and the config.json of models that come with an installed package. What a pod of the
job has read of other models is in the snapshot's status.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

from rlhf_api.job import Job
from rlhf_api.names import PlacedRole, PoolRole, Role
from rlhf_api.problems import SpecError
from rlhf_api.spec.custom_algorithm import Custom
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, MappedPool, MappedSizes
from rlhf_mapper.mapping import DeviceMapping, Prediction
from rlhf_operator.placement.ask_mapper import NoPlaceError, Wanted, have_room, map_auto, map_manual
from rlhf_operator.placement.capacity import Capacity, capacity_for, prices_of
from rlhf_operator.placement.review import predicted
from rlhf_operator.placement.shapes import UnknownShapeError, origins_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot
from rlhf_planning.mapped_fields import gpu_memory_utilization, micro_batch_tokens

Reason = Literal["Mapped", "ManualPlacement", "ShapesUnknown", "NoFeasiblePlacement", "InvalidPlacement", "MapperError"]
FORMAT = 1
"""Of what input_hash covers; another one makes every job be mapped anew on its next attempt."""
WORSE = 1.15
"""A step that takes so many times as long as with another placement is worth a new attempt."""


@dataclass(frozen=True, kw_only=True)
class MappingResult:
    """What the mapper said of a job, for the status and the condition Mapped."""

    mapping: MappedPlacement | None
    """None where there is no place; the message says what would do."""
    reason: Reason
    message: str


def map_job(
    job: Job, snapshot: Snapshot, settings: Settings, *, as_large_as: MappedPlacement | None = None
) -> MappingResult:
    """Where the models of a job would live if an attempt began now; with no more nodes than `as_large_as` has."""
    if type(job.spec.algorithm) is Custom:
        message = "no pod of the job has read its algorithm, so its models are not known"
        return MappingResult(mapping=None, reason="ShapesUnknown", message=message)
    digest = input_hash(job, snapshot, settings)
    if as_large_as is not None:
        job = _no_larger(job, sum(pool.nodes for pool in as_large_as.pools))
    try:
        capacity = capacity_for(job, snapshot, settings)
        by_hand = job.spec.placement.mode == "Manual"
        answer, why_unpredicted = (map_manual if by_hand else map_auto)(job, capacity, snapshot, settings)
        mapping = _status_mapping(job, answer, digest, prices_of(capacity.machines, settings))
    except NoPlaceError as error:
        return MappingResult(mapping=None, reason="NoFeasiblePlacement", message=str(error))
    except UnknownShapeError as error:
        return MappingResult(mapping=None, reason="ShapesUnknown", message=str(error))
    except SpecError as error:
        message = "; ".join(str(problem).removeprefix(f"{job.name}: ") for problem in error.problems)
        return MappingResult(mapping=None, reason="InvalidPlacement", message=message)
    except Exception as error:  # noqa: BLE001 - a fault in here is one job's trouble, not the operator's
        return MappingResult(mapping=None, reason="MapperError", message=f"{type(error).__name__}: {error}"[:1000])
    reason: Reason = "ManualPlacement" if by_hand else "ShapesUnknown" if why_unpredicted else "Mapped"
    return MappingResult(mapping=mapping, reason=reason, message=_message(answer, capacity, why_unpredicted))


def _no_larger(job: Job, nodes: int) -> Job:
    """The job with a smaller spec.resources.maxNodes, where that is more."""
    resources = job.spec.resources
    if resources.max_nodes is None or resources.max_nodes <= nodes:
        return job
    smaller = resources.model_copy(update={"max_nodes": max(nodes, resources.nodes)})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": smaller})})


def input_hash(job: Job, snapshot: Snapshot, settings: Settings) -> str:
    """Digest of what the mapping depends on besides the nodes: of the spec and the origins of the models.

    What is read of a URI and revision is read once, and so does not change.
    """
    spec = job.spec
    matters = {
        "format": FORMAT,
        "spec": {
            name: getattr(spec, name).model_dump(mode="json", exclude={"remap"})
            for name in ("algorithm", "models", "data", "rollout", "training", "resources", "placement")
        },
        "worker": spec.runtime.worker.memory or settings.worker.memory,
        "origins": {
            role: model.model_dump(mode="json", include={"uri", "revision", "shape"})
            for role, model in origins_of(job, snapshot).items()
        },
    }
    return hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()[:32]


def still_fits(job: Job, have: MappedPlacement, snapshot: Snapshot, settings: Settings) -> bool:
    """Whether a mapping can be kept: its spec and models are as they were, and the nodes of today have room for it."""
    capacity = capacity_for(job, snapshot, settings)
    if have.input_hash != input_hash(job, snapshot, settings) or have.device != capacity.device:
        return False
    if have.device == "CPU" or not capacity.nodes_known:  # one node may have several worker pods
        return bool(capacity.machines)
    anywhere = None if job.spec.placement.mode == "Manual" else ""
    wanted = [
        Wanted(nodes, pool.slots_per_node, pool.gpu, zone if pool.gpu else None)
        for pool in have.pools
        for zone, nodes in Counter(pool.zones or (anywhere,) * pool.nodes).items()
    ]
    return have_room(capacity, wanted, settings)


def better(job: Job, have: MappedPlacement, snapshot: Snapshot, settings: Settings) -> str:
    """The fastest placement of today, in words; empty if by what was measured it is not much faster than this one."""
    asked = job.spec.placement
    if asked.mode == "Manual" or asked.objective != "throughput" or not still_fits(job, have, snapshot, settings):
        return ""
    mapped, now = map_job(job, snapshot, settings), predicted(job, have, snapshot, settings)
    seconds = mapped.mapping.predicted_step_seconds if mapped.mapping else None
    if not (seconds and now and now.prediction and now.prediction.step_seconds > WORSE * seconds):
        return ""
    return f"{mapped.message}, instead of {now.prediction.step_seconds:.3g} s"


def _message(answer: DeviceMapping, capacity: Capacity, why_unpredicted: str) -> str:
    pools = "; ".join(f"pool {pool.name}: {answer.described(pool)}" for pool in answer.pools) + capacity.note
    unseen = "" if capacity.nodes_known else "; the nodes are not known, spec.resources was believed"
    if why_unpredicted:
        return f"{pools}{unseen}; not predicted: {why_unpredicted}"
    assert answer.prediction, "the mapper was asked"
    corrected = " (corrected by measured steps)" * bool(answer.prediction.correction)
    return f"{pools}{unseen}; a step is predicted to take {answer.prediction.step_seconds:.3g} s{corrected}"


def _status_mapping(job: Job, mapping: DeviceMapping, digest: str, prices: Mapping[str, float]) -> MappedPlacement:
    """`status.mapping`: a mapping without the details that only `rlhf plan` shows.

    digest: its inputHash; prices: of a GPU for an hour, by type.
    """
    prediction = mapping.prediction
    on_gpus = prediction if mapping.device == "GPU" else None
    slots = sum(pool.size for pool in mapping.pools)
    models = tuple(cast("PlacedRole", role) for role in mapping.sizes if role in get_args(PlacedRole))
    is_priced = mapping.device == "GPU" and all(pool.gpu in prices for pool in mapping.pools)
    return MappedPlacement(
        input_hash=digest,
        device=mapping.device,
        slots=slots,
        gpus=slots if mapping.device == "GPU" else 0,
        price_per_hour=sum(pool.size * prices[pool.gpu] for pool in mapping.pools) if is_priced else None,
        pools=tuple(
            MappedPool(
                name=pool.name,
                models=_pool_roles(pool.models),
                nodes=len(pool.slots_per_machine),
                slots_per_node=max(pool.slots_per_machine),
                gpu=pool.gpu or None if mapping.device == "GPU" else None,
                zones=pool.zones or None,
            )
            for pool in mapping.pools
        ),
        sizes=tuple(_sizes(job, role, mapping.sizes, on_gpus) for role in models),
        gpu_memory_utilization=(
            gpu_memory_utilization(job, on_gpus) if on_gpus else job.spec.rollout.gpu_memory_utilization
        ),
        micro_batch_tokens=micro_batch_tokens(job, map(on_gpus.models.__getitem__, models)) if on_gpus else None,
        predicted_step_seconds=prediction.step_seconds if prediction else None,
        predicted_tokens_per_second=prediction.tokens_per_second if prediction else None,
    )


def _pool_roles(roles: tuple[Role, ...]) -> tuple[PoolRole, ...]:
    """Without those that come with another."""
    return tuple(cast("PoolRole", role) for role in roles if role in get_args(PoolRole))


def _sizes(
    job: Job, role: PlacedRole, mapped_sizes: Mapping[Role, ParallelSizes], prediction: Prediction | None
) -> MappedSizes:
    """Of a model; the actor's generator may be in another pool."""
    sizes, generation = mapped_sizes[role], dict[str, int | None](generation_pipeline=None, generation_tensor=None)
    if role == "actor" and not (job.spec.algorithm.offline or job.generates_elsewhere):
        apart = mapped_sizes.get("rollout")
        pipeline, tensor = (sizes.generation_pipeline, sizes.generation_tensor)
        if apart:
            pipeline, tensor = apart.pipeline, apart.tensor
        generation = {"generation_pipeline": pipeline, "generation_tensor": tensor}
    model, mapped = job.models()[role], prediction.models[role] if prediction else None
    offload = mapped.offload if mapped and model.offload == "None" else None
    is_open = model.optimizer is not None and model.gradient_checkpointing is None
    again = mapped.recomputes if mapped and is_open else None
    document = {"role": role, "offload": offload, "gradient_checkpointing": again, **asdict(sizes), **generation}
    return MappedSizes.model_validate(document, by_name=True)
