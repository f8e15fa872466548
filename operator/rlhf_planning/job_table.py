"""Table of jobs for `rlhf top` and `kubectl rlhf top`."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf_api.status import Metric, Status
from rlhf_planning.numbers import between, number

REFRESH_SECONDS: Final = 2.0
WIDE: Final = 100
"""Terminal width in columns from which on the table shows the algorithm and wider gaps."""
MIN_NAME: Final = 8
NOTHING: Final = "-"
STYLES: Final = {"Running": "green", "Succeeded": "dim", "Stopped": "yellow"} | dict.fromkeys(
    ("Failed", "Died", "Damaged"), "bold red"
)
"""Phase of a job -> style of its text in the table."""
UNITS: Final = (("d", 86400, 3600), ("h", 3600, 60), ("m", 60, 1))
"""(unit of a duration, seconds in it, seconds in the next smaller unit), the largest unit first."""


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """Row of the job table: one job."""

    name: str
    """Name of the job, with its run folder or namespace before it if the table shows several of these."""
    algorithm: str
    phase: str
    """Phase in the job's status, or a word for a state that the status cannot record, such as Died."""
    status: Status
    began: str | None
    """Time at which a local job started, or a job of a cluster was created (RFC 3339)."""


def show(read: Callable[[], Sequence[JobLine]], nothing: str, *, once: bool, passing: type[Exception]) -> None:
    """Print the job table: in a terminal again and again until Ctrl-C, elsewhere or with `once` a single time.

    nothing: sentence in place of an empty table. passing: type of a later error of `read`, shown below the last table.
    """
    console = Console(highlight=False)
    lines, trouble = read(), ""
    if once or not sys.stdout.isatty():
        console.print(table(lines, console.width) if lines else nothing)
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = table(lines, console.width) if lines else Text(nothing)
            live.update(Group(shown, Text(trouble, style="red")), refresh=True)
            time.sleep(REFRESH_SECONDS)
            try:
                lines, trouble = read(), ""
            except passing as error:
                trouble = f"not up to date: {error}"


def table(lines: Sequence[JobLine], width: int) -> Table:
    """Return the job table for a width in columns; a narrower one has fewer columns; long names end in an ellipsis."""
    wide = width >= WIDE
    gap = 2 if wide else 1
    grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("JOB", no_wrap=True, overflow="ellipsis")
    if wide:
        grid.add_column("ALGORITHM", no_wrap=True)
    grid.add_column("PHASE", no_wrap=True)
    titles = ("STEP", "REWARD/LOSS", "TOKENS/S", "LEFT", "AGE", "SAVED")[: None if width > WIDE * 2 // 3 else 2]
    for title in titles:
        grid.add_column(title, no_wrap=True, justify="right")
    now = datetime.now(UTC).isoformat()
    for line in lines:
        first = [Text(line.name), Text(line.algorithm)][: 1 + wide]
        phase = Text(line.phase, style=STYLES.get(line.phase, ""))
        grid.add_row(*first, phase, *cells(line, now)[: len(titles)])
    widths = (max(len(str(cell)) for cell in (column.header, *column.cells)) for column in grid.columns[1:])
    grid.columns[0].max_width = max(width - sum(each + gap for each in widths), MIN_NAME)
    return grid


def cells(line: JobLine, now: str) -> list[str]:
    """Return a job's cells: step of total, reward or loss, tokens/s, time left, ages of job and newest checkpoint."""
    status, progress = line.status, line.status.progress
    is_on = line.phase == "Running"
    left = progress.remaining_seconds if progress and is_on else None
    speed = progress.tokens_per_second if progress and is_on else None
    return [
        f"{progress.step}/{progress.total_steps}" if progress else NOTHING,
        headline(status.metrics),
        NOTHING if speed is None else number(speed).replace(" ", ""),
        age(left),
        age(between(line.began, now)),
        age(between(status.checkpoint.time, now)) if status.checkpoint else NOTHING,
    ]


def headline(metrics: Sequence[Metric]) -> str:
    """Return the `leading` metric as `reward 0.5`, or NOTHING."""
    found = leading(metrics)
    return f"{found[0]} {number(found[1])}" if found else NOTHING


def leading(metrics: Sequence[Metric]) -> tuple[str, float] | None:
    """Return name and value of the metric that says best how a job is doing: its mean reward, or else its first loss.

    The name is the part before `/`.
    """
    values = {metric.name: metric.value for metric in metrics}
    names = [name for name in values if name == "reward/mean"] or sorted(n for n in values if n.startswith("loss/"))
    try:
        return (names[0].partition("/")[0], float(values[names[0]])) if names else None
    except ValueError:  # another program may have written the status
        return None


def age(seconds: float | None) -> str:
    """Format a duration in about five characters: 41s, 3m05, 2h07, 5d03."""
    if seconds is None:
        return NOTHING
    whole = max(round(seconds), 0)
    for unit, length, part in UNITS:
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}"
    return f"{whole}s"
