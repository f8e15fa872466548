"""Placement of a job's models: asks the auto-mapper about a snapshot's nodes, and reviews an existing mapping.

Inputs are the snapshot and each config.json of an installed package. The status in the snapshot holds the shapes that
pods of the job have read.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rlhf_api.job import Job
from rlhf_api.names import PlacedRole, PoolRole, Role
from rlhf_api.problems import SpecError
from rlhf_api.spec.custom_algorithm import Custom
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_api.status import MappedPlacement, MappedPool, MappedSizes
from rlhf_mapper.mapping import DeviceMapping, Prediction
from rlhf_operator.placement.ask_mapper import NoPlaceError, PodRequest, have_room, map_auto, map_manual
from rlhf_operator.placement.capacity import Capacity, capacity_for, counted, has_gpus, price_per_hour, unusable_gpus
from rlhf_operator.placement.review import predicted
from rlhf_operator.placement.shapes import UnknownShapeError, origins_of, shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot
from rlhf_planning.job_plan import gpu_memory_utilization, micro_batch_tokens
from rlhf_planning.timeline import interval_text, seconds_text

MappingReason = Literal[
    "Mapped",
    "ManualPlacement",
    "ShapesUnknown",
    "GPUNodesUnusable",
    "NoFeasiblePlacement",
    "InvalidPlacement",
    "MapperError",
]
HASH_FORMAT = 1
"""Version of the fields that `input_hash` covers; after a change the next attempt of every job is mapped anew."""
MIN_SLOWDOWN = 1.15
"""Smallest ratio of predicted step seconds, current to another placement, for which a new attempt is worthwhile."""


MAX_CPU_PARAMETERS = 100e6
"""Most parameters of all models of a job with `device: Auto` that runs on CPU slots because no node has GPUs."""
AUTO_REMEDY = (
    f"device Auto takes CPU slots for up to {MAX_CPU_PARAMETERS / 1e6:.0f} million parameters; add nodes with GPUs, "
    "name those that an autoscaler may add in cluster.nodeGroups of the chart, or set spec.resources.device to CPU"
)


class GpuNodesUnusableError(NoPlaceError):
    """The cluster has GPUs, and a job can use none of them; the message says why."""


@dataclass(frozen=True, kw_only=True)
class MappingResult:
    """The mapper's answer for a job, as the status and the condition Mapped report it."""

    mapping: MappedPlacement | None
    """Placement as in status.mapping; None if there is none: `message` then says what would help."""
    reason: MappingReason
    message: str
    answer: DeviceMapping | None = None
    """Placement as the mapper has it, with the prediction of a step; None if `mapping` is None."""


def map_job(job: Job, snapshot: Snapshot, settings: Settings, *, most_nodes: int | None = None) -> MappingResult:
    """Return the placement of an attempt that would begin now. most_nodes: limit, at least `resources.nodes`."""
    if type(job.spec.algorithm) is Custom:
        message = "no pod of the job has read its algorithm, so its models are not known"
        return MappingResult(mapping=None, reason="ShapesUnknown", message=message)
    digest, resources = input_hash(job, snapshot, settings), job.spec.resources
    if most_nodes is not None and resources.max_nodes is not None:
        most = min(max(most_nodes, resources.nodes), resources.max_nodes)
        job = job.changed(resources={"max_nodes": most})
    try:
        return _mapped(job, snapshot, settings, digest)
    except NoPlaceError as error:
        reason: MappingReason = "GPUNodesUnusable" if type(error) is GpuNodesUnusableError else "NoFeasiblePlacement"
        return MappingResult(mapping=None, reason=reason, message="; ".join((str(error), *snapshot.unusable_groups)))
    except UnknownShapeError as error:
        return MappingResult(mapping=None, reason="ShapesUnknown", message=str(error))
    except SpecError as error:
        message = "; ".join(str(problem).removeprefix(f"{job.name}: ") for problem in error.problems)
        return MappingResult(mapping=None, reason="InvalidPlacement", message=message)
    except Exception as error:  # noqa: BLE001 - a fault in the mapper must stop one job only, not the operator
        return MappingResult(mapping=None, reason="MapperError", message=f"{type(error).__name__}: {error}"[:1000])


def _mapped(job: Job, snapshot: Snapshot, settings: Settings, digest: str) -> MappingResult:
    """Return the mapping of a job with its message. Raises NoPlaceError, UnknownShapeError and SpecError."""
    capacity = capacity_for(job, snapshot, settings)
    if not capacity.nodes_known and job.spec.resources.device == "Auto":
        raise NoPlaceError("the operator may not read nodes: write spec.resources.device, CPU or GPU")
    _require_gpus(job, capacity, snapshot, settings)
    is_manual = job.spec.placement.mode == "Manual"
    answer, why_unpredicted = (map_manual if is_manual else map_auto)(job, capacity, snapshot, settings)
    pools = "; ".join(f"pool {pool.name}: {answer.described(pool)}" for pool in answer.pools) + capacity.note
    unseen = "" if capacity.nodes_known else "; the nodes are not known, spec.resources was believed"
    if capacity.device == "CPU" and job.spec.resources.device == "Auto":
        unseen = "; on CPU slots, as no node has GPUs"
    if (pool := next((each for each in job.spec.placement.pools if each.max_nodes), None)) and not snapshot.in_line:
        count = counted(pool.nodes, "node")
        unseen += f"; pool {pool.name} stays at {count}: elastic pools grow in the operator's line only"
    prediction = f"not predicted: {why_unpredicted}" if why_unpredicted else _predicted_step(job, answer.prediction)
    return MappingResult(
        mapping=_status_mapping(job, answer, digest, price_per_hour(answer, capacity.machines, settings)),
        reason="ManualPlacement" if is_manual else "ShapesUnknown" if why_unpredicted else "Mapped",
        message=f"{pools}{unseen}; {prediction}",
        answer=answer,
    )


def _predicted_step(job: Job, prediction: Prediction | None) -> str:
    """Return how long a step is predicted to take. Raises NoPlaceError if the trainer would be stopped as hung."""
    assert prediction, "the mapper was asked"
    corrected = ", corrected by measured steps" * bool(prediction.correction)
    step = interval_text(prediction.step_seconds, prediction.low, prediction.high)
    text = f"a step is predicted to take {step}{corrected}"
    if prediction.step_seconds > (deadline := job.spec.run_policy.progress_deadline):
        raise NoPlaceError(f"{text}, longer than spec.runPolicy.progressDeadlineSeconds, {deadline} s")
    return text


def _require_gpus(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> None:
    """Raise NoPlaceError if a job should have GPUs, and no node has GPUs that it can use."""
    asked = job.spec.resources.device
    if asked == "CPU" or not capacity.nodes_known or has_gpus(job, snapshot, settings):
        return
    if unusable := unusable_gpus(job, snapshot, settings):
        raise GpuNodesUnusableError(f"no node with GPUs is usable: {unusable}; or set spec.resources.device to CPU")
    shapes = shapes_of(job, snapshot)
    if asked == "Auto" and (total := sum(shapes.parameters.values())) > MAX_CPU_PARAMETERS:
        size = f"the models have {total / 1e6:,.0f} million parameters in all"
        raise NoPlaceError(f"no node has GPUs, and {size}; {AUTO_REMEDY}")
    if asked == "Auto" and shapes.why_unknown:
        raise UnknownShapeError(f"no node has GPUs, and {shapes.why_unknown}; {AUTO_REMEDY}")


def _status_mapping(job: Job, mapping: DeviceMapping, digest: str, price: float | None) -> MappedPlacement:
    """Return `status.mapping` for a mapping. digest: inputHash; price: price of its GPUs for an hour."""
    on_gpus, slots = mapping.device == "GPU", sum(pool.size for pool in mapping.pools)
    prediction = mapping.prediction if on_gpus else None
    compresses = job.spec.training.gradient_compression == "Auto" and mapping.compresses_gradients(job)
    roles: tuple[PlacedRole, ...] = _only(mapping.sizes, PlacedRole)
    most = {pool.name: pool.max_nodes for pool in job.spec.placement.pools}
    pools = tuple(
        MappedPool(
            name=pool.name,
            models=_only(pool.models, PoolRole),  # without models that are always in another model's pool
            nodes=len(pool.slots_per_machine),
            max_nodes=most.get(pool.name),
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
        gpus=slots * on_gpus,
        price_per_hour=price,
        pools=pools,
        sizes=tuple(_mapped_sizes(job, role, mapping, prediction) for role in roles),
        gpu_memory_utilization=(
            gpu_memory_utilization(job, prediction) if prediction else job.spec.rollout.gpu_memory_utilization
        ),
        micro_batch_tokens=micro_batch_tokens(job, map(prediction.models.__getitem__, roles)) if prediction else None,
        gradient_compression="TopK" if compresses else None,
        predicted_step_seconds=mapping.prediction.step_seconds if mapping.prediction else None,
        predicted_step_seconds_low=mapping.prediction.low if mapping.prediction else None,
        predicted_step_seconds_high=mapping.prediction.high if mapping.prediction else None,
    )


def _only(roles: Iterable[Role], kind: Any) -> tuple[Any, ...]:
    """Return the roles that are values of `kind`, a Literal type."""
    return tuple(role for role in roles if role in get_args(kind))


def _mapped_sizes(job: Job, role: PlacedRole, mapping: DeviceMapping, prediction: Prediction | None) -> MappedSizes:
    """Return a model's parallel sizes for status.mapping; for the actor also the sizes of its generation."""
    generator: tuple[int | None, int | None] = (None, None)
    if role == "actor" and not (job.spec.algorithm.offline or job.generates_elsewhere):
        own, rollout = mapping.sizes[role], mapping.sizes.get("rollout")
        generator = (rollout.pipeline, rollout.tensor) if rollout else (own.generation_pipeline, own.generation_tensor)
    model, mapped = job.models()[role], prediction.models[role] if prediction else None
    mapper_decides = model.optimizer is not None and model.gradient_checkpointing is None
    document = {
        "role": role,
        "offload": mapped.offload if mapped and model.offload == "None" else None,
        "gradient_checkpointing": mapped.recomputes if mapped and mapper_decides else None,
        **{name: size for name, size in asdict(mapping.sizes[role]).items() if name in Parallelism.model_fields},
        "generation_pipeline": generator[0],
        "generation_tensor": generator[1],
    }
    return MappedSizes.model_validate(document, by_name=True)


def input_hash(job: Job, snapshot: Snapshot, settings: Settings) -> str:
    """Return a digest of the mapper's inputs besides the nodes: parts of the spec and the origins of the models.

    The shape of a model with a URI and a revision is read once, so it cannot change.
    """
    spec = job.spec
    inputs = {
        "format": HASH_FORMAT,
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
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def still_fits(job: Job, current: MappedPlacement, snapshot: Snapshot, settings: Settings) -> bool:
    """Whether a mapping can be kept: spec and models are unchanged, and the nodes have room for it now."""
    capacity = capacity_for(job, snapshot, settings)
    if current.input_hash != input_hash(job, snapshot, settings) or current.device != capacity.device:
        return False
    if current.device == "CPU" or not capacity.nodes_known:  # one node may run several worker pods
        return bool(capacity.machines)
    any_zone = None if job.spec.placement.mode == "Manual" else ""
    requests = [
        PodRequest(nodes, pool.slots_per_node, pool.gpu, zone if pool.gpu else None)
        for pool in current.pools
        for zone, nodes in Counter(pool.zones or (any_zone,) * pool.nodes).items()
    ]
    return have_room(capacity, requests, settings)


def better(job: Job, current: MappedPlacement, snapshot: Snapshot, settings: Settings) -> str:
    """Return a sentence about a placement that measured steps show to be faster; empty if none is much faster."""
    requested = job.spec.placement
    is_for_speed = requested.mode != "Manual" and requested.objective == "throughput"
    if not is_for_speed or not still_fits(job, current, snapshot, settings):
        return ""
    mapped, now = map_job(job, snapshot, settings), predicted(job, current, snapshot, settings)
    seconds = mapped.mapping.predicted_step_seconds if mapped.mapping else None
    if not (seconds and now and now.prediction and now.prediction.step_seconds > MIN_SLOWDOWN * seconds):
        return ""
    return f"{mapped.message}, instead of {seconds_text(now.prediction.step_seconds)}"
