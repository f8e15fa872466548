"""Asks the mapper: over all machines that a job may take, or about the pools that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_mapper.auto_map import auto_map, predicted
from rlhf_mapper.hardware import gpu_of_product
from rlhf_mapper.mapping import DeviceMapping, Infeasible, Inventory
from rlhf_mapper.place import place
from rlhf_operator.placement.devices import Devices, Machines, choices, cluster_of, counted, too_small
from rlhf_operator.placement.shapes import UnknownShapeError, shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


class NoPlaceError(Exception):
    """There is no place for a job; the message says what would do."""


class Answer(NamedTuple):
    """A mapping, or why there is none."""

    mapping: DeviceMapping | Infeasible
    without: str = ""
    """Why nothing is predicted; empty where something is."""


def auto(job: Job, devices: Devices, snapshot: Snapshot, settings: Settings) -> Answer:
    """The fastest mapping; all models together where it cannot be predicted. Raises NoPlaceError and SpecError."""
    _settled(job, devices)
    offers = choices(devices, job)
    if not offers:
        raise NoPlaceError(_too_few(job, devices, snapshot, settings))
    clusters = [cluster_of(machines, devices.device, job, settings) for machines in offers]
    known = [cluster for cluster in clusters if cluster]
    try:
        shapes = shapes_of(job, snapshot)
    except UnknownShapeError as error:
        return Answer(_together(job, offers, devices), str(error))
    if not known:
        product = offers[0][0].product
        figures = (
            f"the figures of GPU {product} are not known" if product else "the nodes do not say which GPUs they have"
        )
        return Answer(_together(job, offers, devices), figures)
    answers = [auto_map(job, cluster, shapes, device=devices.device) for cluster in known]
    return Answer(min(answers, key=_seconds))


def manual(job: Job, devices: Devices, snapshot: Snapshot, settings: Settings) -> Answer:
    """The pools of the manifest, predicted where that can be. Raises NoPlaceError and SpecError."""
    _settled(job, devices)
    pools = job.spec.placement.pools
    slots = sum(pool.nodes * pool.slots_per_node for pool in pools)
    if not devices.machines:
        raise NoPlaceError(too_small(job, snapshot, settings).there)
    asked = [(pool.nodes, pool.slots_per_node, None) for pool in pools]
    if devices.device == "GPU" and devices.seen and not have_room(devices, asked):
        need = " and ".join(f"{pool.nodes} x {pool.slots_per_node} GPUs for pool {pool.name}" for pool in pools)
        raise NoPlaceError(f"the pools of spec.placement need {need}, but {devices.there}")
    by_hand = place(_on(job, devices), Inventory(gpus_per_machine=(slots if devices.device == "GPU" else 0,)))
    try:
        shapes = shapes_of(job, snapshot)
    except UnknownShapeError as error:
        return Answer(by_hand, str(error))
    most = max(pool.slots_per_node for pool in pools)
    equal = (Machines(product=devices.machines[0].product, count=-(-slots // most), slots=most),)
    machines = devices.machines if devices.device == "GPU" and devices.seen else equal
    cluster = cluster_of(machines, devices.device, job, settings)
    if cluster is None:
        return Answer(by_hand, "the figures of the GPUs are not known")
    kept = predicted(job, by_hand, cluster, shapes)
    return Answer(kept) if isinstance(kept, DeviceMapping) else Answer(by_hand, str(kept))


def _together(job: Job, offers: Sequence[Sequence[Machines]], devices: Devices) -> DeviceMapping:
    """All models in one pool, by data parallelism, on as many machines as the batch divides over. Raises SpecError."""
    equal = [machines for machines in offers if len({each.slots for each in machines}) == 1]
    if not equal:
        raise NoPlaceError(f"spec.resources.slotsPerNode is not set and the nodes differ: {devices.there}; set it")
    machines = equal[0]
    slots, most, fewest = machines[0].slots, sum(each.count for each in machines), job.spec.resources.nodes
    refused: SpecError | None = None
    # Of many thousand numbers of nodes, few divide the batch.
    dividing = [count for count in range(most, fewest, -1) if job.sequences_per_step % (count * slots) == 0]
    for count in (*dividing, fewest):
        resources = job.spec.resources.model_copy(
            update={"device": devices.device, "nodes": count, "max_nodes": None, "slots_per_node": slots}
        )
        sized = job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})
        try:
            return place(sized, Inventory(gpus_per_machine=(slots if devices.device == "GPU" else 0,) * count))
        except SpecError as error:
            refused = error
    assert refused, "there is at least one number of nodes"
    raise refused


def _on(job: Job, devices: Devices) -> Job:
    """The job, with its device settled."""
    resources = job.spec.resources.model_copy(update={"device": devices.device})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})


def have_room(devices: Devices, pools: Iterable[tuple[int, int, str | None]]) -> bool:
    """Whether the nodes have room for pools, the widest first; a pod takes its slots on one node.

    pools: (pods, slots of each, the mapper's name of their GPUs or None for any).
    """
    free = Counter[tuple[int, str]]()
    for group in devices.machines:
        known = gpu_of_product(group.product)
        free[group.slots, known.name if known else ""] += group.count
    return all(_taken(free, *pool) for pool in sorted(pools, key=lambda pool: -pool[1]))


def _taken(free: Counter[tuple[int, str]], pods: int, slots: int, wanted: str | None) -> bool:
    """Takes the slots of each pod from the node that has the fewest that do; False where they do not suffice.

    free: nodes by their free slots and GPUs.
    """
    for size, gpu in sorted(each for each in free if each[0] >= slots and wanted in (None, each[1])):
        of_a_node = size // slots
        here = min(pods, free[size, gpu] * of_a_node)
        full, rest = divmod(here, of_a_node)
        free[size, gpu] -= full + bool(rest)
        free[size % slots, gpu] += full
        free[size - rest * slots, gpu] += bool(rest)
        pods -= here
    return pods == 0


def _settled(job: Job, devices: Devices) -> None:
    """NoPlaceError where a job leaves the device to the nodes, which may not be read."""
    if not devices.seen and job.spec.resources.device == "Auto":
        raise NoPlaceError("the operator may not read nodes: write spec.resources.device, CPU or GPU")


def _too_few(job: Job, devices: Devices, snapshot: Snapshot, settings: Settings) -> str:
    """What is asked for, what there is, and what would do."""
    resources, unit = job.spec.resources, "GPU" if devices.device == "GPU" else "CPU slot"
    wanted = resources.slots_per_node
    asked = f"{counted(resources.nodes, 'node')} with {counted(wanted, unit) if wanted else f'{unit}s'}"
    there, would_do = devices.there, "add nodes, or ask for fewer or smaller ones"
    small = too_small(job, snapshot, settings)
    if small.machines and devices.device == "GPU":
        there = f"{devices.there} and {small}" if devices.machines else f"{small.there}, none with {wanted or 'any'}"
        largest = max(group.slots for group in small.machines)
        less = [f"spec.resources.slotsPerNode to {largest}"] * (largest > 0)
        less += ["spec.resources.device to CPU"] * (resources.device == "Auto")
        would_do = f"add nodes, or set {' or '.join(less)}" if less else would_do
    return f"spec.resources asks for {asked}, but {there}; {would_do}"


def _seconds(answer: DeviceMapping | Infeasible) -> float:
    if isinstance(answer, Infeasible):
        return float("inf")
    assert answer.prediction, "the mapper predicts what it maps"
    return answer.prediction.step_seconds
