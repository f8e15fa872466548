"""Finder of a change in a series: a jump between two levels, or a bend between two lines, if one line fits worse."""

from dataclasses import dataclass

import numpy as np

from rlhf_planning.numbers import number
from rlhf_trainer.why.seen import Array, Series

FEWEST = 5
"""Fewest values in which a change is looked for."""
MAX_VALUES = 200
"""Most values in which a change is looked for; a longer series is reduced to means of blocks."""
EVIDENCE = 6.0
"""Least gain in Bayes' information criterion (Schwarz 1978) over one line: strong by the scale of Kass and Raftery."""


@dataclass(frozen=True)
class Change:
    """Change of a metric."""

    name: str
    step: int
    """First step after a jump; for a bend the step at which the direction changes."""
    kind: str
    """`jump` or `bend`."""
    start: float
    """Level before a jump; for a bend the line's value at the first step, within the range of the series."""
    middle: float
    """Level after a jump; for a bend the value at the bend."""
    end: float
    """Level after a jump; for a bend the value at the last step."""
    evidence: float
    """Gain in Bayes' information criterion over one line."""

    def __str__(self) -> str:
        start, middle, end = map(number, (self.start, self.middle, self.end))
        if self.kind == "jump":
            return f"{self.name} went from {start} to {end} at step {self.step}"
        return f"{self.name} went from {start} to {middle} until step {self.step}, and then to {end}"


def change_of(name: str, series: Series) -> Change | None:
    """Return the best single change of a series; None if one line describes it as well, or it is too short."""
    series = _thinned(series)
    if len(series) < FEWEST or np.ptp(series.values) == 0:
        return None
    scale = max(float(np.var(series.values)), 1e-30) * 1e-6  # keeps the evidence of a perfect fit finite
    plain = _criterion(series, _line(series, series.steps), scale, 2)
    found, steps, low, high = [], series.steps, series.values.min(), series.values.max()
    for place in range(2, len(series) - 1):
        since = steps >= steps[place]
        lines = {"jump": _line(series, since), "bend": _line(series, steps, since * (steps - steps[place]))}
        for kind, line in lines.items():
            start, middle, end = (float(np.clip(line[at], low, high)) for at in (0, place, -1))
            gain = plain - _criterion(series, line, scale, 4)
            found.append(Change(name, int(steps[place]), kind, start, middle, end, gain))
    best = max(found, key=lambda each: each.evidence)
    return best if best.evidence > EVIDENCE else None


def _thinned(series: Series) -> Series:
    """Return a long series as means of blocks of steps, at most MAX_VALUES of them, each at its first step."""
    size = -(-len(series) // MAX_VALUES)
    if size <= 1:
        return series
    places = np.arange(0, len(series), size)
    counts = np.diff([*places, len(series)])
    return Series(series.steps[places], np.add.reduceat(series.values, places) / counts)


def _line(series: Series, *slopes: Array) -> Array:
    """Return the values that fit a series best: a constant and a multiple of each of the slopes, by least squares."""
    basis = np.stack([np.ones(len(series)), *slopes], 1)
    return np.asarray(basis @ np.linalg.lstsq(basis, series.values)[0], dtype=np.float64)


def _criterion(series: Series, line: Array, scale: float, parameters: int) -> float:
    rest, count = ((series.values - line) ** 2).mean(), len(series)
    return float(count * np.log(rest + scale) + parameters * np.log(count))
