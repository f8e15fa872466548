"""Graph of a job's step: the calls that the algorithm's `step` makes, each on the pool of its worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.custom_algorithm import own_line
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.step_graph import Call, Graph
from rlhf_trainer.controller.graph import ShapeFuture, Tracer
from rlhf_trainer.controller.worker_spec import WorkerSpec
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.expert_rows import ROUTED
from rlhf_trainer.fields import Width
from rlhf_trainer.run.step_models import Scorers, connected, step_models_of
from rlhf_trainer.run.worker_specs import worker_specs
from rlhf_trainer.workers.data import DataShape
from rlhf_trainer.workers.rollout import ROLLOUT_FIELDS


def graph_of(job: Job, placed: DeviceMapping) -> Graph:
    """Return the graph of one step of a job on these pools, with the loading of its batch; nothing runs.

    Data columns, routed experts and fields of the user's own workers count as 0 bytes. UserCodeError if the step of a
    user's own algorithm cannot be recorded.
    """
    try:
        folders: dict[Role, str] = dict.fromkeys(get_args(Role), "")
        no_data = DataShape(rows=0, total_steps=0, evaluation_rows=0, facts=())  # the graph does not depend on it
        return recorded_step(job, placed, worker_specs(job, placed, folders, no_data, path=Path()))
    except Exception as error:
        if not job.spec.algorithm.is_own:
            raise
        what = error.args[0] if isinstance(error, KeyError) else error  # the text of a KeyError is in quotes
        line = own_line(error, job.spec.algorithm.step)
        raise UserCodeError(f"{job.name}: spec.algorithm.entrypoint: {what}{line}") from error


def recorded_step(job: Job, placed: DeviceMapping, specs: Mapping[str, Mapping[str, WorkerSpec]]) -> Graph:
    """Return the graph of one step with these workers, pool -> role -> spec."""
    data = job.spec.data
    text = data.max_prompt_tokens + data.max_response_tokens
    widths = {Width.ONE: 1, Width.BYTES: 0, Width.PROMPT: data.max_prompt_tokens, Width.TEXT: text, Width.EXPERTS: 0}
    widths[Width.TOKENS] = 2 * text * (getattr(job.spec.algorithm, "top_k", None) or 0)
    tracer = Tracer(rows=job.sequences_per_step, widths=widths)
    slots = {pool.name: pool.size for pool in placed.pools}
    handles = {
        role: tracer.model(role, spec, pool, spec.layout or ParallelSizes(data=slots.get(pool, 1)))
        for pool, workers in specs.items()
        for role, spec in workers.items()
    }
    models = connected(job, handles)
    job.spec.algorithm.step(models["data"].load_batch(ShapeFuture()), **step_models_of(job, models))
    return tracer.graph()


def scorers_of(graph: Graph) -> Scorers:
    """Return for each generating call of a step the calls (model, method) that can score responses while it generates.

    Such a call runs in another pool, row by row. The newest call whose results it reads is the generating call.
    """
    scorers = []
    for made in (call for call in graph.calls if call.in_groups):
        names = [call.name.partition(".") for call in graph.calls if _may_begin(graph, call, made)]
        scorers.append([(model, method) for model, _, method in names])
    return scorers


def _may_begin(graph: Graph, call: Call, made: Call) -> bool:
    if not call.row_by_row or call.arguments or call.pool == made.pool:
        return False
    read = [edge for edge in graph.edges if edge.consumer == call.number]
    newest = max(read, key=lambda edge: edge.producer, default=None)
    if newest is None or newest.producer != made.number:
        return False
    return all(field.name == field.added_as and field.name in (*ROLLOUT_FIELDS, ROUTED) for field in newest.fields)
