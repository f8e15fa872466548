"""Pace of a process: medians of its latest steps, for comparison with a prediction."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from rlhf_api.status import Pace, PhaseSeconds
from rlhf_mapper.calibration import WARM_UP
from rlhf_mapper.mapping import PHASES

MIN_STEPS, MAX_STEPS = 5, 10
"""Smallest and largest number of latest steps over which a median is taken."""


class Steps:
    """Latest steps of a process, without the first ones, which compile, allocate and fill caches."""

    def __init__(self) -> None:
        self._cold = WARM_UP
        self._latest: deque[Mapping[str, float]] = deque(maxlen=MAX_STEPS)

    def pace(self, record: Mapping[str, float]) -> Pace | None:
        """Add the metrics of a step and return the pace; None while there are too few steps."""
        if self._cold:
            self._cold -= 1
            return None
        self._latest.append(record)
        if len(self._latest) < MIN_STEPS or (step := self._median("time/step")) is None:
            return None
        phases = ((phase, self._median(f"time/{phase}")) for phase in PHASES)
        return Pace(
            step_seconds=step,
            response_tokens=self._median("response_length/mean"),
            phases=tuple(PhaseSeconds(phase=phase, seconds=seconds) for phase, seconds in phases if seconds),
        )

    def _median(self, name: str) -> float | None:
        values = [record[name] for record in self._latest if name in record]
        return float(f"{median(values):.4g}") if values else None
