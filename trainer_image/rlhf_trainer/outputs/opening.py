"""Outputs of a run: the protocol `Listener`, the options, and the function that opens the requested outputs.

The module of an output is imported only if the output is requested.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem, TrainerError, together, user_error
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


RUN_FOLDER_ONLY = OutputOptions()
ListenersOf = Callable[[Job], list[Listener]]
"""Function that returns the listeners of a job whose first step starts: those of the run, and those in its manifest."""


@contextmanager
def open_listeners(options: OutputOptions, output: Path, warn: Callable[[str], None]) -> Iterator[ListenersOf]:
    """Open the outputs of a run, which write to `output`. EnvironmentProblem if the metrics port cannot be opened."""
    of_run: list[Listener] = [Trace(output, latest=LATEST_STEPS if options.trace else 0)]

    def listeners_of(job: Job) -> list[Listener]:
        found, folder = [*of_run], JobFolder(output, job)
        if options.tensorboard or job.spec.outputs.tensorboard:
            from rlhf_trainer.outputs.event_files import EventFiles

            found.append(EventFiles(output / "tensorboard"))
        if job.spec.outputs.otel:
            from rlhf_trainer.outputs.spans import SpanSender

            found.append(SpanSender(job, folder, warn))
        return found + [Tracker(service, folder, warn) for service in services(job, folder.path)]

    with ExitStack() as stack:
        if options.metrics_port is not None:
            from rlhf_trainer.outputs.metrics import serve_metrics

            of_run.append(stack.enter_context(serve_metrics(options.metrics_port)))
        yield listeners_of


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
    checks = {service.field: service.check for service in services(job, output / job.name)}
    if job.spec.outputs.otel:
        from rlhf_trainer.outputs.spans import FIELD, require_package

        checks[f"{job.name}: {FIELD}"] = require_package
    for field, check in checks.items():
        try:
            check()
        except ModuleNotFoundError as error:
            found.append(EnvironmentProblem(f"{field}: {user_error(error)}"))
        except TrainerError as error:
            found.append(error)
    if found:
        raise together(found)
