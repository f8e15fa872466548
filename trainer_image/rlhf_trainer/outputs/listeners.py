"""Protocol of an output of a run, and the outputs that the command line adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.telemetry import StepReport


class Listener(Protocol):
    """Receiver of the steps of a run's jobs, one job after the other; methods run between steps and must be quick."""

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        """Receive a job whose first step starts now; `first_step` is above 1 for a resumed job."""

    def step(self, report: StepReport) -> None:
        """Receive the report of a finished step of the job."""

    def end(self, phase: Phase) -> None:
        """Receive the end of the job, perhaps before its first step."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Outputs of `rlhf run` besides the terminal and the run folder."""

    tensorboard: bool = False
    """Whether all jobs write event files under DIR/tensorboard/<job>."""
    trace: bool = False
    """Whether DIR/<job>/trace.json also holds the latest steps."""
    metrics_port: int | None = None
    """Port on which Prometheus reads metrics; None: no port."""
