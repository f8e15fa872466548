"""Plots of the metrics of a job over its steps, with their meanings, and of where the time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_planning.numbers import duration, number
from rlhf_trainer.report import plots
from rlhf_trainer.report.run_record import JobRecord
from rlhf_trainer.run_folder.step_metrics import METRICS, metric_of

PLACES = {metric.recorded: place for place, metric in enumerate(METRICS)}
"""Name of a recorded metric -> its position on the page; a metric of a user's own algorithm comes after these."""
LEARNING = {metric.recorded.partition("/")[0] for metric in METRICS if metric.section == "learning"} - {
    metric.recorded.partition("/")[0] for metric in METRICS if metric.section == "health"
}
"""Beginnings of metric names (before `/`) under which all metrics show whether the model learns."""
PHASES = ("update", "scoring", "generation", "reshard", "controller", "transfer", "data", "advantage", "checkpoint")
"""Phases of a step in the order of their colours, the same in every plot; phases that are not listed share one."""
NEARLY_CONSTANT = 1e-5
"""Largest value, or change as a share of the largest value, at which a metric is listed as constant, not plotted."""


@dataclass(frozen=True)
class Panel:
    """Plot of a metric of one job, or of several compared jobs in the colours of their runs, over the steps."""

    name: str
    meaning: str
    ends: list[tuple[int, str, str]]
    """(index of the colour of its run, first value, last value) of each job."""
    plot: Markup


@dataclass(frozen=True)
class Times:
    """Part of the page about the time of a job's steps, by phase."""

    phases: list[tuple[str, int, float, float]]
    """Each phase, the longest first: name, index of its colour, seconds of a mean step, and per cent."""
    plot: Markup
    step: str
    total: float
    """Seconds that all steps of the job took together."""
    overlapping: bool
    """Whether phases ran at the same time on different pools, so that they add up to more than the step."""


def panels(jobs: Mapping[int, JobRecord], *, learning: bool | None = None) -> list[Panel]:
    """Return a plot for each metric that changes in a job or differs between jobs; `jobs`: index of a run -> job.

    learning: True: only metrics about learning; False: all others except times; None: both, learning first.
    """
    found, title = [], " ".join(job.name for job in jobs.values())
    for name in sorted(set[str]().union(*map(_names, jobs.values())), key=_rank):
        series = {place: _series(job, name) for place, job in jobs.items()}
        series = {place: one for place, one in series.items() if one[0]}
        together = [value for _, values in series.values() for value in values]
        if learning in (None, _is_learning(name)) and _changes(together):
            ends = [(place, number(values[0]), number(values[-1])) for place, (_, values) in series.items()]
            found.append(Panel(name, _described(name, together), ends, plots.lines(f"{title} {name}", series)))
    return found


def constants(job: JobRecord) -> list[tuple[str, str, str]]:
    """Return (name, largest value, meaning) of the metrics that never change or are nearly 0 all the time."""
    found = []
    for name in _names(job):
        _, values = _series(job, name)
        if not _changes(values):
            found.append((name, number(max(values, key=abs)), _described(name, ())))
    return found


def times(job: JobRecord) -> Times | None:
    """Return the page's part about the time of steps: seconds of a mean step by phase; None before the first step."""
    by_colour = enumerate(zip(*map(_seconds_by_colour, job.records), strict=True))
    series = {colour: seconds for colour, seconds in by_colour if any(seconds)}
    total, together = sum(record.get("time/step", 0.0) for record in job.records), sum(map(sum, series.values()))
    if not total or not together:
        return None
    steps = [int(record["step"]) for record in job.records]
    phases = [
        ((*PHASES, "other")[colour], colour, sum(values) / len(steps), 100 * sum(values) / together)
        for colour, values in series.items()
    ]
    return Times(
        phases=sorted(phases, key=lambda phase: -phase[-1]),
        plot=plots.stack(f"{job.name} time", steps, series),
        step=duration(total / len(steps)),
        total=total,
        overlapping=together > 1.02 * total,
    )


def _seconds_by_colour(record: Mapping[str, float]) -> list[float]:
    """Return the seconds of a step's phases in the order of their colours; the last number is for all other phases."""
    measured = {name.removeprefix("time/"): value for name, value in record.items() if name.startswith("time/")}
    measured.pop("step", None)
    listed = [measured.pop(name, 0.0) for name in PHASES]
    return [*listed, sum(measured.values())]


def _names(job: JobRecord) -> list[str]:
    names = {name for record in job.records for name in record}
    return sorted(name for name in names if not (row := metric_of(name)) or row.section)


def _series(job: JobRecord, name: str) -> tuple[list[int], list[float]]:
    rows = [record for record in job.records if name in record]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


def _changes(values: Sequence[float]) -> bool:
    largest = max(map(abs, values))
    return largest > NEARLY_CONSTANT and max(values) - min(values) > NEARLY_CONSTANT * largest


def _described(name: str, values: Sequence[float]) -> str:
    """Return a metric's meaning, its unit, and `logarithmic` if these values are plotted on such an axis."""
    row = metric_of(name)
    notes = [row.unit] if row and row.unit not in ("1", "ratio") else []  # the meaning says these two
    notes += ["logarithmic"] if values and plots.is_log(values) else []
    meaning = row.meaning.rstrip(".") if row else ""
    return f"{meaning} ({', '.join(notes)})".strip() if notes else meaning


def _is_learning(name: str) -> bool:
    row = metric_of(name)
    return row.section == "learning" if row else name.partition("/")[0] in LEARNING


def _rank(name: str) -> tuple[bool, int, str]:
    row = metric_of(name)
    return not _is_learning(name), PLACES[row.recorded] if row else len(PLACES), name
