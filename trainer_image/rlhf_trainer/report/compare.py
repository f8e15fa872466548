"""Page `compare.html`: runs side by side, each job beside the jobs of the same name in the other runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_api.checks.resume import leaves
from rlhf_planning.numbers import between, duration, number, shortened, signed
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.report import metrics, plots
from rlhf_trainer.report.page import rendered
from rlhf_trainer.report.run_record import JobRecord, Run, read_run, reading_and_writing

MAX_RUNS = len(plots.SERIES)
MAX_CHARACTERS = 300
NO_FIGURES = ("steps", "seconds", "seed", "end_tokens")


class Row(NamedTuple):
    """Row of a comparison table, which has a column for each run."""

    name: str
    values: list[str]
    change: str = ""
    """Change of the value from the first to the second of two runs; else empty."""


def write_comparison(folders: Sequence[Path], path: Path | None) -> Path:
    """Write the page about run folders, by default into the first folder, and return its path.

    Raises ConfigError for too many folders or one that is no run folder, EnvironmentProblem for an unreadable file.
    """
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many to compare: at most {MAX_RUNS}")
    path = path or folders[0] / "compare.html"
    with reading_and_writing(path):
        runs = [read_run(folder) for folder in folders]
        names = [run.name for run in runs]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        path.write_text(render(names, runs), encoding="utf-8", errors="replace")
    return path


def render(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Return the HTML page that compares runs; `names`: name of each run."""
    by_name: dict[str, dict[int, JobRecord]] = {}
    for place, run in enumerate(runs):
        for job in run.jobs:
            by_name.setdefault(job.name, {})[place] = job
    together = {name: jobs for name, jobs in by_name.items() if len(jobs) > 1}
    variables = {
        "names": names,
        "jobs": {name: _job(jobs, names) for name, jobs in together.items()},
        "alone": [(name, names[place]) for name, jobs in by_name.items() if len(jobs) == 1 for place in jobs],
        "environment": differences({place: run.environment for place, run in enumerate(runs)}, len(runs)),
    }
    return rendered("compare.html", variables)


def _job(jobs: Mapping[int, JobRecord], names: Sequence[str]) -> dict[str, Any]:
    count = len(names)
    return {
        "notes": [f"{names[place]}: {note}" for place, job in jobs.items() for note in job.notes],
        "algorithms": list(dict.fromkeys(job.algorithm for job in jobs.values())),
        "figures": _figures(jobs, count),
        "plots": metrics.panels(jobs),
        "differences": differences({place: job.settings for place, job in jobs.items()}, count),
    }


def _whole_time(job: JobRecord) -> str:
    seconds = between(job.status.start_time, job.status.completion_time)
    return "" if seconds is None else duration(seconds)


FIGURES: Mapping[str, Callable[[JobRecord], str]] = {
    "status": lambda job: job.status.phase,
    "steps": lambda job: f"{len(job.records):,}",
    "mean step": lambda job: times.step if (times := metrics.times(job)) else "",
    "in all": _whole_time,
}
"""Name of a row above the held-out measures -> function that returns a job's text in it, empty if not known."""


def _figures(jobs: Mapping[int, JobRecord], count: int) -> list[Row]:
    """Return the rows with status, time and held-out measures of each job; `jobs`: index of a run -> its job."""
    rows = [_row(name, {place: text(job) for place, job in jobs.items()}, count) for name, text in FIGURES.items()]
    for name in dict.fromkeys(name for job in jobs.values() for name in job.summary if name not in NO_FIGURES):
        found = {place: job.summary.get(name) for place, job in jobs.items()}
        known = {place: value for place, value in found.items() if isinstance(value, int | float)}
        change = signed(known[1] - known[0]) if count == len(known) == 2 else ""
        rows.append(_row(name, {place: number(value) for place, value in known.items()}, count, change))
    return rows


def differences(documents: Mapping[int, Mapping[str, Any]], count: int) -> list[Row]:
    """Return a row for each field that differs between documents; `documents`: index of a run -> its document."""
    flat = {place: dict(leaves(dict(document))) for place, document in documents.items() if document}
    paths = dict.fromkeys(path for fields in flat.values() for path in fields)
    return [
        _row(path, {place: _text_of(fields.get(path)) for place, fields in flat.items()}, count)
        for path in paths
        if len({_text_of(fields.get(path)) for fields in flat.values()}) > 1
    ]


def _text_of(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, MAX_CHARACTERS) if value is not None else "unset"


def _row(name: str, values: Mapping[int, str], count: int, change: str = "") -> Row:
    return Row(name, [values.get(place, "") for place in range(count)], change)
