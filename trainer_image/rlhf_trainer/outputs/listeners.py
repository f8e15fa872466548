"""What an output of a run does, and the outputs that a user asks for; one that is not asked for is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.outputs.trace import LATEST_STEPS, Trace
from rlhf_trainer.telemetry import StepReport


class Listener(Protocol):
    """Told of the jobs of a run, one after the other; it runs between steps, so it must be quick."""

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        """The first step of a job starts now; `first_step` is above 1 when the job was resumed."""

    def step(self, report: StepReport) -> None:
        """A step of that job is done."""

    def end(self, phase: Phase) -> None:
        """The job has ended, perhaps before its first step."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What `rlhf run` shows beside the terminal and the run folder."""

    tensorboard: bool = False
    """Event files of all jobs under DIR/tensorboard/<job>."""
    trace: bool = False
    """The latest steps in DIR/<job>/trace.json, too."""
    metrics_port: int | None = None
    """Port of an HTTP server for Prometheus."""


@contextmanager
def opened(options: OutputOptions, output: Path, warn: Callable[[str], None]) -> Iterator[Sequence[Listener]]:
    """The listeners of a run into the folder `output`, which may `warn`; what they hold open ends with the block.

    Raises EnvironmentProblem when the port cannot be had.
    """
    listeners: list[Listener] = []
    with ExitStack() as stack:
        if options.metrics_port is not None:
            from rlhf_trainer.outputs.metrics import metrics_served

            listeners.append(stack.enter_context(metrics_served(options.metrics_port)))
        from rlhf_trainer.outputs.trackers import JobOutputs

        listeners.append(JobOutputs(output, tensorboard=options.tensorboard, warn=warn))
        listeners.append(Trace(output, latest=LATEST_STEPS if options.trace else 0))
        yield listeners
