"""Page `compare.html`: runs side by side, each job beside the jobs of the same name in the other runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_planning.comparison import Row, contents, differences, measures
from rlhf_planning.numbers import between, duration
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.report import metrics, plots
from rlhf_trainer.report.page import rendered
from rlhf_trainer.report.run_record import JobRecord, Run, read_run
from rlhf_trainer.run_folder.folder import writing

MAX_RUNS = len(plots.SERIES)
NO_FIGURES = ("steps", "seconds", "seed", "end_tokens")


def write_comparison(folders: Sequence[Path]) -> Path:
    """Write the page about run folders into the first of them, and return its path.

    Raises ConfigError for too many folders or one that is no run folder, EnvironmentProblem for an unreadable file.
    """
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many to compare: at most {MAX_RUNS}")
    path = folders[0] / "compare.html"
    with writing(path, what=""):
        runs = [read_run(folder) for folder in folders]
        names = [run.name for run in runs]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        path.write_text(render(names, runs), encoding="utf-8", errors="replace")
    return path


def render(names: Sequence[str], runs: Sequence[Run], *, live: bool = False) -> str:
    """Return the HTML page that compares runs; `names`: name of each run. live: as in `page.render`."""
    by_name: dict[str, dict[int, JobRecord]] = {}
    for place, run in enumerate(runs):
        for job in run.jobs:
            by_name.setdefault(job.name, {})[place] = job
    together = {name: jobs for name, jobs in by_name.items() if len(jobs) > 1}
    variables = {
        "names": names,
        "jobs": {name: _job(jobs, names) for name, jobs in together.items()},
        "alone": [(name, names[place]) for name, jobs in by_name.items() if len(jobs) == 1 for place in jobs],
        "environment": differences([run.environment for run in runs]),
    }
    return rendered("compare.html", variables, live=live)


def _job(jobs: Mapping[int, JobRecord], names: Sequence[str]) -> dict[str, Any]:
    columns = [jobs.get(place) for place in range(len(names))]
    figures = [Row(name, [text(job) if job else "" for job in columns]) for name, text in FIGURES.items()]
    summaries = [job.summary if job else {} for job in columns]
    return {
        "notes": [f"{names[place]}: {note}" for place, job in jobs.items() for note in job.notes],
        "algorithms": list(dict.fromkeys(job.algorithm for job in jobs.values())),
        "figures": figures + measures([{k: v for k, v in each.items() if k not in NO_FIGURES} for each in summaries]),
        "plots": metrics.panels(jobs),
        "differences": differences([_settings(job) if job else {} for job in columns]),
    }


def _settings(job: JobRecord) -> dict[str, Any]:
    return {**job.settings, "inputs": contents(job.status)} if job.settings else {}


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
