"""Outputs of a run: the protocol `Listener`, the options, and the function that opens the requested outputs.

The module of an output is imported only if the output is requested.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem, TrainerError, together
from rlhf_trainer.outputs.callbacks import Callback
from rlhf_trainer.outputs.trace import LATEST_STEPS, Trace
from rlhf_trainer.outputs.trackers import Service, Tracker
from rlhf_trainer.run_folder.folder import JobFolder
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
    trace: bool = False
    """Whether DIR/<job>/trace.json also holds the latest steps."""
    metrics_port: int | None = None


@contextmanager
def open_listeners(options: OutputOptions, output: Path, warn: Callable[[str], None]) -> Iterator[Sequence[Listener]]:
    """Open the listeners of a run, which write to `output`. EnvironmentProblem if the metrics port cannot be opened."""
    listeners: list[Listener] = []
    with ExitStack() as stack:
        if options.metrics_port is not None:
            from rlhf_trainer.outputs.metrics import serve_metrics

            listeners.append(stack.enter_context(serve_metrics(options.metrics_port)))
        listeners.append(JobOutputs(output, tensorboard=options.tensorboard, warn=warn))
        listeners.append(Trace(output, latest=LATEST_STEPS if options.trace else 0))
        yield listeners


class JobOutputs:
    """Listener that passes a job's steps to the outputs in its manifest; tensorboard: every job has event files."""

    def __init__(self, output: Path, *, tensorboard: bool, warn: Callable[[str], None]) -> None:
        self._output, self._tensorboard, self._warn = output, tensorboard, warn
        self._listeners: list[Listener] = []

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        if self._tensorboard or job.spec.outputs.tensorboard:
            from rlhf_trainer.outputs.event_files import EventFiles

            self._listeners.append(EventFiles(self._output / "tensorboard"))
        folder = JobFolder(self._output, job)
        self._listeners += [Tracker(service, folder, self._warn) for service in services(job, folder.path)]
        for listener in self._listeners:
            listener.begin(job, first_step=first_step, total_steps=total_steps)

    def step(self, report: StepReport) -> None:
        for listener in self._listeners:
            listener.step(report)

    def end(self, phase: Phase) -> None:
        ending, self._listeners = self._listeners, []
        for listener in ending:
            listener.end(phase)


def services(job: Job, folder: Path) -> list[Service]:
    """Return the tracking services that a job's manifest names; `folder` is for their local files."""
    found: list[Service] = []
    if wandb := job.spec.outputs.wandb:
        from rlhf_trainer.outputs.wandb_runs import WandBRuns

        found.append(WandBRuns(f"{job.name}: spec.outputs.wandb", wandb, folder))
    if mlflow := job.spec.outputs.mlflow:
        from rlhf_trainer.outputs.mlflow_runs import MLflowRuns

        found.append(MLflowRuns(f"{job.name}: spec.outputs.mlflow", mlflow))
    for place, callback in enumerate(job.spec.outputs.callbacks):
        found.append(Callback(f"{job.name}: spec.outputs.callbacks.{place}", callback, folder))
    return found


def require_trackers(job: Job, output: Path) -> None:
    """Raise one error that names all trackers of a job with a missing package, a wrong class or no answer."""
    found: list[TrainerError] = []
    for service in services(job, output / job.name):
        try:
            service.check()
        except ModuleNotFoundError as error:
            package = f"the Python package {error.name} is not installed; it is in rlhf-operator[trackers]"
            found.append(EnvironmentProblem(f"{service.field}: {package}"))
        except TrainerError as error:
            found.append(error)
    if found:
        raise together(found)
