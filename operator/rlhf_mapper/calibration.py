"""Comparison of measured phases with predicted ones, and the correction for later predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from rlhf_mapper.coefficients import Correction
from rlhf_mapper.mapping import Kind, Phase

KIND_OF: Mapping[Phase, Kind] = MappingProxyType(
    {"reshard": "transition", "generation": "generation", "scoring": "inference", "update": "training"}
)
"""Kind of work that a phase's correction concerns."""
WARM_UP, FEW = 2, 4
"""The first steps are left out where there are more than a few: they compile, allocate and fill caches."""

Name = TypeVar("Name", bound=str)


class Compared(NamedTuple, Generic[Name]):
    """A phase, its seconds of a step as predicted and as measured, and measured / predicted."""

    phase: Name
    predicted: float
    measured: float
    ratio: float


def compare_phases(predicted: Mapping[Name, float], rows: Sequence[Mapping[str, float]]) -> list[Compared[Name]]:
    """Prediction and measurement side by side, for the phases that have both.

    predicted: seconds of a step by phase: `phases` of a Prediction (or `predicted.phases` of mapping.json), and `step`
    for the whole step. rows: the records of a job's metrics.jsonl by step, of which `time/<phase>` is read; the
    measured seconds are the median over them.
    """
    steady = rows[WARM_UP:] if len(rows) > FEW else rows
    found = []
    for phase, seconds in predicted.items():
        measured = [row[f"time/{phase}"] for row in steady if f"time/{phase}" in row]
        if seconds > 0 and measured:
            middle = median(measured)
            found.append(Compared(phase, seconds, middle, middle / seconds))
    return found


def correction_of(
    predicted: Mapping[Phase, float], rows: Sequence[Mapping[str, float]], *, before: Correction | None = None
) -> Correction:
    """The factors with which the prediction would have been what was measured; arguments as of `compare_phases`.

    before: the factors that the prediction was made with (`predicted.correction` of mapping.json), into which the new
    ones are multiplied; a kind without prediction or measurement keeps its own. The prediction for a run takes every
    response to be as long as `data.maxResponseTokens` allows, so a factor holds how long responses really were, besides
    the speed of the machine: it is right for jobs whose responses fill the same share of that.
    """
    factors = dict((before or Correction()).factors)
    for phase, _, _, ratio in compare_phases(predicted, rows):
        if ratio > 0:
            factors[KIND_OF[phase]] = ratio * factors.get(KIND_OF[phase], 1.0)
    return Correction(factors)
