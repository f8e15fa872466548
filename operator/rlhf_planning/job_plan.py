"""Device mapping of a job on a cluster, by the manifest's pools or an objective, and the fields that follow from it."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rlhf_api.contract import OBJECTIVE
from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import Problem, SpecError
from rlhf_api.pydantic_errors import FORMS
from rlhf_api.spec.job_spec import MICRO_BATCH_TOKENS
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.auto_map import auto_map, predict
from rlhf_mapper.coefficients import Correction
from rlhf_mapper.hardware import GIGABIT, Cluster
from rlhf_mapper.mapping import Device, DeviceMapping, Infeasible, ModelPrediction, Prediction
from rlhf_mapper.place import place
from rlhf_mapper.remedies import explain_refused_pools
from rlhf_mapper.search.objective import Objective
from rlhf_planning.timeline import plain, seconds_text

ENGINE_SHARE, MAX_SHARE = 0.05, 0.95
"""Shares of a GPU's memory: the generator's need besides weights and KV cache, and the most it may take in all."""


def plan_job(
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
    """Return a manual placement, predicted, or the best mapping for `objective` or the manifest's; see `auto_map`."""
    known: dict[str, Any] = {"correction": correction, "responses": responses, "prompts": prompts}
    if job.spec.placement.mode == "Manual":
        slots = (group.gpus_per_node if device == "GPU" else 0 for group in cluster.groups for _ in range(group.count))
        found = predict(job, place(job, tuple(slots)), cluster, shapes, **known)
        if isinstance(found, DeviceMapping) or not explains:
            return found

        def fits(other: Job, machines: Cluster) -> bool:
            ways: dict[str, Any] = {**known, "device": device, "objective": Objective(), "explains": False}
            with suppress(SpecError):
                return isinstance(plan_job(other, machines, shapes, **ways), DeviceMapping)
            return False

        return explain_refused_pools(found, job, cluster, fits)
    objective = objective or objective_for(job, cluster)
    search = partial(auto_map, job, cluster, shapes, device=device, **known)
    mapping = search(objective=objective, explains=explains)
    if isinstance(mapping, Infeasible) and explains and objective.kind == "fewest_gpus":
        fastest = search()
        if isinstance(fastest, Infeasible):
            return fastest
        assert fastest.prediction, "the shapes are known"
        seconds = seconds_text(fastest.prediction.step_seconds)
        most = seconds_text(objective.most_seconds)
        return Infeasible(reason=f"no mapping takes {most} a step or less; the fastest takes {seconds}")
    return mapping


def gpu_memory_utilization(job: Job, prediction: Prediction) -> float | None:
    """Return the share of a GPU's memory for generation; None for a job that does not generate on its own GPUs."""
    if job.spec.algorithm.offline or job.generates_elsewhere or job.spec.rollout.gpu_memory_utilization:
        return job.spec.rollout.gpu_memory_utilization
    return min(prediction.gpu_memory_utilization + ENGINE_SHARE, MAX_SHARE)


def micro_batch_tokens(job: Job, models: Iterable[ModelPrediction]) -> int:
    """Return the most tokens of a forward pass that fit in memory for every model, at most those of the manifest."""
    sequence = job.spec.data.max_prompt_tokens + job.spec.data.max_response_tokens
    fewest = min(model.micro_batch for model in models)
    return min(job.spec.training.micro_batch_tokens or MICRO_BATCH_TOKENS, max(fewest * sequence, 1))


def prices_of(cluster: Cluster) -> dict[str, float]:
    """Return the price of a GPU for an hour by GPU type; empty if a type has no price, or several."""
    groups = {(group.gpu.name, group.gpu_hour_price) for group in cluster.groups}
    prices = {gpu: price for gpu, price in groups if price is not None}
    return prices if len(prices) == len(groups) else {}


def notes_of(
    job: Job, mapping: DeviceMapping | Infeasible, cluster: Cluster, shapes: Mapping[Role, Architecture]
) -> list[str]:
    """Return sentences about a plan: assumptions on nodes (host memory, bf16), consequences, and omissions."""
    notes, used = [], isinstance(mapping, DeviceMapping) and mapping.prediction and mapping.prediction.host_memory
    for group in cluster.groups if used and any(used.values()) else ():
        if group.host_memory is None:
            size = plain(group.host / 1e9)
            notes.append(f"Nodes of {group.gpu.name} are taken to have {size} GB of host memory for each GPU.")
    cut = mapping.sizes if isinstance(mapping, DeviceMapping) else {}
    if experts := ", ".join(role for role in shapes if role in cut and cut[role].expert > 1):
        words = "is predicted for the fullest rank with 1.2 times the mean of the tokens, a guess"
        notes.append(f"The all-to-all of experts ({experts}) {words}.")
    if without := [group.gpu.name for group in cluster.groups if not group.gpu.has_bf16]:
        notes.append(f"Only jobs in FP32 use {' and '.join(without)}: vLLM refuses bf16 there.")
    if job.spec.rollout.speculation:
        notes.append("rollout.speculation is not predicted: how many drafts are accepted is known only by trying.")
    if isinstance(mapping, DeviceMapping) and mapping.compresses_gradients(job):
        notes.append("Replicas send each other only a part of their steps (training.gradientCompression: TopK).")
    return notes


def networks_of(cluster: Cluster) -> Iterator[str]:
    """Yield sentences on the network speed between the nodes of each node group, then between its zones."""
    usual = ", as is usual with them; an --inventory can say otherwise"
    for group in cluster.groups:
        if group.count > 1:
            speed = plain(group.network / GIGABIT)
            yield f"Nodes of {group.gpu.name} send {speed} Gb/s{usual * (not group.node_bandwidth)}."
    for group in cluster.groups:
        if group.spans_zones and group.zone_bandwidth:
            zones = ", ".join(dict.fromkeys(group.zones))
            yield f"Zones {zones} send each other {plain(group.zone_bandwidth / GIGABIT)} Gb/s."


def merit(job: Job, mapping: DeviceMapping | Infeasible, cluster: Cluster) -> tuple[float, float]:
    """Return the sort key of a job's mapping onto one of several clusters; the smallest key is the best mapping."""
    if isinstance(mapping, Infeasible):
        return math.inf, math.inf
    assert mapping.prediction, "the mapper predicts what it maps"
    seconds, kind, prices = mapping.prediction.step_seconds, objective_for(job, cluster).kind, prices_of(cluster)
    gpus = sum(pool.size for pool in mapping.pools)
    if kind == "lowest_cost" and prices:
        return seconds * sum(pool.size * prices[pool.gpu] for pool in mapping.pools), seconds
    return (gpus, seconds) if kind == "fewest_gpus" else (seconds, gpus)


def objective_for(job: Job, cluster: Cluster) -> Objective:
    """Return the objective of the manifest. Raises SpecError."""
    return objective_of(job.spec.placement.objective, cluster, f"{job.name}: spec.placement.objective")


def objective_of(text: str, cluster: Cluster, path: str = "--objective") -> Objective:
    """Parse an objective; path: field or option that holds `text`, for errors. Raises SpecError."""
    name, _, seconds = text.partition("=")
    if not re.fullmatch(OBJECTIVE, text) or (seconds and not float(seconds)):
        raise SpecError([Problem(path, f"is {text or 'empty'}, expected {FORMS[OBJECTIVE]}, with SECONDS above 0")])
    if name == "throughput":
        return Objective()
    if name == "fewest-gpus":
        return Objective("fewest_gpus", most_seconds=float(seconds))
    prices = tuple(group.gpu_hour_price for group in cluster.groups if group.gpu_hour_price is not None)
    if len(prices) < len(cluster.groups):
        raise SpecError([Problem(path, "lowest-cost needs the pricePerGpuHour of all nodes")])
    return Objective("lowest_cost", prices=prices)
