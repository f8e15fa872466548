"""What the steps of an attempt took, beside what the mapper says of the placement that it has."""

from __future__ import annotations

from dataclasses import replace

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, Measured, MeasuredPhase, Pace
from rlhf_mapper.mapping import PLACED_WITH, DeviceMapping, MappedPool
from rlhf_mapper.place import generating
from rlhf_operator.placement.ask_mapper import predict_placed
from rlhf_operator.placement.capacity import Capacity, capacity_for
from rlhf_operator.placement.past import Past, lengths, models_digest
from rlhf_operator.placement.shapes import shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


def measured(
    job: Job, have: MappedPlacement, pace: Pace, step: int, snapshot: Snapshot, settings: Settings
) -> Measured:
    """The pace of an attempt with this mapping after a step; without phases where nothing can be predicted."""
    told = Measured(step=step, step_seconds=pace.step_seconds, response_tokens=pace.response_tokens)
    answer = predicted(job, have, snapshot, settings, Past(responses=lengths(job, pace.response_tokens)))
    if answer is None or answer.prediction is None:
        return told
    says = answer.prediction.phases
    phases = tuple(
        MeasuredPhase(phase=each.phase, seconds=each.seconds, predicted_seconds=says[each.phase])
        for each in pace.phases
        if says.get(each.phase)
    )
    models = models_digest(job, shapes_of(job, snapshot).known, have.device)
    gpus = {pool.gpu for pool in answer.pools}
    return told.model_copy(update={"models": models, "gpus": tuple(sorted(gpus)), "phases": phases})


def predicted(
    job: Job, have: MappedPlacement, snapshot: Snapshot, settings: Settings, past: Past | None = None
) -> DeviceMapping | None:
    """A mapping of the status with its prediction, by this past or by all that is known; None where there is none."""
    try:
        shapes, capacity = shapes_of(job, snapshot), capacity_for(job, snapshot, settings)
        if shapes.why_unknown:
            return None
        past = past or Past.of(job, shapes.known, have.device, snapshot)
        used = _used(capacity, have, settings)
        answer = predict_placed(job, _placed(job, have), shapes.known, past, used, settings)
    except Exception:  # noqa: BLE001 - a fault of the mapper is no reason to look after the attempt no longer
        return None
    return answer if isinstance(answer, DeviceMapping) else None


def _used(capacity: Capacity, have: MappedPlacement, settings: Settings) -> Capacity:
    """The machines whose type of GPU a mapping uses."""
    types = {pool.gpu for pool in have.pools}
    used = (each for each in capacity.machines if (gpu := settings.gpu_of(each.product)) and gpu.name in types)
    return capacity if types == {None} else replace(capacity, machines=tuple(used))


def _placed(job: Job, have: MappedPlacement) -> DeviceMapping:
    """A mapping of the status as the mapper describes one."""
    others = {role: home for role, home in PLACED_WITH.items() if role in job.models()}
    pools = tuple(
        MappedPool(
            name=pool.name,
            models=(*pool.models, *(role for role, home in others.items() if home in pool.models)),
            slots_per_machine=(pool.slots_per_node,) * pool.nodes,
            gpu=pool.gpu or "",
            zones=pool.zones or (),
        )
        for pool in have.pools
    )
    sizes: dict[Role, ParallelSizes] = {}
    for each in have.sizes:
        generation = (each.generation_pipeline or 0, each.generation_tensor or 0)
        apart = next((pool for pool in pools if each.role == "actor" and "rollout" in pool.models), None)
        if apart:
            sizes["rollout"] = generating(*generation, apart.size)
            generation = (0, 0)
        sizes[each.role] = each.over(0, generation_pipeline=generation[0], generation_tensor=generation[1])
    return DeviceMapping(
        device=have.device, pools=pools, sizes=sizes | {role: sizes[home] for role, home in others.items()}
    )
