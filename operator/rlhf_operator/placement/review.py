"""Comparison of the measured steps of an attempt with the prediction of its placement."""

from dataclasses import replace

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_api.status import MappedPlacement, Measured, MeasuredPhase, Pace
from rlhf_mapper.mapping import PLACED_WITH, DeviceMapping
from rlhf_mapper.place import generating, pool_of
from rlhf_operator.placement.ask_mapper import Past, lengths, models_digest, predict_placed
from rlhf_operator.placement.capacity import capacity_for
from rlhf_operator.placement.shapes import shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


def measure_pace(
    job: Job, current: MappedPlacement, pace: Pace, step: int, snapshot: Snapshot, settings: Settings
) -> Measured:
    """Return the measured pace of an attempt at a step, with measured and predicted seconds of each predicted phase."""
    report = Measured(step=step, step_seconds=pace.step_seconds, response_tokens=pace.response_tokens)
    answer = predicted(job, current, snapshot, settings, Past(responses=lengths(job, pace.response_tokens)))
    if answer is None or answer.prediction is None:
        return report
    predicted_seconds = answer.prediction.phases
    phases = tuple(
        MeasuredPhase(phase=each.phase, seconds=each.seconds, predicted_seconds=predicted_seconds[each.phase])
        for each in pace.phases
        if predicted_seconds.get(each.phase)
    )
    models = models_digest(job, shapes_of(job, snapshot).known, current.device)
    gpus = {pool.gpu for pool in answer.pools}
    return report.model_copy(update={"models": models, "gpus": tuple(sorted(gpus)), "phases": phases})


def predicted(
    job: Job, current: MappedPlacement, snapshot: Snapshot, settings: Settings, past: Past | None = None
) -> DeviceMapping | None:
    """Return a mapping with its prediction; None without one. past: measurements that correct it; None: all known."""
    try:
        shapes, capacity = shapes_of(job, snapshot), capacity_for(job, snapshot, settings)
        if shapes.why_unknown:
            return None
        past = past or Past.of(job, shapes.known, current.device, snapshot)
        types = {pool.gpu for pool in current.pools}
        if types != {None}:  # only machines of the mapping's GPU types
            known = ((each, settings.gpu_of(each.product)) for each in capacity.machines)
            capacity = replace(capacity, machines=tuple(each for each, gpu in known if gpu and gpu.name in types))
        answer = predict_placed(job, _placed(job, current), shapes.known, past, capacity, settings)
    except Exception:  # noqa: BLE001 - a fault of the mapper must not stop the attempt
        return None
    return answer if isinstance(answer, DeviceMapping) else None


def _placed(job: Job, current: MappedPlacement) -> DeviceMapping:
    """Convert a mapping of the status to a mapping of the mapper, without a prediction."""
    pools = tuple(replace(pool_of(pool, job), gpu=pool.gpu or "", zones=pool.zones or ()) for pool in current.pools)
    rollout_pool = next((pool for pool in pools if "rollout" in pool.models), None)
    sizes: dict[Role, ParallelSizes] = {}
    for each in current.sizes:
        pipeline, tensor = each.generation_pipeline or 0, each.generation_tensor or 0
        if each.role == "actor" and rollout_pool:
            sizes["rollout"] = generating(pipeline, tensor, rollout_pool.size)
            pipeline = tensor = 0
        sizes[each.role] = each.over(0, generation_pipeline=pipeline, generation_tensor=tensor)
    sizes |= {role: sizes[host] for role, host in PLACED_WITH.items() if role in job.models()}
    return DeviceMapping(device=current.device, pools=pools, sizes=sizes)
