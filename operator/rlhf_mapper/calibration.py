"""Comparison of measured phases with predicted ones, and the correction for later predictions."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from rlhf_mapper.coefficients import Correction
from rlhf_mapper.mapping import Phase

WARM_UP, FEW = 2, 4
"""Number of first steps that a calibration leaves out (they compile and allocate) if there are more than FEW steps."""

Name = TypeVar("Name", bound=str)


class Compared(NamedTuple, Generic[Name]):
    """Comparison of a phase: its predicted and its measured seconds in a step, and measured / predicted."""

    phase: Name
    predicted: float
    measured: float
    ratio: float


def compare_phases(predicted: Mapping[Name, float], rows: Sequence[Mapping[str, float]]) -> list[Compared[Name]]:
    """Compare predicted with measured seconds, for the phases that have both.

    predicted: seconds of a step by phase: `phases` of a Prediction (or `predicted.phases` of mapping.json), and `step`
    for the whole step. rows: the records of a job's metrics.jsonl by step, of which `time/<phase>` is read; the
    measured seconds are the median over them.
    """
    steady = rows[WARM_UP:] if len(rows) > FEW else rows
    measured = {phase: [row[f"time/{phase}"] for row in steady if f"time/{phase}" in row] for phase in predicted}
    middle = {phase: median(seconds) for phase, seconds in measured.items() if seconds and predicted[phase] > 0}
    return [Compared(phase, predicted[phase], each, each / predicted[phase]) for phase, each in middle.items()]


def correction_of(
    predicted: Mapping[Phase, float], rows: Sequence[Mapping[str, float]], *, before: Correction | None = None
) -> Correction:
    """Return the factors by which the prediction would have matched the measurement; arguments as of `compare_phases`.

    before: the factors that the prediction was made with (`predicted.correction` of mapping.json), by which the new
    ones are multiplied. A phase without prediction or measurement keeps its old factor. A factor is right for jobs
    whose responses fill the same share of `data.maxResponseTokens`: a prediction without samples assumes a fixed
    share.
    """
    old = before or Correction()
    ratios = {phase: ratio for phase, _, _, ratio in compare_phases(predicted, rows) if ratio > 0}
    return Correction(old.factors | {phase: ratio * old.of(phase) for phase, ratio in ratios.items()})
