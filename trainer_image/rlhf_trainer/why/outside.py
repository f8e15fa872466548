"""Signals of a job that lie outside the range of a healthy run of the same job."""

from typing import NamedTuple

import numpy as np

from rlhf_trainer.why.diagnosis import SIGNALS
from rlhf_trainer.why.seen import Seen

MARGIN = 0.25
"""Share of the healthy run's range by which a value may leave the range."""


class Outside(NamedTuple):
    """Signal outside the range of the healthy run."""

    name: str
    step: int
    """Step from which on the signal stays outside."""
    value: float
    """Median of the signal's latest values."""
    low: float
    high: float


def outside(seen: Seen, healthy: Seen) -> list[Outside]:
    """Return the signals that end outside the healthy run's range, the farthest first, in units of that range."""
    found = []
    for name in dict.fromkeys([*SIGNALS, seen.measure]):
        mine, other = seen.series(name), healthy.series(name)
        if not len(mine) or not len(other):
            continue
        low, high = float(other.values.min()), float(other.values.max())
        room = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9)
        distances = np.maximum(low - mine.values, mine.values - high) / room
        if np.median(distances[-5:]) > MARGIN:
            last_inside = max(np.flatnonzero(distances <= MARGIN), default=-1)
            step = int(mine.steps[min(last_inside + 1, len(mine) - 1)])
            found.append((float(distances[-1]), Outside(name, step, mine.last, low, high)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]
