"""Compares the predicted with the measured times of a job's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mapper.calibration import compare_phases
from rlhf_planning.numbers import duration
from rlhf_trainer.report.run_record import JobRecord


@dataclass(frozen=True)
class Row:
    """A phase, or the whole step."""

    phase: str
    predicted: str
    measured: str
    ratio: str
    """Measured / predicted."""


@dataclass(frozen=True)
class Comparison:
    """A row for each phase that was predicted and measured, and the mapping."""

    rows: Sequence[Row]
    mapping: str
    """Pools and parallel sizes of the models, in one line."""


def comparison(job: JobRecord) -> Comparison | None:
    """None without a prediction, or before the first step."""
    predicted = job.mapping.get("predicted")
    if not predicted:
        return None
    seconds = {**predicted["phases"], "step": predicted["step_seconds"]}
    rows = [
        Row("whole step" if phase == "step" else phase, duration(expected), duration(measured), f"{ratio:.2f}")
        for phase, expected, measured, ratio in compare_phases(seconds, job.records)
    ]
    return Comparison(rows, _line(job.mapping)) if rows else None


def _line(mapping: Mapping[str, Any]) -> str:
    """`2 x cpu-slot: actor 1-1-2, generation 1-1; critic 1-1-2 | 1 x cpu-slot: reward 1-1-1`."""
    return " | ".join(
        f"{pool['gpus']} x {pool['gpu']}: {'; '.join(_sizes(role, mapping['models'][role]) for role in pool['models'])}"
        for pool in mapping["pools"]
    )


def _sizes(role: str, sizes: Mapping[str, Any]) -> str:
    generation = f", generation {sizes['p_g']}-{sizes['t_g']}" if "p_g" in sizes else ""
    return f"{role} {sizes['p']}-{sizes['t']}-{sizes['d']}{generation}"
