"""Choice of `training.gradientCompression: Auto`, by the link between the zones of a model's replicas."""

from typing import Literal

from rlhf_api.job import Job
from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_mapper.hardware import THIN
from rlhf_mapper.mapping import DeviceMapping, MappedPool


def gradient_compression(job: Job, mapping: DeviceMapping) -> Literal["None", "TopK"]:
    """Return what the job asks for; for Auto TopK if a trained model's replicas have a thin link between them."""
    chosen = job.spec.training.gradient_compression
    if chosen != "Auto":
        return chosen
    homes = ((pool, role) for pool in mapping.pools for role in pool.models if role in job.trained())
    return "TopK" if any(_has_thin_link(pool, mapping.sizes[role]) for pool, role in homes) else "None"


def _has_thin_link(pool: MappedPool, sizes: ParallelSizes) -> bool:
    """Whether each replica lies in one zone, and the link between the zones is known to be thin."""
    if sizes.replicas == 1 or not pool.zone_bandwidth or pool.zone_bandwidth >= THIN:
        return False
    zones = [zone for zone, slots in zip(pool.zones, pool.slots_per_machine, strict=True) for _ in range(slots)]
    size = len(zones) // sizes.replicas
    return all(len(set(zones[start : start + size])) == 1 for start in range(0, len(zones), size))
