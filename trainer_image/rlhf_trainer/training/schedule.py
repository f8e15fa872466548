"""The learning rate of a step."""

from __future__ import annotations

import math
from numbers import Real

from rlhf_api.spec.job_spec import Optimizer
from rlhf_trainer.errors import UserCodeError
from rlhf_trainer.own_code import own_code

COSINE_FLOOR = 0.1
"""Share of the peak learning rate at which the cosine schedule ends."""


def learning_rate(settings: Optimizer, step: int, *, total_steps: int, path: str) -> float:
    """The rate of a step (from 1): the peak, times a linear warm-up, times what the schedule says.

    That is 1, a cosine down to a tenth, or what the user's function(step, total_steps) returns. path: of the model in
    the manifest. UserCodeError if that function fails, or returns no number of at least 0.
    """
    warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    rate = settings.learning_rate * warm
    if settings.schedule == "Constant":
        return rate
    if settings.schedule == "Cosine":
        done = max(0, step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
        return rate * (COSINE_FLOOR + (1.0 - COSINE_FLOOR) * (0.5 * (1.0 + math.cos(math.pi * done))))
    return rate * _own_factor(settings.schedule, step, total_steps, f"{path}.optimizer.schedule")


def _own_factor(entrypoint: str, step: int, total_steps: int, path: str) -> float:
    with own_code(entrypoint, path) as factor:
        found = factor(step, total_steps)
    if not (isinstance(found, Real) and math.isfinite(found) and float(found) >= 0):
        said = f"returned {found!r:.100} for step {step} of {total_steps}, expected a number of at least 0"
        raise UserCodeError(f"{path}: {entrypoint} {said}")
    return float(found)
