"""Comparison of jobs on a cluster by their statuses: figures, last values of metrics, and differing settings."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from rlhf_api.files import document_of
from rlhf_api.problems import SpecError
from rlhf_api.status import Status
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.snapshot import ObservedJob
from rlhf_operator.times import timestamp
from rlhf_planning.comparison import Row, contents, differences, measures
from rlhf_planning.numbers import between, duration, number

SECTIONS: Final = ("", "last values", "settings that differ")


def sections(jobs: Sequence[ObservedJob], now: datetime) -> list[list[Row]]:
    """Return the rows of each of SECTIONS; a metric has a row only if its values differ."""
    columns = [figures(job.status, now) for job in jobs]
    rows = [Row(name, [column[name] for column in columns]) for name in columns[0]]
    values = [row for row in measures([job.status.measures for job in jobs]) if len(set(row.values)) > 1]
    return [rows, values, differences([*map(_settings, jobs)])]


def table(jobs: Sequence[ObservedJob], now: datetime) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", highlight=False)
    shown.add_column(no_wrap=True)
    for title in (*(job.name for job in jobs), "change" if len(jobs) == 2 else ""):
        shown.add_column(title, overflow="fold")
    for title, rows in zip(SECTIONS, sections(jobs, now), strict=True):
        if title:
            shown.add_row()
            shown.add_row(Text(title if rows else f"{title}: none", style="bold"))
        for row in rows:
            shown.add_row(*map(Text, (row.name, *row.values, row.change)))
    return shown


def slot_hours(status: Status, now: datetime) -> float:
    """Return the slot hours of the job's attempts in the status, which keeps the latest ten attempts."""
    ends = [each.end_time or status.completion_time or timestamp(now) for each in status.attempts]
    spans = (between(each.start_time, end) or 0.0 for each, end in zip(status.attempts, ends, strict=True))
    return sum(each.slots * max(seconds, 0.0) for each, seconds in zip(status.attempts, spans, strict=True)) / 3600


def figures(status: Status, now: datetime) -> dict[str, str]:
    """Return name of a row -> text for a job, empty if unknown; the cost follows from the mapping's price per hour."""
    progress, mapping, attempts = status.progress, status.mapping, status.attempts
    pace, hours = progress.pace if progress else None, slot_hours(status, now)
    whole = between(status.start_time, status.completion_time or timestamp(now))
    kind = "GPU" if mapping and mapping.gpus else "slot"
    since = f", since attempt {attempts[0].attempt}" if attempts and attempts[0].attempt > 1 else ""
    price = mapping.price_per_hour / mapping.slots if mapping and mapping.price_per_hour is not None else None
    return {
        "status": status.phase,
        "steps": f"{progress.step} of {progress.total_steps}" if progress else "",
        "median step": duration(pace.step_seconds) if pace else "",
        "in all": "" if whole is None else duration(whole),
        "slots": f"{number(hours)} {kind} hours{since}" if attempts else "",
        "cost": "" if price is None else number(hours * price),
    }


def _settings(job: ObservedJob) -> dict[str, Any]:
    """Return a job's spec, with defaults if it is valid, and the digests of the models and data that the job reads."""
    spec = job.spec
    with suppress(SpecError):
        spec = document_of(parse_job(job))["spec"]
    return {"spec": spec, "inputs": contents(job.status)}
