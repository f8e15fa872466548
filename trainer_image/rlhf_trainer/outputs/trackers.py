"""What a job's `outputs` ask for: event files, and trackers, each of which a thread tells what metrics.jsonl holds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rlhf_api.job import Job
from rlhf_api.own_code import said
from rlhf_api.problems import one_line
from rlhf_api.status import Phase
from rlhf_trainer.errors import EnvironmentProblem, TrainerError, together
from rlhf_trainer.outputs.callbacks import Callback
from rlhf_trainer.outputs.listeners import Listener
from rlhf_trainer.run_folder.attempt import read_object, replace
from rlhf_trainer.run_folder.folder import LONGEST_REASON, METRICS, JobFolder
from rlhf_trainer.telemetry import StepReport

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a first and after many failed tries."""
LAST_SECONDS = 15.0
"""How long the end of a job waits for a tracker."""
STEPS_AT_ONCE = 20


class Service(Protocol):
    """Runs in a tracker; each method may take long and raise whatever the tracker's library raises."""

    field: str
    """The job and the field that asks for it, for messages."""
    target: Mapping[str, Any]
    """The field's value: a run is gone on with only where this is the same."""

    def check(self) -> None:
        """EnvironmentProblem if its package is missing, or it does not answer."""

    def create(self, job: Job) -> str:
        """Make a run, or at least its id."""

    def go_on(self, job: Job, run: str) -> None:
        """Open the run, and say what the job is."""

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        """Add steps to the run, at most STEPS_AT_ONCE."""

    def close(self, phase: Phase) -> None:
        """The run has ended so."""


class Tracker:
    """Tells a service the steps of one job; training never waits for it, but for LAST_SECONDS at its end.

    `DIR/<job>/<name>.json`, such as `wandb` or `callbacks-0`, holds the id of the run and the last step that is there.
    The next attempt goes on with both, so a step that is repeated after a checkpoint is not sent again.
    """

    def __init__(self, service: Service, folder: JobFolder, warn: Callable[[str], None]) -> None:
        self._service, self._folder, self._warn = service, folder, warn
        name = service.field.partition("spec.outputs.")[2].replace(".", "-")
        self._state_file = folder.path / f"{name}.json"
        self._more, self._ended, self._over = threading.Event(), threading.Event(), threading.Event()
        self._phase: Phase = "Running"
        self._position = 0
        self._is_open = False
        self._failures = 0

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 the file says the steps
        self._job, self._run, self._step = job, "", 0
        with suppress(ValueError, TypeError, LookupError):  # no state, or none that can be read, is a new run
            state = read_object(self._state_file)
            if state["target"] == self._service.target:
                self._run, self._step = str(state["run"]), int(state["step"])
        self._thread = threading.Thread(target=self._work, name=self._service.field, daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:  # noqa: ARG002 metrics.jsonl holds it
        self._more.set()

    def end(self, phase: Phase) -> None:
        self._phase = phase
        self._ended.set()
        self._more.set()
        self._thread.join(LAST_SECONDS)
        self._over.set()
        if missing := self._missing():
            tries = f"after {self._failures} failed tries" if self._failures else "and does not answer"
            self._say(f"has not got {missing}, {tries}")
        elif self._failures:
            self._say(f"has all steps, after {self._failures} failed tries")

    def _missing(self) -> str:
        """What the tracker was not told, in words."""
        if not self._thread.is_alive():
            return ""
        steps = sum(1 for _ in self._unsent())
        return f"{steps} of the steps" if steps else "the end of the run"

    def _work(self) -> None:
        """Send what there is until the job has ended and all is sent, or there is no more time."""
        pause = FIRST_PAUSE
        while not self._over.is_set():
            try:
                if self._told_all():
                    return
                pause = FIRST_PAUSE
                self._more.wait()
                self._more.clear()
            except Exception as error:  # noqa: BLE001 whatever it is, training goes on
                self._failed(error)
                if self._ended.wait(pause):
                    time.sleep(FIRST_PAUSE)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _told_all(self) -> bool:
        """Tell all that is to be told now; True if that was the last."""
        has_ended = self._ended.is_set()
        if not self._run:
            self._run = self._service.create(self._job)
            self._save()
        if not self._is_open:
            self._service.go_on(self._job, self._run)
            self._is_open = True
        while lines := list(islice(self._unsent(), STEPS_AT_ONCE)):
            self._service.send([record for _, record in lines])
            self._position, self._step = lines[-1][0], int(lines[-1][1]["step"])
            self._save()
        if has_ended:
            self._service.close(self._phase)
        return has_ended

    def _unsent(self) -> Iterator[tuple[int, Mapping[str, float]]]:
        """(where it ends in the file, record) of each whole line of metrics.jsonl that was not sent."""
        path, end = self._folder.path / METRICS, self._position
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                if (record := json.loads(line))["step"] > self._step:
                    yield end, record

    def _save(self) -> None:
        self._folder.require_ours()
        state = {"run": self._run, "step": self._step, "target": self._service.target}
        replace(self._state_file, json.dumps(state) + "\n")

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            told = f"{self._service.field}: "  # in the errors of a callback
            text = str(error).removeprefix(told) if isinstance(error, TrainerError) else said(error)
            reason = one_line(text, LONGEST_REASON)
            self._say(f"{reason}; training goes on, and it is tried again")

    def _say(self, message: str) -> None:
        """A line for the terminal and events.log, if the folder is still ours."""
        path, _, field = self._service.field.rpartition(": ")
        with suppress(OSError, TrainerError):
            self._folder.event(f"{field}: {message}")
        self._warn(f"{path}: {field}: {message}")


class JobOutputs:
    """The outputs of the job that runs: those of its manifest, and event files where all jobs write them."""

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
    """The trackers that a job asks for; `folder` is for what they keep on this machine."""
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
    """EnvironmentProblem for all trackers of the job whose package is missing, or that do not answer."""
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
