"""Requests to the mapper, corrected by past steps: the best mapping onto machines, or a prediction for given pools."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, Self

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_api.status import Measured
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import predict, short_of_states
from rlhf_mapper.coefficients import Correction, software_for
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Device, DeviceMapping, Infeasible
from rlhf_mapper.place import place
from rlhf_mapper.workload import lengths_around
from rlhf_operator.placement.capacity import (
    Capacity,
    MachineGroup,
    Machines,
    cluster_of,
    counted,
    machine_choices,
    nodes_too_small,
    unknown_figures,
)
from rlhf_operator.placement.shapes import Shapes, UnknownShapeError, shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot
from rlhf_planning.job_plan import merit, plan_job

MAX_RATIO: Final = 1e3
"""Bound of a correction, measured / predicted seconds: a ratio above it or below its inverse is ignored."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """Measurements of the job's attempts, and of other jobs with the same models."""

    measured: tuple[Measured, ...] = ()
    """Measurements of attempts with the same model shapes and software (`models_digest`), the newest last."""
    responses: tuple[float, ...] = ()
    """Response lengths in tokens, by the mean length in the job's newest measured attempt; empty without one."""

    @classmethod
    def of(cls, job: Job, shapes: Mapping[Role, Architecture], device: Device, snapshot: Snapshot) -> Self:
        """Return the measurements in a snapshot that concern a job with these model shapes."""
        own, models = snapshot.job.status.attempts, models_digest(job, shapes, device)
        tokens = [each.measured.response_tokens for each in own if each.measured]
        attempts = sorted((*own, *snapshot.measured), key=lambda attempt: attempt.start_time)
        known = tuple(each.measured for each in attempts if each.measured and each.measured.models == models)
        return cls(measured=known, responses=lengths(job, tokens[-1] if tokens else None))

    def correction(self, cluster: Cluster) -> Correction:
        """Return the correction of predictions by the newest attempt on the same GPU types, else on other types.

        Most of the correction stems from the software, so that other GPU types serve too.
        """
        types = {group.gpu.name for group in cluster.groups}
        same_gpus = [each for each in self.measured if set(each.gpus) == types]
        newest = (same_gpus or self.measured)[-1:]
        ratios = {each.phase: each.seconds / each.predicted_seconds for of in newest for each in of.phases}
        return Correction({phase: ratio for phase, ratio in ratios.items() if 1 / MAX_RATIO <= ratio <= MAX_RATIO})


def models_digest(job: Job, shapes: Mapping[Role, Architecture], device: Device) -> str:
    """Return a digest of shapes and software; if it is equal, predictions have equal errors on one GPU type."""
    matters = (sorted(shapes.items()), software_for(device, job.spec.training.precision, rollout=job.spec.rollout))
    return hashlib.sha256(repr(matters).encode()).hexdigest()[:32]


def lengths(job: Job, tokens: float | None) -> tuple[float, ...]:
    """Return response lengths for the mapper by their measured mean; empty without one."""
    return lengths_around(max(tokens, 1.0), float(job.spec.data.max_response_tokens)) if tokens else ()


class NoPlaceError(Exception):
    """No placement exists for a job; the message says what would help."""


Answer = tuple[DeviceMapping, str]
"""A mapping, and the reason why it has no prediction; the reason is empty if it has one."""


def map_auto(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> Answer:
    """Return the best mapping; one pool of all models if GPU figures, or on CPU model shapes, are unknown.

    Raises NoPlaceError and SpecError; UnknownShapeError for unknown shapes on GPUs, where a guess is expensive.
    """
    choices = machine_choices(capacity, job)
    if not choices:
        raise NoPlaceError(_too_few(job, capacity, snapshot, settings))
    clusters = {machines: cluster_of(machines, capacity.device, job, settings) for machines in choices}
    shapes = shapes_of(job, snapshot)
    if shapes.why_unknown:
        return _map_unknown_shapes(job, capacity, clusters, shapes), shapes.why_unknown
    machines_of: dict[Cluster, Machines] = {}
    for machines, cluster in clusters.items():
        if cluster:  # the first of equal clusters counts
            machines_of.setdefault(cluster, machines)
    if not machines_of:
        return _one_pool(job, choices, capacity), unknown_figures(choices[0], settings)
    past = Past.of(job, shapes.known, capacity.device, snapshot)
    search = partial(plan_job, job, shapes=shapes.known, device=capacity.device, responses=past.responses)
    answers = {each: search(each, correction=past.correction(each), explains=False) for each in machines_of}
    best = min(answers, key=lambda each: (merit(job, answers[each], each), -each.memory))
    answer = answers[best]
    if isinstance(answer, Infeasible):
        why = search(best, correction=past.correction(best))
        assert isinstance(why, Infeasible), "the same search gave no mapping before"
        raise NoPlaceError(f"{_does_not_fit(capacity, machines_of[best], why)}{_more_nodes(capacity, why, settings)}")
    return answer, ""


def _map_unknown_shapes(
    job: Job, capacity: Capacity, clusters: Mapping[Machines, Cluster | None], shapes: Shapes
) -> DeviceMapping:
    """Return one pool of all models on CPU. Raises UnknownShapeError on GPUs; NoPlaceError and SpecError."""
    if capacity.device == "GPU":
        fields = [job.spec.models.source_field(role) for role in job.models() if role not in shapes.known]
        remedy = ", ".join(f"spec.models.{field}.shape" for field in dict.fromkeys(fields))
        raise UnknownShapeError(f"{shapes.why_unknown}; put that right, or write {remedy}, or place by hand")
    ((machines, cluster),) = clusters.items()  # on CPU there is one choice
    if cluster and (short := short_of_states(job, cluster, shapes.parameters)):
        raise NoPlaceError(f"{_does_not_fit(capacity, machines, short)}; not all is known: {shapes.why_unknown}")
    return _one_pool(job, [machines], capacity)


def map_manual(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> Answer:
    """Return the mapping onto the pools of the manifest, predicted if possible. Raises NoPlaceError and SpecError."""
    pools = job.spec.placement.pools
    slots = sum(pool.nodes * pool.slots_per_node for pool in pools)
    if not capacity.machines:
        raise NoPlaceError(f"{nodes_too_small(job, snapshot, settings).as_clause}{capacity.note}")
    requests = [PodRequest(pool.nodes, pool.slots_per_node) for pool in pools]
    if capacity.device == "GPU" and capacity.nodes_known and not have_room(capacity, requests, settings):
        need = " and ".join(f"{pool.nodes} x {pool.slots_per_node} GPUs for pool {pool.name}" for pool in pools)
        raise NoPlaceError(f"the pools of spec.placement need {need}, but {capacity.as_clause}")
    on_device = job.changed(resources={"device": capacity.device})
    by_hand = place(on_device, (slots if capacity.device == "GPU" else 0,))
    if job.spec.algorithm.data == "layers":
        return by_hand, "a step merges one layer"
    shapes = shapes_of(job, snapshot)
    if shapes.why_unknown:
        return by_hand, shapes.why_unknown
    past = Past.of(job, shapes.known, capacity.device, snapshot)
    answer = predict_placed(job, by_hand, shapes.known, past, capacity, settings)
    return (answer, "") if isinstance(answer, DeviceMapping) else (by_hand, str(answer))


def predict_placed(
    job: Job,
    placed: DeviceMapping,
    shapes: Mapping[Role, Architecture],
    past: Past,
    capacity: Capacity,
    settings: Settings,
) -> DeviceMapping | Infeasible:
    """Return a mapping with its prediction on the machines of a job, or the reason why it has none."""
    most = max(max(pool.slots_per_machine) for pool in placed.pools)
    slots = sum(pool.size for pool in placed.pools)
    equal = (MachineGroup(product=capacity.machines[0].product, count=-(-slots // most), slots=most),)
    machines = capacity.machines if capacity.device == "GPU" and capacity.nodes_known else equal
    cluster = cluster_of(machines, capacity.device, job, settings)
    if cluster is None:
        return Infeasible(reason=unknown_figures(machines, settings))
    correction = past.correction(cluster)
    return predict(job, placed, cluster, shapes, correction=correction, responses=past.responses)


def _one_pool(job: Job, choices: Sequence[Machines], capacity: Capacity) -> DeviceMapping:
    """Return a mapping of all models into one data-parallel pool, on the most machines over which the batch divides.

    Raises NoPlaceError if machines differ in slots, or the rollout has its own pool; SpecError if nothing divides.
    """
    if "rollout" in job.placed_roles():
        raise NoPlaceError("the mapper does not know these models; say in spec.placement.pools where the rollout is")
    machines = next((each for each in choices if len({group.slots for group in each}) == 1), None)
    if machines is None:
        raise NoPlaceError(f"spec.resources.slotsPerNode is not set and the nodes differ: {capacity.as_clause}; set it")
    slots, most, fewest = machines[0].slots, sum(each.count for each in machines), job.spec.resources.nodes
    # Of many thousand numbers of nodes, few divide the batch.
    for count in range(most, fewest, -1):
        if job.sequences_per_step % (count * slots) == 0:
            with suppress(SpecError):
                return _placed_on(job, count, slots, capacity.device)
    return _placed_on(job, fewest, slots, capacity.device)


def _placed_on(job: Job, nodes: int, slots: int, device: Device) -> DeviceMapping:
    """Return the mapping of a job onto nodes with equally many slots. Raises SpecError."""
    sized = {"device": device, "nodes": nodes, "max_nodes": None, "slots_per_node": slots}
    return place(job.changed(resources=sized), (slots if device == "GPU" else 0,) * nodes)


def _does_not_fit(capacity: Capacity, machines: Machines, why: Infeasible) -> str:
    return f"no mapping onto {replace(capacity, machines=machines)} fits: {why}"


def _more_nodes(capacity: Capacity, infeasible: Infeasible, settings: Settings) -> str:
    """Return a clause that tells which maxNodes would suffice for a job; empty if there are too few nodes."""
    for gpu, gpus in infeasible.smallest:
        for group in capacity.machines:
            known, nodes = settings.gpu_of(group.product), -(-gpus // max(group.slots, 1))
            if known and known.name == gpu and group.count >= nodes:
                return f"; spec.resources.maxNodes {nodes} lets it have {gpus} x {gpu}"
    return ""


class PodRequest(NamedTuple):
    """Request to place the equal pods of a pool; each pod takes all its slots on one node."""

    pods: int
    slots: int
    gpu: str | None = None
    """Name of the GPU type in the mapper; None: any type."""
    zone: str | None = None


def have_room(capacity: Capacity, requests: Iterable[PodRequest], settings: Settings) -> bool:
    """Whether the nodes have room for the pods of all requests, if the pods with the most slots are placed first."""
    free = Counter[tuple[int, str, str]]()
    for group in capacity.machines:
        known = settings.gpu_of(group.product)
        free[group.slots, known.name if known else "", group.zone] += group.count
    return all(_take(free, *pool) for pool in sorted(requests, key=lambda pool: -pool.slots))


def _take(free: Counter[tuple[int, str, str]], pods: int, slots: int, gpu: str | None, zone: str | None) -> bool:
    """Take each pod's slots from the node with the fewest sufficient free slots; return False if a pod finds no node.

    free: number of nodes by (free slots, GPU type, zone); changed in place.
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


def _too_few(job: Job, capacity: Capacity, snapshot: Snapshot, settings: Settings) -> str:
    """Return why no placement exists: the request of the job, the nodes, and what to change."""
    resources, unit = job.spec.resources, "GPU" if capacity.device == "GPU" else "CPU slot"
    slots = resources.slots_per_node
    requested = f"{counted(resources.nodes, 'node')} with {counted(slots, unit) if slots else f'{unit}s'}"
    there, would_do = capacity.as_clause, "add nodes, or ask for fewer or smaller ones"
    small = nodes_too_small(job, snapshot, settings)
    if small.machines and capacity.device == "GPU":
        there = (
            f"{capacity.as_clause} and {small}"
            if capacity.machines
            else f"{small.as_clause}{capacity.note}, none with {slots or 'any'}"
        )
        largest = max(group.slots for group in small.machines)
        less = [f"spec.resources.slotsPerNode to {largest}"] * (largest > 0)
        less += ["spec.resources.device to CPU"] * (resources.device == "Auto")
        would_do = f"add nodes, or set {' or '.join(less)}" if less else would_do
    return f"spec.resources asks for {requested}, but {there}; {would_do}"
