"""Tells people and files what a run does: every sentence and every step goes to the terminal and the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_api.job import Job
from rlhf_trainer.run.display import Display
from rlhf_trainer.run.folder import JobFolder


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

    def begin(self, *, total_steps: int) -> None:
        """The first step starts now."""
        self._total_steps = total_steps
        self._display.begin()

    def step(self, record: Mapping[str, float], warnings: Sequence[str]) -> None:
        """A step is done: its line, its record, and its warnings."""
        for warning in warnings:
            message = f"step {record['step']:.0f}: {warning}"
            self.folder.event(message)
            self._display.warn(f"{self._job.name} {message}")
        self.folder.record(record, total_steps=self._total_steps, stage=self._job.spec.algorithm.name)
        self._display.step(self._job.name, record, self._total_steps)
