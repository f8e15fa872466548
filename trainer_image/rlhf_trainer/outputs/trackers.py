"""Trackers of a job: a thread sends the lines of metrics.jsonl to each tracker's service."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from rlhf_api.job import Job
from rlhf_api.own_code import describe_error
from rlhf_api.problems import one_line
from rlhf_api.status import Phase
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.run_folder.attempt import read_object, replace
from rlhf_trainer.run_folder.folder import MAX_REASON, METRICS, JobFolder
from rlhf_trainer.telemetry import StepReport

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a tracker sends again: after its first failure, and at most after several."""
LAST_SECONDS = 15.0
"""Most seconds for which the end of a job waits until a tracker has sent all steps."""
STEPS_AT_ONCE = 20


class Service(Protocol):
    """Protocol of a tracking service; each method may take long, and raise any error of the tracker's library."""

    field: str
    """Job and field of the manifest that name the service, for error messages."""
    target: Mapping[str, Any]
    """Value of the service's field in the manifest; an earlier run continues only if its value is the same."""

    def check(self) -> None:
        """Raise EnvironmentProblem if the package is missing, or the service does not answer."""

    def create(self, job: Job) -> str:
        """Create a run at the tracker, or at least its id, and return the id."""

    def go_on(self, job: Job, run: str) -> None:
        """Open the tracker's run of this id, and send the manifest of the job."""

    def send(self, records: Sequence[Mapping[str, float]]) -> None:
        """Send the metrics of at most STEPS_AT_ONCE steps to the tracker's run."""

    def close(self, phase: Phase) -> None:
        """Close the tracker's run with the phase in which the job ended."""


class Tracker:
    """Listener that sends a job's steps to a service from a thread; only the job's end waits for it, LAST_SECONDS.

    `DIR/<job>/<name>.json`, such as `wandb` or `callbacks-0`, holds the id of the run and the last step that was sent.
    The next attempt continues with both, so a step that is repeated after a checkpoint is not sent again.
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

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:  # noqa: ARG002 metrics.jsonl has the steps
        self._job, self._run, self._step = job, "", 0
        with suppress(ValueError, TypeError, LookupError):  # without a readable state the run is new
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
        if self._thread.is_alive():
            steps = sum(1 for _ in self._unsent())
            missing = f"{steps} of the steps" if steps else "the end of the run"
            tries = f"after {self._failures} failed tries" if self._failures else "and does not answer"
            self._say(f"has not got {missing}, {tries}")
        elif self._failures:
            self._say(f"has all steps, after {self._failures} failed tries")

    def _work(self) -> None:
        """Send new steps until the job has ended and all steps are sent, or the job's end has waited long enough."""
        pause = FIRST_PAUSE
        while not self._over.is_set():
            try:
                if self._send_all():
                    return
                pause = FIRST_PAUSE
                self._more.wait()
                self._more.clear()
            except Exception as error:  # noqa: BLE001 whatever it is, training goes on
                self._failures += 1
                if self._failures == 1:
                    prefix = f"{self._service.field}: "  # a callback's error begins with it already
                    is_ours = isinstance(error, TrainerError)
                    text = str(error).removeprefix(prefix) if is_ours else describe_error(error)
                    self._say(f"{one_line(text, MAX_REASON)}; training goes on, and it is tried again")
                if self._ended.wait(pause):
                    time.sleep(FIRST_PAUSE)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _send_all(self) -> bool:
        """Send all steps that are not sent yet; return True if the job had ended before."""
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
        """Yield (byte offset of the line's end, record) for each whole line of metrics.jsonl that was not sent."""
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

    def _say(self, message: str) -> None:
        report_output(self._folder, self._warn, self._service.field, message)


def report_output(folder: JobFolder, warn: Callable[[str], None], field: str, message: str) -> None:
    """Write a line about an output to the terminal, and to events.log if this attempt still owns the folder.

    field: job and field of the manifest, as `Service.field`.
    """
    with suppress(OSError, TrainerError):
        folder.event(f"{field.rpartition(': ')[2]}: {message}")
    warn(f"{field}: {message}")
