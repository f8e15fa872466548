"""The auto-mapper: Algorithm 1 of HybridFlow over all placements and allocations of a job's models."""

from __future__ import annotations

from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Correction, Software, software_for
from rlhf_mapper.explained import cuts_of, prediction_of, rejected_of
from rlhf_mapper.hardware import Cluster, NodeGroup
from rlhf_mapper.infeasible import infeasible
from rlhf_mapper.mapping import Device, Infeasible, MappedPool, Mapping, Sizes
from rlhf_mapper.pools import PoolCosts, pool_sizes
from rlhf_mapper.search.objective import Objective
from rlhf_mapper.search.pruned import pruned
from rlhf_mapper.search.tables import Found, total
from rlhf_mapper.strategy import Indices, Setting, Wanted
from rlhf_mapper.workload import Workload, workload_of

RIDERS: Map[Role, Role] = MappingProxyType({"cost_critic": "critic"})
"""Models that are not placed by themselves, and the one that each lives with."""
KEPT = 4
"""Placements to keep: the best, and three to compare it with."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be mapped: the models of a job, their work in a step, and the programs that do it."""

    wanted: Map[Role, Wanted]
    load: Workload
    software: Software
    correction: Correction

    def costs(self, cluster: Cluster) -> PoolCosts:
        """Stage costs of every set of models on every node group of a cluster."""
        settings = [Setting(nodes, self.software, self.load, self.correction) for nodes in cluster.groups]
        sizes = [_sizes_of_pools(nodes, self.load) for nodes in cluster.groups]
        return PoolCosts(self.wanted, settings, sizes, RIDERS)

    def search(self, costs: PoolCosts, objective: Objective | None = None) -> list[Found]:
        """The best placements, each with its best allocation."""
        return pruned(costs, [role for role in self.wanted if role not in RIDERS], KEPT, objective)


def auto_map(
    job: Job,
    cluster: Cluster,
    shapes: Map[Role, Architecture],
    *,
    device: Device,
    objective: Objective | None = None,
    correction: Correction | None = None,
) -> Mapping | Infeasible:
    """The best mapping of a job's models onto a cluster, or why there is none; shapes: of every model of the job."""
    problem = problem_of(job, shapes, device=device, correction=correction)
    costs = problem.costs(cluster)
    found = problem.search(costs, objective)
    if not found:
        return infeasible(costs, cluster, lambda other: bool(problem.search(problem.costs(other))))
    return _mapping(costs, found, device)


def predicted(
    job: Job,
    placed: Mapping,
    cluster: Cluster,
    shapes: Map[Role, Architecture],
    *,
    correction: Correction | None = None,
) -> Mapping | Infeasible:
    """A mapping that somebody made by hand, with what it is predicted to take, or why it does not fit."""
    problem = problem_of(job, shapes, device=placed.device, correction=correction)
    wanted = {role: _pinned(problem.wanted[role], sizes) for role, sizes in placed.sizes.items()}
    settings = [Setting(nodes, problem.software, problem.load, problem.correction) for nodes in cluster.groups]
    gpus: Indices = np.array(sorted({pool.size for pool in placed.pools}))
    costs = PoolCosts(wanted, settings, [gpus] * len(settings), RIDERS)
    if sum(pool.size for pool in placed.pools) > cluster.gpus:
        taken = sum(pool.size for pool in placed.pools)
        reason = f"the pools of the manifest take {taken} GPUs, but there are {cluster.gpus}"
        return Infeasible(short_bytes=0.0, smallest=(), reason=reason)
    groups = _groups_of(placed.pools, cluster)
    if None in groups:
        pool = placed.pools[groups.index(None)]
        reason = f"no nodes of one GPU type have room for the {pool.size} slots of pool {pool.name}"
        return Infeasible(short_bytes=0.0, smallest=(), reason=reason)
    sets = tuple(
        (frozenset(role for role in pool.models if role not in RIDERS), group, pool.size)
        for pool, group in zip(placed.pools, groups, strict=True)
    )
    stages = np.max([costs.seconds(*each) for each in sets], axis=0)
    if not np.isfinite(stages).all():
        full = [
            pool.name for pool, each in zip(placed.pools, sets, strict=True) if np.isinf(costs.seconds(*each)).any()
        ]
        names = ", ".join(full)
        return Infeasible(short_bytes=0.0, smallest=(), reason=f"the models of pool {names} do not fit on its GPUs")
    generation, preparation, training = stages.tolist()
    found = Found(sets, float(total(stages)), (generation, preparation, training))
    named = [
        replace(pool, gpu=cluster.groups[group].gpu.name) for pool, group in zip(placed.pools, groups, strict=True)
    ]
    return _explained(costs, [found], replace(placed, pools=tuple(named)))


def problem_of(
    job: Job, shapes: Map[Role, Architecture], *, device: Device, correction: Correction | None = None
) -> Problem:
    """What is to be mapped for a job on a kind of device."""
    load = workload_of(job)
    wanted = {role: _wanted(job, role, shapes[role], load) for role in job.models()}
    software = software_for(device, job.spec.training.precision)
    return Problem(wanted=wanted, load=load, software=software, correction=correction or Correction())


def _mapping(costs: PoolCosts, found: list[Found], device: Device) -> Mapping:
    """The first of the placements found, with the others as those that lost."""
    ordered = sorted(found[0].sets, key=lambda each: ("actor" not in each[0], sorted(each[0])))
    pools = [_pool(costs, models, group, gpus) for models, group, gpus in ordered]
    if len(pools) == 1:
        pools = [replace(pools[0], name="all")]
    return _explained(costs, found, Mapping(device=device, pools=tuple(pools), sizes={}))


def _explained(costs: PoolCosts, found: Sequence[Found], mapping: Mapping) -> Mapping:
    """A mapping whose pools are those of the first found, with sizes, prediction and what lost."""
    cuts = {role: cut for pool in found[0].sets for role, cut in cuts_of(costs, *pool).items()}
    sizes: dict[Role, Sizes] = {role: cuts[role].sizes for role in costs.wanted}
    prediction = prediction_of(costs, found[0], cuts, mapping.pools)
    return replace(mapping, sizes=sizes, prediction=prediction, rejected=rejected_of(costs, found))


def _wanted(job: Job, role: Role, model: Architecture, load: Workload) -> Wanted:
    """A model, its work, and the sizes that the manifest asks for."""
    asked, rollout = job.models()[role].parallelism, job.spec.rollout
    return Wanted(
        model=model,
        work=load.work[role],
        pipeline=asked.pipeline if asked else None,
        tensor=asked.tensor if asked else None,
        data=asked.data if asked else None,
        replicas=asked.replicas if asked else 1,
        generation_pipeline=rollout.pipeline_parallel,
        generation_tensor=rollout.tensor_parallel,
    )


def _pinned(wanted: Wanted, sizes: Sizes) -> Wanted:
    return replace(
        wanted,
        pipeline=sizes.pipeline,
        tensor=sizes.tensor,
        data=sizes.data,
        replicas=sizes.replicas,
        generation_pipeline=sizes.generation_pipeline,
        generation_tensor=sizes.generation_tensor,
    )


def _sizes_of_pools(nodes: NodeGroup, load: Workload) -> Indices:
    """GPUs that a pool may have, with which the batch divides."""
    sizes = pool_sizes(nodes)
    for number in load.pool_divides:
        sizes = sizes[number % sizes == 0]
    return sizes


def _pool(costs: PoolCosts, models: frozenset[str], group: int, gpus: int) -> MappedPool:
    nodes, living = costs.settings[group].nodes, costs.living(models)
    whole, rest = divmod(gpus, nodes.gpus_per_node)
    return MappedPool(
        name="-".join(role for role in living if role in models),
        models=living,
        slots_per_machine=(nodes.gpus_per_node,) * whole + (rest,) * bool(rest),
        gpu=nodes.gpu.name,
    )


def _groups_of(pools: Sequence[MappedPool], cluster: Cluster) -> list[int]:
    """The first node group with room for each pool in turn; the last one where there is none."""
    left = [group.gpus for group in cluster.groups]
    groups = []
    for pool in pools:
        group = next((place for place, gpus in enumerate(left) if gpus >= pool.size), len(left) - 1)
        left[group] -= pool.size
        groups.append(group)
    return groups
