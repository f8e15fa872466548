"""Displays of a run: a line a step and a table at the end or, in a terminal, the chain with bars and metrics."""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rlhf_api.job import Job
from rlhf_api.status import Phase
from rlhf_api.tables import read_table
from rlhf_planning.command_line import silence
from rlhf_planning.comparison import before_and_after
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
            starts, ends = before_and_after(values)
            for measure, value in ends.items():
                shown = "win rate against before" if measure == "win_rate" else measure
                table.add_row(name, shown, f"{starts[measure]:.3f}" if measure in starts else "", f"{value:.3f}")
        if table.row_count:
            self.console.print(table, soft_wrap=True)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as `2:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


POINTS = 47
"""Most points of a metric's sparkline."""
BAR = 24
BLOCKS = "▁▂▃▄▅▆▇"
"""Characters of a sparkline, lowest first; without the full block, so that a line does not touch the line above."""
_STYLES = read_table(__package__, "styles.yaml", dict[str, dict[str, str]])
STATES, PHASE_COLORS = _STYLES["states"], _STYLES["phases"]
"""State of a job in the display -> its style of text; phase of a step -> its colour."""
MIN_SHARE = 0.01
"""Share of the steps' time below which a phase is not shown."""
STATE_OF: dict[Phase, str] = {"Succeeded": "done", "Failed": "failed", "Stopped": "stopped"}
PADDING = (0, 2, 0, 0)
Whole = partial(Column, no_wrap=True)
Right = partial(Whole, justify="right")


def points_of(values: Sequence[float]) -> list[float]:
    """Return the values of all steps as at most POINTS means, each of about equally many steps."""
    return [float(part.mean()) for part in np.array_split(values, min(len(values), POINTS))]


def sparkline(values: Sequence[float]) -> str:
    """Return a sparkline: for each value a block, higher for larger values, or a space if the value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


@dataclass
class JobView:
    """State of one job of a run's chain, as the display shows it."""

    name: str
    algorithm: str
    state: str = "waiting"
    step: int = 0
    total_steps: int = 0
    since: float = 0.0
    """Start of the job on the monotonic clock."""
    seconds: float | None = None
    left: float | None = None
    histories: dict[str, list[float]] = field(default_factory=dict)
    """Values of each shown metric in all steps so far."""
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the job spent in each phase of its steps, over all steps so far."""


class LiveDisplay(Display):
    """Display that is redrawn in place; sentences and warnings appear above it and stay."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        super().__init__(console)
        self._chain = [JobView(job.name, job.spec.algorithm.name, state="done") for job in jobs]
        self._current = self._chain[0]

    @contextmanager
    def showing(self, pending: Sequence[Job]) -> Iterator[None]:
        names = {job.name for job in pending}
        for view in self._chain:
            view.state = "waiting" if view.name in names else "done"
        self._next()
        with Live(self, console=self.console, refresh_per_second=1.0):
            yield
        self.say("")

    def begin(self, job: Job, *, first_step: int, total_steps: int) -> None:
        super().begin(job, first_step=first_step, total_steps=total_steps)
        self._current.state, self._current.total_steps = "running", total_steps
        self._current.step = first_step - 1

    def step(self, report: StepReport) -> None:
        view, record = self._current, report.record
        view.step = int(record["step"])
        view.left = self.seconds_left(view.step)
        for name in record.keys() & SHOWN.keys():
            view.histories.setdefault(name, []).append(record[name])
        for name in record.keys() - {"time/step"}:
            if name.startswith("time/"):
                view.phases[name.removeprefix("time/")] += record[name]
        if view.step == view.total_steps:
            view.state = "finishing"

    def end(self, phase: Phase) -> None:
        self._current.state = STATE_OF[phase]
        self._current.seconds = time.monotonic() - self._current.since
        if phase == "Succeeded":
            self._next()

    def _next(self) -> None:
        if waiting := [view for view in self._chain if view.state == "waiting"]:
            self._current = waiting[0]
            self._current.state, self._current.since = "starting", time.monotonic()

    def __rich__(self) -> RenderableType:
        chain, shown = chain_table(self._chain), self._current
        return Group(chain, "", history_table(shown), phase_table(shown)) if shown.histories else chain


def chain_table(chain: Sequence[JobView]) -> Table:
    """Return the table of a chain, with a row for each job: name, algorithm, state, bar, steps, time spent and left."""
    columns = (Whole(), Whole(), Whole(min_width=max(map(len, STATES))), Column(), Right(), Right(), Whole())
    table = Table.grid(*columns, padding=PADDING)  # the bar gets narrower where there is little room
    for view in chain:
        is_current = view.state in ("starting", "running", "finishing")
        seconds = time.monotonic() - view.since if is_current else view.seconds
        table.add_row(
            Text(view.name, "bold" if is_current else ""),
            view.algorithm,
            Text(view.state, STATES[view.state]),
            ProgressBar(view.total_steps, view.step, BAR, complete_style="cyan", finished_style="green")
            if view.total_steps
            else "",
            f"{view.step}/{view.total_steps}" if view.total_steps else "",
            "" if seconds is None else clock(seconds),
            f"left {clock(view.left)}" if view.state == "running" and view.left is not None else "",
        )
    return table


def history_table(view: JobView) -> Table:
    """Return the table of a job's metrics with a row for each: label, latest value, sparkline over the steps, range."""
    table = Table.grid(Whole(), Right(), Whole(style="cyan"), Whole(style="dim"), padding=PADDING)
    for name, (label, form) in SHOWN.items():
        if values := view.histories.get(name):
            points = points_of(values)
            finite = [point for point in points if math.isfinite(point)]
            span = f"{min(finite):{form}} to {max(finite):{form}}" if finite else ""
            table.add_row(label, f"{values[-1]:{form}}", sparkline(points), span)
    return table


def phase_table(view: JobView) -> Table:
    """Return a table with each phase's share of the time of a job's steps, largest first, as a bar and in words."""
    total, bar, words = sum(view.phases.values()), Text(), []
    for name, seconds in sorted(view.phases.items(), key=lambda phase: -phase[1]):
        if seconds and (share := seconds / total) >= MIN_SHARE:
            bar.append("█" * round(share * BAR), color := PHASE_COLORS.get(name, "white"))
            words.append(Text(f"{name} {share:.0%}", color, no_wrap=True))
    table = Table.grid(Whole(), Whole(), Column(), padding=PADDING)
    table.add_row("time", bar, Columns(words, padding=(0, 2)))
    return table


def display_for(jobs: Sequence[Job]) -> Display:
    """Return the live display in a terminal, else one of plain lines."""
    console = LastingConsole(highlight=False)
    is_terminal = sys.stdout.isatty() and console.is_interactive  # with FORCE_COLOR the second is true for a pipe
    return LiveDisplay(console, jobs) if is_terminal else Display(console)
