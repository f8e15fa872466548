"""What an output of a run is told."""

from __future__ import annotations

from typing import Protocol

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.telemetry import StepReport


class Listener(Protocol):
    """Told of the jobs of a run, one after the other; it runs between steps, so it must be quick."""

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        """The first step of a job starts now; `first_step` is above 1 when the job was resumed."""

    def step(self, report: StepReport) -> None:
        """A step of that job is done."""

    def end(self, phase: Phase) -> None:
        """The job has ended, perhaps before its first step."""
