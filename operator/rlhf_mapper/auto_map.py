"""The auto-mapper: Algorithm 1 of HybridFlow over all placements of a job's models in pools, and all pool sizes."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from rlhf_api.job import Job
from rlhf_api.names import Role, slots_text
from rlhf_api.problems import SpecError
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Correction, Software, software_for
from rlhf_mapper.hardware import MAX_GROUPS, Cluster, NodeGroup
from rlhf_mapper.mapping import PLACED_WITH, Device, DeviceMapping, Infeasible, MappedPool
from rlhf_mapper.node_uses import node_uses, nodes_of_pool, sizes_of_pools
from rlhf_mapper.place import fixed_sizes, too_long, wrong_sizes
from rlhf_mapper.pools import MAX_RESULTS, PoolCosts, Simulated
from rlhf_mapper.prediction import cuts_of, prediction_of, rejected_of, simplest_first
from rlhf_mapper.remedies import remedies_of
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.pruned import pruned
from rlhf_mapper.search.tables import Found
from rlhf_mapper.simulate import layer, memory, overlap
from rlhf_mapper.strategy import ModelRequest, Setting
from rlhf_mapper.workload import Work, Workload, workload_of

MAX_PLACEMENTS = 4
"""Number of placements that a search returns: the best, and three others to compare with."""
MAX_NODES = 4096
"""Largest number of nodes to try in the search for the smallest cluster on which a job fits."""
MAX_SIMULATED = 8
"""Number of mapping problems whose simulation results a process caches for searches on other clusters."""
ONE = Architecture(layers=1, hidden=1, heads=1, kv_heads=1, head_size=1, ffn=1, vocabulary=1)
"""Tiny model by which the state bytes per parameter are computed, since these are the same for every model."""


@lru_cache(maxsize=MAX_SIMULATED)
def _simulated(_: str) -> Simulated:
    """Return the cache of simulation results of the mapping problem with this `repr`, for all clusters."""
    return Simulated()


@dataclass(frozen=True, kw_only=True)
class MappingProblem:
    """Input of the mapper: the models of a job, their work in a step, and the software that does the work."""

    requests: Mapping[Role, ModelRequest]
    load: Workload
    software: Software
    correction: Correction
    simulated: Simulated = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Take the results of earlier searches of an equal problem; the text of a problem holds all its inputs."""
        object.__setattr__(self, "simulated", _simulated(repr(self)))
        if max(map(len, vars(self.simulated).values())) > MAX_RESULTS:
            self.simulated.clear()

    def costs(self, cluster: Cluster) -> PoolCosts:
        """Return stage costs of every set of models on every node group, with all or some GPUs of each node in use."""
        most = max(MAX_GROUPS // sum(len(group.in_zones) for group in cluster.groups), 1)
        used = [(host, part) for host, nodes in enumerate(cluster.groups) for part in node_uses(nodes, self.load, most)]
        settings = [Setting(nodes, self.software, self.load, self.correction) for _, nodes in used]
        sizes = [sizes_of_pools(nodes, self.load)[: None if self.can_use(nodes) else 0] for _, nodes in used]
        hosts = [frozenset((host, zone) for zone in nodes.zones or ("",)) for host, nodes in used]
        return PoolCosts(self.requests, settings, sizes, hosts, self.simulated)

    def can_use(self, nodes: NodeGroup) -> bool:
        """Whether the GPUs of some nodes compute in the job's precision."""
        return self.software.compute_bytes > layer.HALF or nodes.gpu.has_bf16

    def goal(self, objective: Objective | None = None) -> Objective:
        """Return the objective, by default throughput, completed by how the stages of this job's step overlap."""
        ahead = self.load.works_ahead
        return replace(objective or Objective(), works_ahead=ahead, streams=overlap.groups_of(self.load))

    def fits(self, cluster: Cluster) -> bool:
        """Whether some mapping onto a cluster fits."""
        known = self.simulated.fits
        if cluster not in known:
            known[cluster] = bool(self.search(self.costs(cluster)))
        return known[cluster]

    def search(self, costs: PoolCosts, objective: Objective | None = None) -> list[Found]:
        """Return the best placements of models in pools, each with its best allocation of GPUs."""
        goal = self.goal(objective)
        return pruned(costs, [role for role in self.requests if role not in PLACED_WITH], MAX_PLACEMENTS, goal)


def auto_map(
    job: Job,
    cluster: Cluster,
    shapes: Mapping[Role, Architecture],
    *,
    device: Device,
    objective: Objective | None = None,
    correction: Correction | None = None,
    responses: Sequence[float] = (),
    prompts: Sequence[float] = (),
    explains: bool = True,
) -> DeviceMapping | Infeasible:
    """Return the best mapping of a job's models onto a cluster, or why there is none.

    shapes: architecture of every model of the job. responses: sampled response lengths in tokens; if empty, they
    are assumed (`workload_of`). explains: whether to search for remedies if nothing fits, which takes many searches.
    Raises SpecError for sizes of the manifest that a model cannot be cut into.
    """
    made = partial(task_of, shapes=shapes, device=device, correction=correction, responses=responses, prompts=prompts)
    task = made(job)
    if answer := mapping_of(task, cluster, device=device, objective=objective):
        return answer
    if not explains:
        return Infeasible(reason="nothing fits")
    remedies = remedies_of(job, cluster, lambda other, machines: made(other).fits(machines))
    return replace(_infeasible(task, cluster), options=remedies)


def mapping_of(
    task: MappingProblem, cluster: Cluster, *, device: Device = "GPU", objective: Objective | None = None
) -> DeviceMapping | None:
    """Return the best mapping of a problem, or one in fewer pools that is about as fast; None if nothing fits."""
    key, known = (cluster, device, objective or Objective()), task.simulated.mappings
    if key not in known:
        known[key] = _searched(task, *key)
    return known[key]


def _searched(task: MappingProblem, cluster: Cluster, device: Device, objective: Objective) -> DeviceMapping | None:
    best: tuple[tuple[float, float], PoolCosts, list[Found], Objective] | None = None
    for chosen in _choices(cluster):
        costs = task.costs(Cluster(tuple(group for _, group in chosen)))
        goal = objective.on([chosen[min(nodes)[0]][0] for nodes in costs.hosts])
        if found := task.search(costs, goal):
            weights = goal.weights(len(costs.groups))
            used = sum(weights[group] * gpus for _, group, gpus in found[0].sets)
            first, second = goal.keys(np.array(found[0].seconds), np.array(used))
            answer = ((float(first), float(second)), costs, found, goal)
            best = min(best or answer, answer, key=lambda each: each[0])
    if best is None:
        return None
    _, costs, found, goal = best
    found = simplest_first(found) if goal.kind == "throughput" else found
    ordered = sorted(found[0].sets, key=lambda each: ("actor" not in each[0], sorted(each[0])))
    pools = [_pool(costs, models, group, gpus) for models, group, gpus in ordered]
    pools = [replace(pools[0], name="all")] if len(pools) == 1 else pools
    mapping = _with_prediction(costs, found[0], DeviceMapping(device=device, pools=tuple(pools), sizes={}))
    return replace(mapping, rejected=rejected_of(costs, found, goal))


def _choices(cluster: Cluster) -> Iterator[list[tuple[int, NodeGroup]]]:
    """Yield (index, node group) lists to search: all groups, then each group or zone alone, with more `node_uses`."""
    every = list(enumerate(cluster.groups))
    yield every
    for host, group in every:
        zones = (replace(part, zone_bandwidth=None) for part in group.in_zones)
        yield from ([(host, part)] for part in dict.fromkeys((group, *zones)) if [(host, part)] != every)


def predict(
    job: Job,
    placed: DeviceMapping,
    cluster: Cluster,
    shapes: Mapping[Role, Architecture],
    *,
    correction: Correction | None = None,
    responses: Sequence[float] = (),
    prompts: Sequence[float] = (),
) -> DeviceMapping | Infeasible:
    """Return a placement made by hand with its prediction, or the reason why it does not fit."""
    task = task_of(job, shapes, device=placed.device, correction=correction, responses=responses, prompts=prompts)
    taken = sum(pool.size for pool in placed.pools)
    if taken > cluster.gpus:
        words = f"{slots_text(taken, placed.device)}, but the nodes have {cluster.gpus}"
        return Infeasible(reason=f"the pools of the manifest take {words}")
    if (groups := _groups_of(placed.pools, cluster)) is None:
        pools = " and ".join(f"{slots_text(pool.size, placed.device)} for pool {pool.name}" for pool in placed.pools)
        return Infeasible(reason=f"no node group has room for each of {pools}")
    nodes = [cluster.groups[group] for group in groups]
    if refused := _without_bf16(task, nodes):
        return Infeasible(reason=refused)
    costs = _costs_of(task, placed, nodes)
    sets = tuple(
        (frozenset(pool.models).difference(PLACED_WITH), place, pool.size) for place, pool in enumerate(placed.pools)
    )
    of_pools = [costs.seconds(*each) for each in sets]
    if full := [pool.name for pool, each in zip(placed.pools, of_pools, strict=True) if np.isinf(each).any()]:
        return Infeasible(reason=f"the models of pool {', '.join(full)} do not fit on its {placed.device} slots")
    stages, goal = np.max([costs.stages(*each) for each in sets], axis=0), task.goal()
    generation, preparation, training = goal.three(stages).tolist()
    found = Found(sets, float(goal.step(stages)), (generation, preparation, training))
    named = (replace(pool, gpu=each.gpu.name) for pool, each in zip(placed.pools, nodes, strict=True))
    return _with_prediction(costs, found, replace(placed, pools=tuple(named)))


def _without_bf16(task: MappingProblem, groups: Sequence[NodeGroup]) -> str:
    """Return a sentence on GPUs that lack the job's precision; empty if there are none."""
    names = " and ".join(dict.fromkeys(group.gpu.name for group in groups if not task.can_use(group)))
    return names and f"vLLM refuses bf16 on {names}, whose compute capability is below 8.0"


def _costs_of(task: MappingProblem, placed: DeviceMapping, nodes: Sequence[NodeGroup]) -> PoolCosts:
    """Return the stage costs of a manual placement with its own parallel sizes; nodes: node group of each pool."""
    requests = {
        role: replace(
            task.requests[role],
            sizes=Parallelism(**{name: getattr(cut, name) for name in Parallelism.model_fields}),
            generation_pipeline=cut.generation_pipeline,
            generation_tensor=cut.generation_tensor,
        )
        for role, cut in placed.sizes.items()
    }
    used = [nodes_of_pool(pool, each) for pool, each in zip(placed.pools, nodes, strict=True)]
    settings = [Setting(each, task.software, task.load, task.correction) for each in used]
    return PoolCosts(requests, settings, [np.array([pool.size]) for pool in placed.pools])


def task_of(
    job: Job,
    shapes: Mapping[Role, Architecture],
    *,
    device: Device,
    correction: Correction | None = None,
    responses: Sequence[float] = (),
    prompts: Sequence[float] = (),
) -> MappingProblem:
    """Build a job's mapping problem on GPUs or CPUs. Raises SpecError for parallel sizes that do not divide a model."""
    shapes = {**shapes, "rollout": shapes["actor"]} if job.generates_apart else shapes
    problems = [problem for role in job.placed_roles() for problem in wrong_sizes(job, role, shapes[role])]
    if problems := [*problems, *too_long(job, shapes)]:
        raise SpecError(problems)
    load = workload_of(job, responses=responses, prompts=prompts)
    requests = {role: _request(job, role, shapes[role], load.work[role], device) for role in job.placed_roles()}
    training = job.spec.training
    software = software_for(device, training.precision, training.attention, training.kernels, job.spec.rollout)
    return MappingProblem(requests=requests, load=load, software=software, correction=correction or Correction())


def _with_prediction(costs: PoolCosts, found: Found, mapping: DeviceMapping) -> DeviceMapping:
    cuts = {role: cut for pool in found.sets for role, cut in cuts_of(costs, *pool).items()}
    sizes = {role: cuts[role].sizes for role in costs.requests}
    return replace(mapping, sizes=sizes, prediction=prediction_of(costs, found, cuts, mapping.pools))


def _request(job: Job, role: Role, model: Architecture, work: Work, device: Device) -> ModelRequest:
    rollout, source = job.spec.rollout, job.models()["actor" if role == "rollout" else role]
    recomputes = bool(work.recomputes) if device == "CPU" else work.recomputes  # on CPU unset means no recomputation
    trained = model.trained_parameters(source.lora) / model.parameters
    fixed, compression = fixed_sizes(job, role), job.spec.training.gradient_compression
    work = replace(work, recomputes=recomputes, trained_share=trained, compression=compression)
    return ModelRequest(
        model=model,
        work=replace(work, replicas=fixed.replicas) if fixed else work,
        micro_batch_tokens=job.micro_batch_tokens(device, hidden=model.hidden),
        sizes=fixed,
        generation_pipeline=1 if rollout.speculation else rollout.pipeline_parallel,  # no stages with drafts
        generation_tensor=rollout.tensor_parallel,
        generator_share=rollout.gpu_memory_utilization,
        offload="None" if role == "rollout" else source.offload,
    )


def _pool(costs: PoolCosts, models: frozenset[str], group: int, gpus: int) -> MappedPool:
    nodes, roles = costs.settings[group].nodes, costs.roles_of(models)
    whole, rest = divmod(gpus, nodes.gpus_per_node)
    slots = (nodes.gpus_per_node,) * whole + (rest,) * bool(rest)
    return MappedPool(
        name="-".join(role for role in roles if role in models),
        models=roles,
        slots_per_machine=slots,
        gpu=nodes.gpu.name,
        zones=nodes.zones[: len(slots)],
        zone_bandwidth=nodes.zone_bandwidth if nodes.spans_zones else None,
    )


def _groups_of(pools: Sequence[MappedPool], cluster: Cluster) -> list[int] | None:
    """Return the index of each pool's node group, which has room and the pool's GPU type; None if a pool finds none."""
    left = [group.gpus for group in cluster.groups]
    groups: dict[str, int] = {}
    for pool in sorted(pools, key=lambda pool: -pool.size):
        suits = [pool.gpu in ("", group.gpu.name) for group in cluster.groups]
        group = next((place for place, gpus in enumerate(left) if suits[place] and gpus >= pool.size), None)
        if group is None:
            return None
        left[group] -= pool.size
        groups[pool.name] = group
    return [groups[pool.name] for pool in pools]


def short_of_states(job: Job, cluster: Cluster, parameters: Mapping[Role, float]) -> Infeasible | None:
    """Return why the models' states do not fit on CPU slots, or None; parameters: least number by role (0: unknown)."""
    software, models = software_for("CPU", job.spec.training.precision), job.models()
    # With LoRA the trained share depends on the unknown shape.
    trained = {role for role, model in models.items() if model.optimizer is not None and model.lora is None}
    states = {
        role: number * sum(memory.states(ONE, software, trains=role in trained).values()) / ONE.parameters
        for role, number in parameters.items()
        if number and models[role].offload != "OptimizerInHost"
    }
    needed = sum(states.values())
    have = _room_for_states(software, cluster)
    if needed <= have:
        return None
    least, there = f"the states of {', '.join(states)} take at least {needed / 1e9:,.1f} GB", _gpus_in_words(cluster)
    return Infeasible(reason=f"{least}, but {there} hold {have / 1e9:,.1f} GB", short_bytes=needed - have)


def _infeasible(task: MappingProblem, cluster: Cluster) -> Infeasible:
    """Return why no mapping fits, the GPU bytes missing for states, and the smallest clusters that suffice."""
    costs = task.costs(cluster)
    states = [sum(costs.states(role, 0).values()) for role in task.requests]
    room = sum(memory.HOST_SHARE * group.host * group.gpus for group in cluster.groups)
    waits = task.software.may_offload and sum(states) <= room
    needed = max(states) if waits else sum(states)
    have = _room_for_states(task.software, cluster)
    smallest = tuple(
        (group.gpu.name, nodes * group.gpus_per_node)
        for group in cluster.groups
        if (nodes := _smallest(task, group)) is not None
    )
    if not any(map(task.can_use, cluster.groups)):
        reason = _without_bf16(task, cluster.groups)
    elif needed > have:
        one = "the largest of " * (waits and len(states) > 1)
        full = f", and half of the host memory, {room / 1e9:,.1f} GB, is too small for them to wait there"
        full = full * (task.software.may_offload and not waits)
        least, there = f"take {needed / 1e9:,.1f} GB", f"{_gpus_in_words(cluster)} hold {have / 1e9:,.1f} GB"
        reason = f"the states of {one}{', '.join(task.requests)} {least}, but {there}{full}"
    else:
        reason = _short_beside_states(task, costs, cluster)
    return Infeasible(short_bytes=max(needed - have, 0.0), smallest=smallest, reason=reason)


def _room_for_states(software: Software, cluster: Cluster) -> float:
    """Return the bytes of all GPUs of a cluster that models may fill."""
    several = float(cluster.gpus > 1)
    rooms = (memory.usable(software, group.gpu.memory, 1 + several, generates=False) for group in cluster.groups)
    return sum(float(room) * group.gpus for room, group in zip(rooms, cluster.groups, strict=True))


def _smallest(task: MappingProblem, group: NodeGroup) -> int | None:
    """Return the fewest nodes like those of a group on which a mapping fits; None beyond MAX_NODES."""

    def fits(count: int) -> bool:
        return task.fits(Cluster((replace(group, count=count, zones=()),)))

    most = 1
    while not fits(most):
        most *= 2
        if most > MAX_NODES:
            return None
    return bisect_left(range(most), True, lo=most // 2 + 1, key=fits)


def _gpus_in_words(cluster: Cluster) -> str:
    """Return the GPUs of a cluster by type: `16 x a100-80g and 8 x h100-80g`."""
    gpus = Counter(group.gpu.name for group in cluster.groups for _ in range(group.gpus))
    return " and ".join(f"{count} x {gpu}" for gpu, count in gpus.items())


def _short_beside_states(task: MappingProblem, costs: PoolCosts, cluster: Cluster) -> str:
    """Return why no mapping fits though the models' states do."""
    models = ", ".join(task.requests)
    if "rollout" in task.requests and cluster.gpus < 2:
        return f"spec.rollout.maxStaleness takes another slot for the rollout, but there is {_gpus_in_words(cluster)}"
    for role, request in task.requests.items():
        groups = range(len(costs.groups))
        if not any(costs.strategies(role, frozenset((role,)), group, 1).fits.any() for group in groups):
            sizes = (request.sizes.model_dump() if request.sizes else {}).items()
            usual = {("context", 1), ("replicas", 1), ("expert", 1), ("data", None)}
            asked = ", ".join(f"{name} {size}" for name, size in sizes if (name, size) not in usual)
            return f"no pool of these GPUs can cut {role} as asked ({asked}) and give each data rank a sequence"
    divides = sorted(set(task.load.pool_divides))
    largest = max((int(np.max(sizes, initial=0)) for sizes in costs.sizes), default=0)
    if divides and largest < max(group.gpus for group in cluster.groups):
        batch = " and ".join(str(number) for number in divides)
        slots = f"{largest} slot{'s' * (largest > 1)}"
        return f"{models} do not fit on {slots}, the most for a pool with which the batch ({batch} sequences) divides"
    return f"the states of {models} fit, but nothing is left for activations or for the KV cache of one sequence"
