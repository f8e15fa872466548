"""Remedies for a job that fits nowhere: larger GPUs, host memory, recomputed layers, rows over ranks, another batch."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic.alias_generators import to_camel

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.spec.lora import Lora
from rlhf_api.spec.parallel_sizes import Parallelism
from rlhf_mapper.architecture import CONTEXTS
from rlhf_mapper.hardware import CPU_SLOT, GB, GPUS, Cluster, Gpu, merged
from rlhf_mapper.mapping import Infeasible

Fits = Callable[[Job, Cluster], bool]
"""Function that tells whether there is a mapping of a job onto a cluster."""
HOST_MEMORY = range(16, 4097, 16)
"""Gigabytes of host memory for each GPU that are tried as a remedy."""
LACKING = range(1, 4097)
"""Gigabytes of missing memory to try for each slot of a manifest's pools."""
ADAPTER_RANK = 16


def remedies_of(job: Job, cluster: Cluster, fits: Fits) -> tuple[str, ...]:
    """Return remedies in words, each of which alone would make the job fit."""
    of_memory = (_larger_type, _optimizer_in_host, _more_host_memory, _recomputed_layers, _rows_over_ranks, _adapter)
    searches = (*of_memory, _full_precision, _larger_batch)
    return tuple(remedy for search in searches for remedy in search(job, cluster, fits))


def explain_refused_pools(refused: Infeasible, job: Job, cluster: Cluster, fits: Fits) -> Infeasible:
    """Return the refusal of a manifest's pools with the memory that each slot lacks, and with remedies."""

    def would_do(gigabytes: int) -> bool:
        larger = (replace(g, gpu=replace(g.gpu, memory=g.gpu.memory + gigabytes * GB)) for g in cluster.groups)
        return fits(job, Cluster(tuple(larger)))

    lacks = LACKING[bisect_left(LACKING, True, key=would_do)] if would_do(LACKING[-1]) else 0
    reason = refused.reason + f": each slot lacks {lacks} GB" * bool(lacks)
    is_enough = fits(job.changed(placement={"mode": "Auto", "pools": ()}), cluster)
    options = (*remedies_of(job, cluster, fits), *["spec.placement.mode: Auto, without pools"] * is_enough)
    slots = sum(pool.nodes * pool.slots_per_node for pool in job.spec.placement.pools)
    return replace(refused, reason=reason, short_bytes=lacks * GB * slots, options=options)


def _larger_type(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the GPU type of the same vendor with the least memory that would make the job fit; none for CPU slots."""
    if any(group.gpu.name == CPU_SLOT.name for group in cluster.groups):
        return
    most = max(group.gpu.memory for group in cluster.groups)
    amd = {group.gpu.source.startswith("AMD") for group in cluster.groups}  # AMD's GPUs need another image
    suits = (gpu for gpu in GPUS.values() if gpu.memory > most and gpu.source.startswith("AMD") in amd)
    larger = sorted(suits, key=lambda gpu: round(gpu.memory / GB))

    def would_do(gpu: Gpu) -> bool:
        return fits(job, Cluster(merged(replace(group, gpu=gpu, link_bandwidth=None) for group in cluster.groups)))

    place = bisect_left(larger, True, key=would_do)
    yield from (f"{cluster.gpus} x {gpu.name}" for gpu in larger[place : place + 1])


def _more_host_memory(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of enough host memory (of worker pods or an inventory's nodes), if the job then fits."""

    def would_do(gigabytes: int) -> bool:
        return fits(job, Cluster(merged(replace(group, host_memory=gigabytes * GB) for group in cluster.groups)))

    if any(group.host < HOST_MEMORY[-1] * GB for group in cluster.groups) and would_do(HOST_MEMORY[-1]):
        least = HOST_MEMORY[bisect_left(HOST_MEMORY, True, key=would_do)]
        yield f"{least} GB of host memory for each GPU (for all of a node: spec.runtime.worker.memory, or hostMemoryGB)"


def _adapter(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of a small adapter for the models that are trained whole, if the job then fits."""
    whole = [role for role in job.trained() if not job.models()[role].lora]
    if not any("reference" in pool.models for pool in job.spec.placement.pools):  # an adapter's reference is the actor
        lora = Lora(rank=ADAPTER_RANK, alpha=2 * ADAPTER_RANK)
        yield from _changed(job, cluster, fits, whole, {"lora": lora}, f"lora: {{rank: {ADAPTER_RANK}}}")


def _optimizer_in_host(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of optimizers in host memory, where the manifest sets another offload, if the job then fits."""
    if any(job.models()[role].offload not in ("None", "OptimizerInHost") for role in job.trained()):
        change = {"offload": "OptimizerInHost"}
        yield from _changed(job, cluster, fits, job.trained(), change, "offload: OptimizerInHost")


def _full_precision(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of float32 for GPUs without bf16, if the job then fits."""
    lacks = not all(group.gpu.has_bf16 for group in cluster.groups)
    if lacks and fits(job.changed(training={"precision": "FP32"}), cluster):
        yield "spec.training.precision: FP32"


def _recomputed_layers(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of gradient checkpointing for models whose manifest turns it off, if the job then fits."""
    kept = [role for role in job.trained() if job.models()[role].gradient_checkpointing is False]
    yield from _changed(job, cluster, fits, kept, {"gradient_checkpointing": True}, "gradientCheckpointing: true")


def _changed(
    job: Job, cluster: Cluster, fits: Fits, roles: Iterable[Role], change: Mapping[str, Any], words: str
) -> Iterator[str]:
    """Yield the remedy of a change of some models, if there are any and the job then fits."""
    fields = dict.fromkeys(job.spec.models.field(role) for role in roles)
    if fields and fits(_with_models(job, dict.fromkeys(fields, change)), cluster):
        yield " and ".join(f"spec.models.{field}.{words}" for field in fields)


def _rows_over_ranks(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the smallest context-parallel size (rows cut over ranks) of the trained models with which the job fits."""
    kept = {job.spec.models.field(role): job.models()[role].parallelism or Parallelism() for role in job.trained()}
    for context in (size for size in CONTEXTS if all(size > sizes.context for sizes in kept.values())):
        cut = {"context": context, "data": None}
        changes = {name: {"parallelism": sizes.model_copy(update=cut)} for name, sizes in kept.items()}
        if kept and fits(_with_models(job, changes), cluster):
            yield " and ".join(f"spec.models.{name}.parallelism.context: {context}" for name in kept)
            return


def _with_models(job: Job, changes: Mapping[str, Mapping[str, Any]]) -> Job:
    """Return a job with some fields of its models changed; changes: field of `spec.models` -> field -> value."""
    models = {field: getattr(job.spec.models, field).model_copy(update=change) for field, change in changes.items()}
    return job.changed(models=models)


def _larger_batch(job: Job, cluster: Cluster, fits: Fits) -> Iterator[str]:
    """Yield the remedy of the smallest batch and mini-batch that divide over all GPUs, if the job then fits."""
    training, samples, gpus = job.spec.training, job.spec.rollout.samples_per_prompt, cluster.gpus
    name = "prompt_batch_size" if training.prompt_batch_size else "batch_size"
    rows = -(-(training.prompt_batch_size or training.batch_size or 1) // gpus) * gpus
    sizes = {name: rows}
    if training.mini_batch_size is not None:
        mini = -(-training.mini_batch_size // (gpus * samples)) * gpus
        sizes = {name: -(-rows // mini) * mini, "mini_batch_size": mini * samples}
    is_new = any(size != getattr(training, name) for name, size in sizes.items())
    if is_new and fits(job.changed(training=sizes), cluster):
        yield " and ".join(f"spec.training.{to_camel(name)}: {size}" for name, size in sizes.items())
