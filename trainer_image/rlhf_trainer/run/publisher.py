"""Tells people and files what a run does: every sentence and every step goes to the terminal and the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlhf_api.exit_codes import ExitCode
from rlhf_api.job import Job
from rlhf_trainer.run.display import Display
from rlhf_trainer.run.folder import JobFolder
from rlhf_trainer.run.stopping import Stopped


class Publisher:
    """The terminal and the folder of one job."""

    def __init__(self, job: Job, folder: JobFolder, display: Display) -> None:
        self.folder = folder
        self._job, self._display = job, display
        self._total_steps = 0

    def say(self, message: str) -> None:
        """A line for the terminal and events.log."""
        self.folder.event(message)
        self._display.say(f"{self._job.name}: {message}")

    def begin(self, *, first_step: int, total_steps: int) -> None:
        """The first step of this run starts now."""
        self._total_steps = total_steps
        self._display.begin(first_step)

    def step(self, record: Mapping[str, float], warnings: Sequence[str]) -> None:
        """A step is done: its line, its record, and its warnings."""
        for warning in warnings:
            message = f"step {record['step']:.0f}: {warning}"
            self.folder.event(message)
            self._display.warn(f"{self._job.name} {message}")
        self.folder.record(record, total_steps=self._total_steps, stage=self._job.spec.algorithm.name)
        self._display.step(self._job.name, record, self._total_steps)

    @contextmanager
    def telling_the_end(self) -> Iterator[None]:
        """The job's status says Succeeded when the block ends, or why it did not."""
        try:
            yield
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            code = ExitCode(getattr(error, "exit_code", ExitCode.SIGINT if is_interrupt else ExitCode.INTERNAL))
            stopped = is_interrupt or isinstance(error, Stopped)
            reason = "Stopped" if stopped else code.name.title().replace("_", "")
            self.folder.fail(reason=reason, exit_code=code, message=str(error) or type(error).__name__)
            raise
        self.folder.succeed()
