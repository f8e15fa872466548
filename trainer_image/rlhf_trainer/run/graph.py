"""The graph of a job's step: which worker lives on which pool, and what the algorithm's listing calls on them."""

from __future__ import annotations

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.custom_algorithm import own_line
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping, MappedPool
from rlhf_planning.step_graph import Graph
from rlhf_trainer.controller.graph import ModelLocation, ShapeFuture, Tracer
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.fields import Width
from rlhf_trainer.run.assembly import (
    data_of,
    helpers_of,
    inputs_of,
    stand_ins,
    training_batch,
    worker_of,
)
from rlhf_trainer.telemetry import ENDPOINTS
from rlhf_trainer.workers.keeper import RolloutKeeper


def graph_of(job: Job, placed: DeviceMapping) -> Graph:
    """One step of a job on these pools, the loading of its batch included; nothing runs.

    Columns count no bytes, nor do fields of own workers. UserCodeError for an own algorithm whose step cannot be.
    """
    try:
        return _recorded(job, placed)
    except Exception as error:
        if not job.spec.algorithm.is_own:
            raise
        what = error.args[0] if isinstance(error, KeyError) else error  # the text of a KeyError is in quotes
        line = own_line(error, job.spec.algorithm.step)
        raise UserCodeError(f"{job.name}: spec.algorithm.entrypoint: {what}{line}") from error


def _recorded(job: Job, placed: DeviceMapping) -> Graph:
    data = job.spec.data
    text = data.max_prompt_tokens + data.max_response_tokens
    widths = {Width.ONE: 1, Width.BYTES: 0, Width.PROMPT: data.max_prompt_tokens, Width.TEXT: text}
    algorithm, tracer = job.spec.algorithm, Tracer(rows=job.sequences_per_step, widths=widths)
    workers: dict[str, type] = {"data": data_of(job), **helpers_of(job)}
    home = next(pool for pool in placed.pools if job.saved in pool.models)
    pools: dict[str, MappedPool] = {role: pool for pool in placed.pools for role in pool.models}
    roles: tuple[Role, ...] = (*job.models(), *(("reward",) if job.has_reward else ()))
    roles += ("rollout",) if job.generates_apart else ()
    workers |= {"rollouts": RolloutKeeper} if job.spec.rollout.keep else {}
    workers |= {role: worker_of(job, role, pools.get(role, home).models) for role in roles}
    places = {name: _place(placed, name, pools.get(name, home)) for name in workers}
    if job.generates_elsewhere:
        places["rollout"] = ModelLocation(pool=ENDPOINTS, layout=ParallelSizes(data=1))
    models = {name: tracer.model(name, each, places[name]) for name, each in workers.items()}
    models |= stand_ins(job, models)
    batch = training_batch(job, models.pop("data"), ShapeFuture())
    algorithm.step(batch, **inputs_of(job, models))
    return tracer.graph()


def _place(placed: DeviceMapping, worker: str, pool: MappedPool) -> ModelLocation:
    """Where a worker lives; one that holds no model is data-parallel on its pool."""
    sizes = {str(role): each for role, each in placed.sizes.items()}.get(worker)
    return ModelLocation(pool=pool.name, layout=sizes or ParallelSizes(data=pool.size))
