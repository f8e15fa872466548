"""Size of the claim for a job's run folder, as far as the shapes of the job's models are known."""

from collections.abc import Mapping
from typing import Final

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.problems import SpecError
from rlhf_api.quantities import amount, gibibytes
from rlhf_mapper.architecture import Architecture
from rlhf_operator.placement.shapes import shapes_of
from rlhf_operator.snapshot import ObservedClaim, Snapshot
from rlhf_planning.checkpoint_size import bytes_at_once, bytes_of_saving

HEADROOM: Final = 1.1
"""Factor on the size of a claim, for logs and for the overhead of a file system."""


def claim_size(job: Job, snapshot: Snapshot) -> str:
    """Return the size of a claim that suffices for the job's checkpoints; 0Gi if no shape is known."""
    shapes = _known(job, snapshot)
    return gibibytes(HEADROOM * max(_checkpoints(job, shapes), bytes_of_saving(job, shapes)))


def too_small(job: Job, claim: ObservedClaim, snapshot: Snapshot) -> str:
    """Return why a claim is too small for checkpoints, and a sufficient size; empty if it suffices, or if unknown."""
    needed = _checkpoints(job, _known(job, snapshot))
    if not claim.size or amount(claim.size) >= needed:
        return ""
    keep, enough = job.spec.checkpoint.kept, claim_size(job, snapshot)
    return (
        f"PersistentVolumeClaim {claim.name} has {claim.size}, but {gibibytes(needed)} are taken by the {keep} "
        f"checkpoints that are kept and a new one; give it {enough}, or lower spec.checkpoint.keepLast"
    )


def _checkpoints(job: Job, shapes: Mapping[Role, Architecture]) -> int:
    """Return the bytes of all checkpoints that are on the claim at the same time; 0 if they are in a bucket."""
    in_bucket = (job.spec.checkpoint.storage or "").startswith(("s3://", "gs://"))
    return 0 if in_bucket else bytes_at_once(job, shapes)


def _known(job: Job, snapshot: Snapshot) -> Mapping[Role, Architecture]:
    try:
        return shapes_of(job, snapshot).known
    except SpecError:
        return {}  # the mapping says what is wrong with a shape
