"""Display of a run without a terminal: one line a step, and a table at the end."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_api.tables import read_table
from rlhf_planning.command_line import silence
from rlhf_trainer.telemetry import StepReport

SHOWN = read_table(__package__, "shown_metrics.yaml", dict[str, tuple[str, str]])
"""Metrics on the printed line of a step: name in metrics.jsonl -> label and format."""


class LastingConsole(Console):
    """Console that falls silent when its reader is gone: a run goes on without its terminal, or without `tee`."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stdout)


class Display:
    """Listener that prints one line for each step, for people; programs read the run folder instead."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._name = ""
        self._started, self._first_step, self._total_steps = 0.0, 1, 0

    @contextmanager
    def showing(self, pending: Sequence[Job]) -> Iterator[None]:  # noqa: ARG002 lines say only what happens
        """Keep a redrawn view of the run on the terminal during the block (here none); pending: jobs to run."""
        yield

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self.console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        """Start the clock by which "time left" is estimated, before the job's first step in this run."""
        self._name = job.name
        self._started, self._first_step, self._total_steps = time.monotonic(), first_step, total_steps

    def step(self, report: StepReport) -> None:
        """Print the line of a step: job, step of total, metrics, time left."""
        record, number = report.record, int(report.record["step"])
        shown = [f"{label} {record[key]:{form}}" for key, (label, form) in SHOWN.items() if key in record]
        steps, left = f"{number:>4}/{self._total_steps}", clock(self.seconds_left(number))
        self.say(f"{self._name:<14} {steps}  {'  '.join(shown)}  left {left}")

    def end(self, phase: Phase) -> None:
        """Do nothing at the end of a job: its printed lines remain on the terminal."""

    def seconds_left(self, number: int) -> float:
        """Return the seconds that the job's steps after step `number` take at the mean pace of this run."""
        spent = time.monotonic() - self._started
        return spent / (number - self._first_step + 1) * (self._total_steps - number)

    def table(self, summary: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the measures of each job, before and after training; a measure taken once stands under "after"."""
        before, after = Column("before", justify="right"), Column("after", justify="right")
        table = Table("job", "measure", before, after, title="Measured")
        for name, values in summary.items():
            measured = {key: value for key, value in values.items() if isinstance(value, float)}
            for key, value in measured.items():
                measure = key.removesuffix("_before")
                if measure != key:
                    table.add_row(name, measure, f"{value:.3f}", f"{values[measure + '_after']:.3f}")
                elif key == "win_rate":
                    null = f"{values['win_rate_null']:.3f} (itself)"
                    table.add_row(name, "win rate against before", null, f"{value:.3f}")
                elif key not in ("steps", "seconds", "seed", "win_rate_null") and not key.endswith("_after"):
                    table.add_row(name, key, "", f"{value:.3f}")
        if table.row_count:
            self.console.print(table, soft_wrap=True)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as `2:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
