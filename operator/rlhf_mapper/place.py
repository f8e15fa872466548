"""Placement of a job's models without a search, and the limits that the shape of a model sets to a manifest."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from rlhf_api import status
from rlhf_api.job import Job
from rlhf_api.names import Role, slots_text
from rlhf_api.problems import Problem, SpecError
from rlhf_api.spec.job_spec import Pool
from rlhf_api.spec.parallel_sizes import Parallelism, ParallelSizes
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.mapping import PLACED_WITH, Device, DeviceMapping, MappedPool


def place(job: Job, gpus_per_machine: Sequence[int]) -> DeviceMapping:
    """Place a job's models without a search; a machine may have 0 GPUs. Raises SpecError if the sizes do not fit."""
    device = device_of(job, gpus_per_machine)
    pools = _pools(job, max(gpus_per_machine) if device == "GPU" else 1)
    problems, requested, available = list[Problem](), sum(pool.size for pool in pools), sum(gpus_per_machine)
    if device == "GPU" and requested > available:
        message = f"asks for {slots_text(requested, device)}, but the machines have {available}"
        problems.append(Problem(f"{job.name}: spec.resources", message))
    sizes = {role: _sizes(job, role, pool) for pool in pools for role in pool.models}
    problems += (each for pool in pools for role in pool.models for each in _unplaced(job, role, sizes[role], pool))
    problems += chain.from_iterable(_wrong_batches(job, pool) for pool in pools)
    if problems:
        raise SpecError(problems)
    return DeviceMapping(device=device, pools=pools, sizes=sizes)


def _pools(job: Job, slots: int) -> tuple[MappedPool, ...]:
    """Return the manifest's pools, or one pool of all models; slots: number on a machine, if the manifest sets none."""
    resources = job.spec.resources
    if job.spec.placement.mode != "Manual":
        slots_per_machine = (resources.slots_per_node or slots,) * resources.nodes
        return (MappedPool(name="all", models=tuple(job.models()), slots_per_machine=slots_per_machine),)
    return tuple(pool_of(pool, job) for pool in job.spec.placement.pools)


def pool_of(pool: Pool | status.MappedPool, job: Job) -> MappedPool:
    """Return a pool of a manifest or a status, with the models that are always placed with its models (PLACED_WITH)."""
    return MappedPool(
        name=pool.name,
        models=(*pool.models, *(role for role in job.models() if PLACED_WITH.get(role) in pool.models)),
        slots_per_machine=(pool.slots_per_node,) * pool.nodes,
        allowed_machine_counts=tuple(job.allowed_node_counts(pool)) if (pool.max_nodes or 0) > pool.nodes else (),
    )


def sizes_in(job: Job) -> dict[Role, ParallelSizes]:
    """Return the parallel sizes of each role as far as the manifest has them; an open number of data ranks is 1."""
    one = MappedPool(name="one", models=job.placed_roles(), slots_per_machine=(1,))
    return {role: _sizes(job, role, one) for role in one.models}


def _sizes(job: Job, role: Role, pool: MappedPool) -> ParallelSizes:
    """Return a model's parallel sizes from the manifest; by default data parallelism, and t_g = t in generation."""
    rollout = job.spec.rollout
    if role == "rollout":
        return generating(rollout.pipeline_parallel or 1, rollout.tensor_parallel or 1, pool.size)
    sizes = job.models()[role].parallelism or Parallelism()
    if role == "reference" and job.spec.models.reference is None and "actor" not in pool.models:
        sizes = Parallelism()  # the actor's sizes are for the actor's pool
    if role != "actor" or job.generates_apart:
        return sizes.over(pool.size)
    pipeline, tensor = rollout.pipeline_parallel or 1, rollout.tensor_parallel or 0
    return sizes.over(pool.size, generation_pipeline=pipeline, generation_tensor=tensor)


def generating(pipeline: int, tensor: int, slots: int) -> ParallelSizes:
    """Return the sizes of a pool that only generates: generation engines of p_g t_g slots each, side by side."""
    return ParallelSizes(data=max(1, slots // (pipeline * tensor)), pipeline=pipeline, tensor=tensor)


def _unplaced(job: Job, role: Role, sizes: ParallelSizes, pool: MappedPool) -> Iterator[Problem]:
    """Yield a problem if a model's world size is not the pool's slots, or if replicas or experts do not divide it."""
    path = f"{job.name}: spec.rollout"
    if role != "rollout":
        path = f"{job.name}: spec.models.{job.spec.models.field(role)}.parallelism"
    if sizes.world_size != pool.size:
        yield Problem(path, f"p-t-d {sizes} takes {sizes.world_size} slots, but pool {pool.name} has {pool.size}")
    elif sizes.data % sizes.replicas:
        yield Problem(f"{path}.replicas", f"is {sizes.replicas}, which does not divide the {sizes.data} data ranks")
    elif (ranks := sizes.shards * sizes.tensor) % sizes.expert:
        what = f"does not divide the {ranks} ranks of a copy of a stage (data / replicas * context * tensor)"
        yield Problem(f"{path}.expert", f"is {sizes.expert}, which {what}")


def device_of(job: Job, gpus_per_machine: Sequence[int]) -> Device:
    """Return the device of a job's slots. Raises SpecError if the job requests GPUs and the machines have none."""
    device = job.spec.resources.device
    has_gpus = any(gpus_per_machine)
    if device == "GPU" and not has_gpus:
        raise SpecError([Problem(f"{job.name}: spec.resources.device", "is GPU, but there is no GPU here")])
    if device == "Auto":
        return "GPU" if has_gpus else "CPU"
    return device


def _wrong_batches(job: Job, pool: MappedPool) -> Iterator[Problem]:
    """Yield a problem for each batch size, in sequences or in undivided prompts, that a pool's slots do not divide."""
    training, algorithm = job.spec.training, job.spec.algorithm
    path, slots = f"{job.name}: spec.training", f"the {pool.size} slots of pool {pool.name}"
    sizes = {
        "batchSize": training.batch_size,
        "promptBatchSize": training.prompt_batch_size and job.sequences_per_step,
        "miniBatchSize": None if "rollout" in pool.models else training.mini_batch_size,
    }
    for name, size in sizes.items():
        if size and size % pool.size:
            yield Problem(f"{path}.{name}", f"gives {size} sequences, which do not divide by {slots}")
    if algorithm.chooses_pairs and "actor" in pool.models and job.rows_per_step % pool.size:
        keeps = f"{algorithm.name} keeps the responses to a prompt on one slot"
        yield Problem(f"{path}.promptBatchSize", f"is {job.rows_per_step}, which does not divide by {slots}; {keeps}")


def wrong_sizes(job: Job, role: Role, model: Architecture) -> Iterator[Problem]:
    """Yield a problem for the manifest's parallel sizes that the model's layers, heads or vocabulary do not allow.

    Of `parallelism` only the first wrong size is reported.
    """
    fixed = fixed_sizes(job, role)
    wrong = model.cannot_be_cut(pipeline=fixed.pipeline, tensor=fixed.tensor, expert=fixed.expert) if fixed else None
    shards = job.spec.rollout.tensor_parallel or 1
    if role == "actor" and model.vocabulary % shards:
        message = f"is {shards}, which does not divide the model's vocabulary of {model.vocabulary}"
        yield Problem(f"{job.name}: spec.rollout.tensorParallel", message)
    if wrong:
        yield Problem(f"{job.name}: spec.models.{job.spec.models.field(role)}.parallelism.{wrong[0]}", wrong[1])


def too_long(job: Job, shapes: Mapping[Role, Architecture]) -> Iterator[Problem]:
    """Yield a problem if a model does not read sequences as long as a job that generates may make them."""
    longest, offline = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens, job.spec.algorithm.offline
    for role, model in () if offline else shapes.items():
        if 0 < model.positions < longest:
            uri = job.models()["actor" if role == "rollout" else role].uri
            limit = f"{role}, {uri}, reads {model.positions} tokens at most (max_position_embeddings, with scaled RoPE)"
            yield Problem(f"{job.name}: spec.data", f"maxPromptTokens + maxResponseTokens is {longest}, but {limit}")
            return


def fixed_sizes(job: Job, role: Role) -> Parallelism | None:
    """Return a model's parallel sizes in the manifest; None if unset, for a rollout, or for a reference not in it."""
    if role == "rollout" or (role == "reference" and job.spec.models.reference is None):
        return None
    return job.models()[role].parallelism
