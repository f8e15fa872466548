"""Asks the mapper: over all machines that a job may take, or about the pools that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf_api.job import Job
from rlhf_api.problems import SpecError
from rlhf_mapper.auto_map import auto_map, predicted
from rlhf_mapper.mapping import Infeasible, Inventory, Mapping
from rlhf_mapper.place import place
from rlhf_operator.placement.devices import Devices, Machines, choices, cluster_of
from rlhf_operator.placement.shapes import UnknownShapeError, shapes_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot


class TooFewError(Exception):
    """There are too few machines; the message says what would do."""


class Answer(NamedTuple):
    """A mapping, or why there is none."""

    mapping: Mapping | Infeasible
    without: str = ""
    """Why nothing is predicted; empty where something is."""


def auto(job: Job, devices: Devices, snapshot: Snapshot, settings: Settings) -> Answer:
    """The fastest mapping; all models together where it cannot be predicted. Raises TooFewError and SpecError."""
    offers = choices(devices, job)
    if not offers:
        raise TooFewError(_too_few(job, devices))
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
    """The pools of the manifest, predicted where that can be. Raises TooFewError and SpecError."""
    pools = job.spec.placement.pools
    slots = sum(pool.nodes * pool.slots_per_node for pool in pools)
    if not devices.machines:
        raise TooFewError(f"there is {devices}")
    if devices.device == "GPU" and devices.seen and not _has_room(job, devices):
        asked = " and ".join(f"{pool.nodes} x {pool.slots_per_node} GPUs for pool {pool.name}" for pool in pools)
        raise TooFewError(f"the pools of spec.placement need {asked}, but there are {devices}")
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
    return Answer(kept) if isinstance(kept, Mapping) else Answer(by_hand, str(kept))


def _together(job: Job, offers: Sequence[Sequence[Machines]], devices: Devices) -> Mapping:
    """All models in one pool, by data parallelism, on as many machines as the batch divides over. Raises SpecError."""
    equal = [machines for machines in offers if len({each.slots for each in machines}) == 1]
    if not equal:
        raise TooFewError(f"spec.resources.slotsPerNode is not set and the nodes differ: there are {devices}; set it")
    machines = equal[0]
    slots, most = machines[0].slots, sum(each.count for each in machines)
    refused: SpecError | None = None
    for count in range(most, job.spec.resources.nodes - 1, -1):
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


def _has_room(job: Job, devices: Devices) -> bool:
    """Whether the pools fit onto the nodes, the widest first; a pod takes its slots on one node."""
    left = [group.slots for group in devices.machines for _ in range(group.count)]
    wide = sorted((pool.slots_per_node for pool in job.spec.placement.pools for _ in range(pool.nodes)), reverse=True)
    for slots in wide:
        place_for = next((place for place, free in enumerate(sorted(left)) if free >= slots), None)
        if place_for is None:
            return False
        left = sorted(left)
        left[place_for] -= slots
    return True


def _too_few(job: Job, devices: Devices) -> str:
    resources = job.spec.resources
    kind = f"{resources.slots_per_node} {devices.device}s" if resources.slots_per_node else f"{devices.device} slots"
    asked = f"spec.resources asks for {resources.nodes} node{'s' * (resources.nodes > 1)} with {kind}"
    there = f"there {'are' if devices.machines else 'is'} {devices}"
    return f"{asked}, but {there}; add nodes, or ask for fewer or smaller ones"


def _seconds(answer: Mapping | Infeasible) -> float:
    if isinstance(answer, Infeasible):
        return float("inf")
    assert answer.prediction, "the mapper predicts what it maps"
    return answer.prediction.step_seconds
