"""How far the times of a run were from what was predicted for it, and the correction that follows for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_api.job import Job
from rlhf_mapper.calibration import Compared, apart, correction_of
from rlhf_mapper.coefficients import Correction
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Phase
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.report.numbers import number
from rlhf_trainer.report.reading import JobRecord, read_run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a job of a run folder says of the predictions."""

    job: str
    phases: Sequence[Compared[Phase]]
    correction: Correction

    def __str__(self) -> str:
        ratios = ", ".join(f"{each.phase} {number(each.ratio)}" for each in self.phases)
        return f"corrected by {self.job}, where measured over predicted seconds were: {ratios}"


def measured(run: Path, job: Job, cluster: Cluster) -> Measured:
    """What the job of this name, or else of this algorithm, took in a run folder.

    Raises ConfigError where there is none with a prediction and a step, or where it ran on GPUs of another type.
    """
    record = _record(run, job)
    there = {str(pool["gpu"]) for pool in record.mapping["pools"]}
    here = {group.gpu.name for group in cluster.groups}
    if not there <= here:
        types = ", ".join(sorted(there)), ", ".join(sorted(here))
        raise ConfigError(f"--calibrate {run}: {record.name} ran on {types[0]}, and this plan is for {types[1]}")
    predicted = record.mapping["predicted"]
    before = Correction(predicted["correction"])
    return Measured(
        job=record.name,
        phases=apart(predicted["phases"], record.records),
        correction=correction_of(predicted["phases"], record.records, before=before),
    )


def _record(run: Path, job: Job) -> JobRecord:
    usable = [record for record in read_run(run).jobs if record.records and record.mapping.get("predicted")]
    for record in usable:
        if record.name == job.name:
            return record
    for record in usable:
        if record.algorithm == job.spec.algorithm.name:
            return record
    message = f"has no job named {job.name} or of {job.spec.algorithm.name} with a prediction and a measured step"
    raise ConfigError(f"--calibrate {run}: {message}")
