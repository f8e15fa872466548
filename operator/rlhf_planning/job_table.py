"""A table of jobs, as `rlhf top` shows those of run folders and `kubectl rlhf top` those of a cluster."""

from __future__ import annotations

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
"""Columns of a terminal that has room for the algorithm and wider gaps."""
SHORTEST_NAME: Final = 8
NOTHING: Final = "-"
STYLES: Final = {"Running": "green", "Succeeded": "dim", "Stopped": "yellow"} | dict.fromkeys(
    ("Failed", "Died", "Damaged"), "bold red"
)
"""Phase -> its style."""
UNITS: Final = (("d", 86400, 3600), ("h", 3600, 60), ("m", 60, 1))
"""A unit, its seconds, and those of the one below it."""


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """A job of the table."""

    name: str
    """With the run folder or the namespace before it where there are several."""
    algorithm: str
    phase: str
    """That of the status, or a word for what the status cannot know."""
    status: Status
    began: str | None
    """RFC 3339."""


def show(read: Callable[[], Sequence[JobLine]], nothing: str, *, once: bool, passing: type[Exception]) -> None:
    """Print the table, again and again in a terminal until Ctrl-C, or once; `nothing`: what is said of no jobs.

    passing: the kind of error that may pass: after the first table it is told below the last one.
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
    """The table in so many columns; below WIDE it leaves the algorithm out, and long names end with an ellipsis."""
    wide = width >= WIDE
    gap = 2 if wide else 1
    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    made.add_column("JOB", no_wrap=True, overflow="ellipsis")
    if wide:
        made.add_column("ALGORITHM", no_wrap=True)
    made.add_column("PHASE", no_wrap=True)
    for title in ("STEP", "REWARD/LOSS", "TOKENS/S", "LEFT", "AGE", "SAVED"):
        made.add_column(title, no_wrap=True, justify="right")
    now = datetime.now(UTC).isoformat()
    for line in lines:
        first = [Text(line.name), Text(line.algorithm)][: 1 + wide]
        made.add_row(*first, Text(line.phase, style=STYLES.get(line.phase, "")), *cells(line, now))
    of_others = (max(len(str(cell)) for cell in (column.header, *column.cells)) for column in made.columns[1:])
    made.columns[0].max_width = max(width - sum(each + gap for each in of_others), SHORTEST_NAME)
    return made


def cells(line: JobLine, now: str) -> list[str]:
    """Step of total, reward or loss, tokens a second, time left, age and age of the newest checkpoint, as texts."""
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
    """The one metric that says how a job is doing: its mean reward, or the first of its losses."""
    values = {metric.name: metric.value for metric in metrics}
    names = [name for name in values if name == "reward/mean"] or sorted(n for n in values if n.startswith("loss/"))
    if not names:
        return NOTHING
    try:
        value = number(float(values[names[0]]))
    except ValueError:  # of whoever writes statuses besides us
        return NOTHING
    return f"{names[0].partition('/')[0]} {value}"


def age(seconds: float | None) -> str:
    """A duration in five characters or so: 41s, 3m05, 2h07, 5d03."""
    if seconds is None:
        return NOTHING
    whole = max(round(seconds), 0)
    for unit, length, part in UNITS:
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}"
    return f"{whole}s"
