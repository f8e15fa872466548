"""What is made for an attempt of a job, as plain Kubernetes objects. Pure."""

from __future__ import annotations

from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.resources.job_file import config_map
from rlhf_operator.resources.pods import Pods
from rlhf_operator.resources.rayjob import rayjob
from rlhf_operator.resources.storage import claims_named, output_claim, output_uri, run_folder
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

__all__ = ["claims_named", "for_attempt", "output_uri"]


def for_attempt(
    snapshot: Snapshot, job: Job, mapping: MappedPlacement, settings: Settings, *, attempt: int
) -> tuple[Manifest, ...]:
    """Everything that an attempt needs, in the order in which it is to be made.

    All jobs that this one reads have succeeded: the snapshot says where their models are.
    """
    job_file = config_map(snapshot, job, mapping)
    pods = Pods(
        snapshot=snapshot,
        job=job,
        mapping=mapping,
        settings=settings,
        attempt=attempt,
        config_map=job_file["metadata"]["name"],
    )
    own_claim = run_folder(job).claim == names.output_claim(job.name)
    claims = (output_claim(snapshot.job, settings),) if own_claim else ()
    return (*claims, job_file, rayjob(pods))
