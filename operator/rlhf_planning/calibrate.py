"""How far the times of a run were from what was predicted for it, and the correction that follows for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, Field, ValidationError

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.calibration import Compared, compare_phases, correction_of
from rlhf_mapper.coefficients import Correction
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Kind, Phase
from rlhf_planning.numbers import number

LEAST, MOST = 1e-4, 1e4
"""Measured over predicted seconds beyond these are a damaged file, not a slow machine."""
LONGEST = 1e9
"""Seconds."""


class Pool(BaseModel):
    """What is read of a pool in mapping.json."""

    gpu: str


class Predicted(BaseModel):
    """What is read of the prediction in mapping.json."""

    phases: dict[Phase, Annotated[float, Field(ge=0, le=LONGEST)]]
    correction: dict[Kind, Annotated[float, Field(ge=LEAST, le=MOST)]]


class MappingFile(BaseModel):
    """What is read of mapping.json."""

    pools: list[Pool]
    predicted: Predicted


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a job of a run folder says of the predictions."""

    job: str
    phases: Sequence[Compared[Phase]]
    correction: Correction

    def __str__(self) -> str:
        ratios = ", ".join(f"{each.phase} {number(each.ratio)}" for each in self.phases)
        return f"corrected by {self.job}, where measured over predicted seconds were: {ratios}"


class JobRecord(Protocol):
    """What is read of a job in a run folder, as `rlhf report` reads it."""

    name: str
    records: list[dict[str, float]]
    """Lines of metrics.jsonl by step."""
    mapping: Mapping[str, Any]
    """mapping.json."""

    @property
    def algorithm(self) -> str: ...


def measured(run: Path, records: Sequence[JobRecord], job: Job, cluster: Cluster) -> Measured:
    """What the job of this name, or else of this algorithm, took in a run folder, which holds these records.

    Raises SpecError where there is none with a prediction and a step, where it ran on GPUs of another type, or where
    its files are damaged.
    """
    algorithm, path = job.spec.algorithm.name, f"--calibrate {run}"
    usable = [record for record in records if record.records and record.mapping.get("predicted")]
    same = [record for record in usable if record.name == job.name]
    same += [record for record in usable if record.algorithm == algorithm]
    if not same:
        message = f"has no job named {job.name} or of {algorithm} with a prediction and a measured step"
        raise SpecError([Problem(path, message)])
    try:
        return _measured(same[0], {group.gpu.name for group in cluster.groups})
    except ValueError as error:
        raise SpecError([Problem(path, f"{same[0].name}{error}")]) from None


def _measured(record: JobRecord, here: set[str]) -> Measured:
    """ValueError, the rest of a sentence that begins with the record's name; here: the types of the cluster's GPUs."""
    try:
        mapping = MappingFile.model_validate(record.mapping)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"/mapping.json is damaged: {place}: {first['msg']}") from None
    there = {pool.gpu for pool in mapping.pools}
    if not there <= here:
        raise ValueError(f" ran on {', '.join(sorted(there))}, and this plan is for {', '.join(sorted(here))}")
    for row in record.records:
        for name, value in row.items():
            if name.startswith("time/") and not 0 <= value < LONGEST:
                wrong = f"{name} of step {row['step']} is {str(value)[:20]}, expected seconds"
                raise ValueError(f"/metrics.jsonl: {wrong}")
    predicted = mapping.predicted
    phases = [each for each in compare_phases(predicted.phases, record.records) if each.measured]
    if not phases:
        raise ValueError("/metrics.jsonl has no time/<phase> of a phase that was predicted")
    for each in phases:
        if not LEAST <= each.ratio <= MOST:
            wrong = f"{each.ratio:.3g} times what was predicted, expected {LEAST:g} to {MOST:g} times"
            raise ValueError(f"/metrics.jsonl: {each.phase} took {wrong}")
    correction = correction_of(predicted.phases, record.records, before=Correction(predicted.correction))
    return Measured(job=record.name, phases=phases, correction=correction)
