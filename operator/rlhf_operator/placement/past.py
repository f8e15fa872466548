"""Measurements of attempts as the mapper uses them: corrections of predictions, and lengths of responses."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from rlhf_api.job import Job
from rlhf_api.names import Role
from rlhf_api.status import Measured
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.coefficients import Correction, software_for
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Device
from rlhf_mapper.workload import lengths_around
from rlhf_operator.snapshot import Snapshot

MAX_RATIO: Final = 1e3
"""Bound of a correction, measured / predicted seconds: a ratio above it or below its inverse is ignored."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """Measurements of the job's attempts, and of other jobs with the same models."""

    measured: tuple[Measured, ...] = ()
    """Measurements of attempts with models of the same shapes and the same prediction software, the newest last."""
    responses: tuple[float, ...] = ()
    """Lengths by the mean response of the job's own newest measured attempt, in tokens; empty without one."""

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
