"""Asks the mapper for the best mapping onto the machines of a job, or for a prediction of the pools it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import predict
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.lower_bound import short_of_states
from rlhf_mapper.mapping import DeviceMapping, Infeasible
from rlhf_mapper.place import place
from rlhf_operator.placement.capacity import (
    Capacity,
    MachineGroup,
    cluster_of,
    counted,
    machine_choices,
    nodes_too_small,
    unknown_figures,
)
from rlhf_operator.placement.past import Past
from rlhf_operator.placement.shapes import Shapes, UnknownShapeError, shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot
from rlhf_planning.job_plan import merit, plan_job


class NoPlaceError(Exception):
    """There is no place for a job; the message says what would do."""


class MapperAnswer(NamedTuple):
    """A mapping, and what is known of it."""

    mapping: DeviceMapping
    why_unpredicted: str = ""
    """Why the mapping has no prediction; empty where it has one."""


def map_auto(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> MapperAnswer:
    """The fastest mapping; if none can be predicted, one pool of all models, but none of models that are too large.

    Raises NoPlaceError and SpecError; UnknownShapeError on GPUs, where a guess is dear.
    """
    _require_device(job, capacity)
    offers = machine_choices(capacity, job)
    if not offers:
        raise NoPlaceError(_too_few(job, capacity, snapshot, settings))
    clusters = [cluster_of(machines, capacity.device, job, settings) for machines in offers]
    known: dict[Cluster, tuple[MachineGroup, ...]] = {}
    for cluster, machines in zip(clusters, offers, strict=True):
        if cluster:
            known.setdefault(cluster, machines)
    shapes = shapes_of(job, snapshot)
    if shapes.why_unknown and capacity.device == "GPU":
        fields = [job.spec.models.source_field(role) for role in job.models() if role not in shapes.known]
        remedy = ", ".join(f"spec.models.{field}.shape" for field in dict.fromkeys(fields))
        raise UnknownShapeError(f"{shapes.why_unknown}; put that right, or write {remedy}, or place by hand")
    if shapes.why_unknown:
        large_enough = _large_enough(job, offers, clusters, shapes, capacity)
        return MapperAnswer(_together(job, large_enough, capacity), shapes.why_unknown)
    if not known:
        return MapperAnswer(_together(job, offers, capacity), unknown_figures(offers[0], settings))
    past = Past.of(job, shapes.known, capacity.device, snapshot)
    search = partial(plan_job, job, shapes=shapes.known, device=capacity.device, responses=past.responses)
    answers = {each: search(each, correction=past.correction(each), explains=False) for each in known}
    best = min(answers, key=lambda each: (merit(job, answers[each], each), -each.memory))
    answer = answers[best]
    if isinstance(answer, Infeasible):
        why = search(best, correction=past.correction(best))
        assert isinstance(why, Infeasible), "the same was asked before"
        raise NoPlaceError(f"{_does_not_fit(capacity, known[best], why)}{_more_nodes(capacity, why, settings)}")
    return MapperAnswer(answer)


def map_manual(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> MapperAnswer:
    """The pools of the manifest, with a prediction where there can be one. Raises NoPlaceError and SpecError."""
    _require_device(job, capacity)
    pools = job.spec.placement.pools
    slots = sum(pool.nodes * pool.slots_per_node for pool in pools)
    if not capacity.machines:
        raise NoPlaceError(f"{nodes_too_small(job, snapshot, settings).as_clause}{capacity.note}")
    asked = [Wanted(pool.nodes, pool.slots_per_node) for pool in pools]
    if capacity.device == "GPU" and capacity.nodes_known and not have_room(capacity, asked, settings):
        need = " and ".join(f"{pool.nodes} x {pool.slots_per_node} GPUs for pool {pool.name}" for pool in pools)
        raise NoPlaceError(f"the pools of spec.placement need {need}, but {capacity.as_clause}")
    by_hand = place(_with_device(job, capacity), (slots if capacity.device == "GPU" else 0,))
    shapes = shapes_of(job, snapshot)
    if shapes.why_unknown:
        return MapperAnswer(by_hand, shapes.why_unknown)
    past = Past.of(job, shapes.known, capacity.device, snapshot)
    kept = predict_placed(job, by_hand, shapes.known, past, capacity, settings)
    return MapperAnswer(kept) if isinstance(kept, DeviceMapping) else MapperAnswer(by_hand, str(kept))


def predict_placed(
    job: Job,
    placed: DeviceMapping,
    shapes: Mapping[Role, Architecture],
    past: Past,
    capacity: Capacity,
    settings: Settings,
) -> DeviceMapping | Infeasible:
    """A mapping with its prediction on the machines of a job, or why there is none."""
    most = max(max(pool.slots_per_machine) for pool in placed.pools)
    slots = sum(pool.size for pool in placed.pools)
    equal = (MachineGroup(product=capacity.machines[0].product, count=-(-slots // most), slots=most),)
    machines = capacity.machines if capacity.device == "GPU" and capacity.nodes_known else equal
    cluster = cluster_of(machines, capacity.device, job, settings)
    if cluster is None:
        return Infeasible(reason=unknown_figures(machines, settings))
    correction = past.correction(cluster)
    return predict(job, placed, cluster, shapes, correction=correction, responses=past.responses)


def _together(job: Job, offers: Sequence[Sequence[MachineGroup]], capacity: Capacity) -> DeviceMapping:
    """All models in one pool, by data parallelism, on the most machines over which the batch divides.

    Raises NoPlaceError where the machines differ and slotsPerNode is unset, or the rollout is apart; SpecError where
    the batch never divides.
    """
    if "rollout" in job.placed_roles():
        raise NoPlaceError("the mapper does not know these models; say in spec.placement.pools where the rollout is")
    equal = [machines for machines in offers if len({each.slots for each in machines}) == 1]
    if not equal:
        raise NoPlaceError(f"spec.resources.slotsPerNode is not set and the nodes differ: {capacity.as_clause}; set it")
    machines = equal[0]
    slots, most, fewest = machines[0].slots, sum(each.count for each in machines), job.spec.resources.nodes
    refused: SpecError | None = None
    # Of many thousand numbers of nodes, few divide the batch.
    dividing = [count for count in range(most, fewest, -1) if job.sequences_per_step % (count * slots) == 0]
    for count in (*dividing, fewest):
        resources = job.spec.resources.model_copy(
            update={"device": capacity.device, "nodes": count, "max_nodes": None, "slots_per_node": slots}
        )
        sized = job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})
        try:
            return place(sized, (slots if capacity.device == "GPU" else 0,) * count)
        except SpecError as error:
            refused = error
    assert refused, "there is at least one number of nodes"
    raise refused


def _large_enough(
    job: Job,
    offers: Sequence[tuple[MachineGroup, ...]],
    clusters: Sequence[Cluster | None],
    shapes: Shapes,
    capacity: Capacity,
) -> list[tuple[MachineGroup, ...]]:
    """The machines that may hold what is known of the models; NoPlaceError where none may."""
    shorts = [short_of_states(job, cluster, shapes.parameters) if cluster else None for cluster in clusters]
    if large_enough := [machines for machines, short in zip(offers, shorts, strict=True) if not short]:
        return large_enough
    short = min((each for each in shorts if each), key=lambda each: each.short_bytes)
    machines = offers[shorts.index(short)]
    raise NoPlaceError(f"{_does_not_fit(capacity, machines, short)}; not all is known: {shapes.why_unknown}")


def _does_not_fit(capacity: Capacity, machines: Sequence[MachineGroup], why: Infeasible) -> str:
    return f"no mapping onto {replace(capacity, machines=tuple(machines))} fits: {why}"


def _more_nodes(capacity: Capacity, infeasible: Infeasible, settings: Settings) -> str:
    """A clause that says how a job may have more of the nodes that there are; empty where they are too few."""
    for gpu, gpus in infeasible.smallest:
        for group in capacity.machines:
            known, nodes = settings.gpu_of(group.product), -(-gpus // max(group.slots, 1))
            if known and known.name == gpu and group.count >= nodes:
                return f"; spec.resources.maxNodes {nodes} lets it have {gpus} x {gpu}"
    return ""


def _with_device(job: Job, capacity: Capacity) -> Job:
    """The job with `resources.device` set to what was found."""
    resources = job.spec.resources.model_copy(update={"device": capacity.device})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})


class Wanted(NamedTuple):
    """Pods of a pool, each of which takes its slots on one node."""

    pods: int
    slots: int
    """Of each."""
    gpu: str | None = None
    """The mapper's name of their GPUs; None: any."""
    zone: str | None = None
    """None: any."""


def have_room(capacity: Capacity, pools: Iterable[Wanted], settings: Settings) -> bool:
    """Whether the nodes have room for pools, the widest first."""
    free = Counter[tuple[int, str, str]]()
    for group in capacity.machines:
        known = settings.gpu_of(group.product)
        free[group.slots, known.name if known else "", group.zone] += group.count
    return all(_take(free, *pool) for pool in sorted(pools, key=lambda pool: -pool.slots))


def _take(free: Counter[tuple[int, str, str]], pods: int, slots: int, gpu: str | None, zone: str | None) -> bool:
    """Take the slots of each pod from the node with the fewest free slots that suffice; False where none does.

    free: number of nodes by (free slots, name of their GPUs, zone); changed in place.
    """
    suit = (each for each in free if each[0] >= slots and gpu in (None, each[1]) and zone in (None, each[2]))
    for size, name, where in sorted(suit):
        of_a_node = size // slots
        here = min(pods, free[size, name, where] * of_a_node)
        full, rest = divmod(here, of_a_node)
        free[size, name, where] -= full + bool(rest)
        free[size % slots, name, where] += full
        free[size - rest * slots, name, where] += bool(rest)
        pods -= here
    return pods == 0


def _require_device(job: Job, capacity: Capacity) -> None:
    """NoPlaceError where the nodes decide between CPU and GPU, but the operator may not list them."""
    if not capacity.nodes_known and job.spec.resources.device == "Auto":
        raise NoPlaceError("the operator may not read nodes: write spec.resources.device, CPU or GPU")


def _too_few(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> str:
    """Why there is no place: what the job asks for, what the nodes have, and what to change."""
    resources, unit = job.spec.resources, "GPU" if capacity.device == "GPU" else "CPU slot"
    wanted = resources.slots_per_node
    asked = f"{counted(resources.nodes, 'node')} with {counted(wanted, unit) if wanted else f'{unit}s'}"
    there, would_do = capacity.as_clause, "add nodes, or ask for fewer or smaller ones"
    small = nodes_too_small(job, snapshot, settings)
    if small.machines and capacity.device == "GPU":
        there = (
            f"{capacity.as_clause} and {small}"
            if capacity.machines
            else f"{small.as_clause}{capacity.note}, none with {wanted or 'any'}"
        )
        largest = max(group.slots for group in small.machines)
        less = [f"spec.resources.slotsPerNode to {largest}"] * (largest > 0)
        less += ["spec.resources.device to CPU"] * (resources.device == "Auto")
        would_do = f"add nodes, or set {' or '.join(less)}" if less else would_do
    return f"spec.resources asks for {asked}, but {there}; {would_do}"
