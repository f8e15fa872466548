"""Finder of a change in a series: a jump between two levels, or a bend between two lines, where one line is worse."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlhf_planning.numbers import number
from rlhf_trainer.why.seen import Array, Series

FEWEST = 5
"""Fewest values in which a change is looked for."""
MAX_VALUES = 200
"""Most values in which a change is looked for; of a longer series the means of blocks."""
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
    """Level before a jump; for a bend the line's value at the first step."""
    middle: float
    """Level after a jump; for a bend the value at the bend."""
    end: float
    """Level after a jump; for a bend the value at the last step."""
    evidence: float = 0.0
    """Gain in Bayes' information criterion over one line."""

    def __str__(self) -> str:
        start, middle, end = map(number, (self.start, self.middle, self.end))
        if self.kind == "jump":
            return f"{self.name} went from {start} to {end} at step {self.step}"
        return f"{self.name} went from {start} to {middle} until step {self.step}, and then to {end}"


def change_of(name: str, series: Series) -> Change | None:
    """Return the best single change of a series; None if one line describes it as well, or it is too short."""
    series = _thinned(series)
    count = len(series)
    if count < FEWEST or np.ptp(series.values) == 0:
        return None
    scale = max(float(np.var(series.values)), 1e-30) * 1e-6  # a perfect fit is no infinite evidence
    plain = _criterion(_residue(np.stack([np.ones(count), series.steps], 1), series.values), scale, count, 2)
    found = [(_criterion(rest, scale, count, 4), change) for rest, change in _candidates(name, series)]
    best, change = min(found, key=lambda each: each[0])
    return replace(change, evidence=plain - best) if plain - best > EVIDENCE else None


def _thinned(series: Series) -> Series:
    """Return a long series as means of blocks of steps, at most MAX_VALUES of them, each at its first step."""
    size = -(-len(series) // MAX_VALUES)
    if size <= 1:
        return series
    places = np.arange(0, len(series), size)
    counts = np.diff([*places, len(series)])
    return Series(series.steps[places], np.add.reduceat(series.values, places) / counts)


def _candidates(name: str, series: Series) -> Iterator[tuple[float, Change]]:
    """Yield (sum of squared residues, change) for a jump and a bend at each step."""
    steps, values = series.steps, series.values
    for place in range(2, len(series) - 1):
        start, end = float(values[:place].mean()), float(values[place:].mean())
        rest = ((values[:place] - start) ** 2).sum() + ((values[place:] - end) ** 2).sum()
        yield float(rest), Change(name, int(steps[place]), "jump", start, end, end)
        basis = np.stack([np.ones(len(series)), steps, np.maximum(steps - steps[place], 0.0)], 1)
        line = basis @ np.linalg.lstsq(basis, values)[0]
        levels = (float(line[at]) for at in (0, place, -1))
        yield float(((values - line) ** 2).sum()), Change(name, int(steps[place]), "bend", *levels)


def _residue(basis: Array, values: Array) -> float:
    return float(((values - basis @ np.linalg.lstsq(basis, values)[0]) ** 2).sum())


def _criterion(rest: float, scale: float, count: int, parameters: int) -> float:
    return float(count * np.log(rest / count + scale) + parameters * np.log(count))
