"""Calibration of a plan by a run: measured over predicted times, and the correction that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.calibration import Compared, compare_phases, correction_of
from rlhf_mapper.coefficients import Correction
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Phase
from rlhf_planning.numbers import number
from rlhf_trainer.report.run_record import JobRecord

MIN_RATIO, MAX_RATIO = 1e-4, 1e4
"""Bounds of measured over predicted seconds; a ratio beyond them comes from a damaged file, not from a slow machine."""
MAX_SECONDS = 1e9


class Pool(BaseModel):
    """Fields of a pool in mapping.json that calibration reads."""

    gpu: str


class Predicted(BaseModel):
    """Fields of the prediction in mapping.json that calibration reads."""

    phases: dict[Phase, Annotated[float, Field(ge=0, le=MAX_SECONDS)]]
    correction: dict[Phase, Annotated[float, Field(ge=MIN_RATIO, le=MAX_RATIO)]]


class MappingFile(BaseModel):
    """Fields of mapping.json that calibration reads."""

    pools: list[Pool]
    predicted: Predicted


@dataclass(frozen=True, kw_only=True)
class RunCalibration:
    """Comparison of a finished or running job with its prediction, and the correction for later predictions."""

    job: str
    phases: Sequence[Compared[Phase]]
    before: Correction
    """Factors that the compared prediction contains."""
    correction: Correction

    def __str__(self) -> str:
        ratios = ", ".join(f"{each.phase} {number(each.ratio)}" for each in self.phases)
        return f"corrected by {self.job}, where measured over predicted seconds were: {ratios}"

    def error(self, correction: Correction) -> float:
        """Return the relative error of the run's predicted seconds, all phases together, under a correction."""
        factors = {each.phase: correction.of(each.phase) / self.before.of(each.phase) for each in self.phases}
        predicted = sum(each.predicted * factors[each.phase] for each in self.phases)
        return predicted / sum(each.measured for each in self.phases) - 1


@dataclass(frozen=True)
class Calibration:
    """Calibration by several runs, at least one."""

    runs: Sequence[RunCalibration]

    @property
    def correction(self) -> Correction:
        return Correction.mean([run.correction for run in self.runs])

    def __str__(self) -> str:
        """Return a line for each run; of several runs, with the error of a prediction by the other runs alone."""
        lines = [str(run) for run in self.runs]
        for place in range(len(self.runs) if len(self.runs) > 1 else 0):
            others = [run.correction for number, run in enumerate(self.runs) if number != place]
            lines[place] += f"; left out, it is predicted {self.runs[place].error(Correction.mean(others)):+.0%} off"
        return "\n".join(lines)


def calibration_of(run: Path, records: Sequence[JobRecord], job: Job, cluster: Cluster) -> RunCalibration:
    """Return the calibration by a run's job: one with the name, or else the algorithm, of `job`. Raises SpecError."""
    algorithm, path = job.spec.algorithm.name, f"--calibrate {run}"
    usable = [record for record in records if record.records and record.mapping.get("predicted")]
    same = [record for record in usable if record.name == job.name]
    same += [record for record in usable if record.algorithm == algorithm]
    if not same:
        message = f"has no job named {job.name} or of {algorithm} with a prediction and a measured step"
        raise SpecError([Problem(path, message)])
    try:
        return _calibration_of(same[0], {group.gpu.name for group in cluster.groups})
    except ValueError as error:
        raise SpecError([Problem(path, f"{same[0].name}{error}")]) from None


def _calibration_of(record: JobRecord, types: set[str]) -> RunCalibration:
    """Compare a job with its prediction. The text of a ValueError is to follow the job's name in a sentence."""
    try:
        mapping = MappingFile.model_validate(record.mapping)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"/mapping.json is damaged: {place}: {first['msg']}") from None
    used = {pool.gpu for pool in mapping.pools}
    if not used <= types:
        raise ValueError(f" ran on {', '.join(sorted(used))}, and this plan is for {', '.join(sorted(types))}")
    _require_seconds(record)
    predicted = mapping.predicted
    phases = [each for each in compare_phases(predicted.phases, record.records) if each.measured]
    if not phases:
        raise ValueError("/metrics.jsonl has no time/<phase> of a phase that was predicted")
    for each in phases:
        if not MIN_RATIO <= each.ratio <= MAX_RATIO:
            wrong = f"{each.ratio:.3g} times what was predicted, expected {MIN_RATIO:g} to {MAX_RATIO:g} times"
            raise ValueError(f"/metrics.jsonl: {each.phase} took {wrong}")
    before = Correction(predicted.correction)
    correction = correction_of(predicted.phases, record.records, before=before)
    return RunCalibration(job=record.name, phases=phases, before=before, correction=correction)


def _require_seconds(record: JobRecord) -> None:
    for row in record.records:
        for name, value in row.items():
            if name.startswith("time/") and not 0 <= value < MAX_SECONDS:
                wrong = f"{name} of step {row['step']} is {str(value)[:20]}, expected seconds"
                raise ValueError(f"/metrics.jsonl: {wrong}")
