"""Cluster of a plan: the one that the command line describes, or this machine."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rlhf_api import kubectl_yaml
from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import read_text
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_api.quantities import amount
from rlhf_mapper.hardware import CPU_SLOT, Cluster, FoundGpu, Gpu, NodeGroup, figures_of, require_gpu
from rlhf_mapper.inventory import cluster_of, cluster_of_flags
from rlhf_mapper.mapping import Device, DeviceMapping
from rlhf_mapper.place import place

GpusHere = Callable[[], Sequence[FoundGpu]]


class UnknownGpuError(Exception):
    """Error for a GPU whose memory, speed and bandwidths are not known."""

    exit_code: ClassVar[ExitCode] = ExitCode.ENVIRONMENT


def requested_cluster(
    *, nodes: int | None, gpus_per_node: int | None, gpu: str | None, inventory: Path | None
) -> Cluster | None:
    """Return the cluster that these command-line options describe; None without any of them. Raises SpecError."""
    options = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--gpu": gpu}
    given = [option for option, value in options.items() if value is not None]
    if inventory:
        if given:
            raise SpecError([Problem(given[0], "is not for a cluster that --inventory describes")])
        text = read_text(inventory, f"--inventory {inventory}")
        return cluster_of(kubectl_yaml.read_one(text, f"{inventory}: "), str(inventory))
    if nodes is not None and gpus_per_node is not None and gpu is not None:
        return cluster_of_flags(nodes, gpus_per_node, require_gpu(gpu, "--gpu"))
    if given:
        missing = [option for option in options if option not in given]
        raise SpecError([Problem(option, f"is missing, {given[0]} needs it") for option in missing])
    return None


def device_of(job: Job, cluster: Cluster) -> Device:
    """Return the device of a cluster's slots, GPU or CPU. SpecError if the job asks for the other device."""
    device: Device = "CPU" if all(group.gpu.name == CPU_SLOT.name for group in cluster.groups) else "GPU"
    requested = job.spec.resources.device
    if requested not in ("Auto", device):
        there = "no GPU here" if requested == "GPU" else "no CPU slot in this cluster"
        raise SpecError([Problem(f"{job.name}: spec.resources.device", f"is {requested}, but there is {there}")])
    return device


def local_cluster(job: Job, gpus_here: GpusHere) -> Cluster:
    """Return this machine's GPUs, or else CPU slots, as many as a job asks for. Raises SpecError, UnknownGpuError."""
    gpus = 0 if job.spec.resources.device == "CPU" else len(gpus_here())
    return slots_of(place(job, (gpus,)), gpus_here)


def in_worker_pods(cluster: Cluster, job: Job) -> Cluster:
    """Return a cluster's nodes with no more host memory than the job's worker pods, if the manifest sets theirs."""
    if not (memory := job.spec.runtime.worker.memory):
        return cluster
    pods = ((group, float(amount(memory)) / group.gpus_per_node) for group in cluster.groups)
    return Cluster(tuple(replace(each, host_memory=min(part, each.host_memory or part)) for each, part in pods))


def slots_of(placed: DeviceMapping, gpus_here: GpusHere) -> Cluster:
    """Return the slots of a placement as one group of equal nodes. UnknownGpuError also if this machine has no GPU."""
    nodes = max(len(pool.slots_per_machine) for pool in placed.pools)
    slots = -(-sum(pool.size for pool in placed.pools) // nodes)
    gpus = gpus_here() if placed.device == "GPU" else ()
    if placed.device == "GPU" and not gpus:
        raise UnknownGpuError("the GPUs are not of this machine, so nobody knows their figures")
    gpu = _known(gpus[0]) if gpus else replace(CPU_SLOT, memory=host_memory() / slots)
    host = host_memory() / len(gpus) if gpus else None
    return Cluster((NodeGroup(gpu=gpu, count=nodes, gpus_per_node=slots, host_memory=host),))


def host_memory() -> int:
    """Return the bytes of this machine's host memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _known(found: FoundGpu) -> Gpu:
    """Return a GPU's memory, speed and bandwidths. UnknownGpuError if neither the table nor the driver tells them."""
    if gpu := figures_of(found):
        return gpu
    size = f"{found.memory / 1e9:.0f} GB"
    raise UnknownGpuError(f"the figures of this machine's GPU, {found.name} of {size}, are not known; give --inventory")
