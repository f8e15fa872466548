"""What the steps of this process take, few numbers of it, for whoever compares them with what was predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from rlhf_api.status import Pace, PhaseSeconds
from rlhf_mapper.calibration import WARM_UP
from rlhf_mapper.mapping import PHASES

FEWEST, LATEST = 5, 10
"""Steps of which medians are told: at least, and at most."""


class Steps:
    """The latest steps of a process, without its first ones: they compile, allocate and fill caches."""

    def __init__(self) -> None:
        self._cold = WARM_UP
        self._latest: deque[Mapping[str, float]] = deque(maxlen=LATEST)

    def pace(self, record: Mapping[str, float]) -> Pace | None:
        """That of the job with one more step, whose record this is; None as long as there are too few."""
        if self._cold:
            self._cold -= 1
            return None
        self._latest.append(record)
        if len(self._latest) < FEWEST or (step := self._median("time/step")) is None:
            return None
        phases = ((phase, self._median(f"time/{phase}")) for phase in PHASES)
        return Pace(
            step_seconds=step,
            response_tokens=self._median("response_length/mean"),
            phases=tuple(PhaseSeconds(phase=phase, seconds=seconds) for phase, seconds in phases if seconds),
        )

    def _median(self, name: str) -> float | None:
        """None of what was not measured."""
        known = [record[name] for record in self._latest if name in record]
        return float(f"{median(known):.4g}") if known else None
