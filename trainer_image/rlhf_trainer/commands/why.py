"""`rlhf why`: prints the diagnosis of the jobs of a run folder, and what differs from a healthy run of the same job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_planning.comparison import Row, differences
from rlhf_planning.numbers import number
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.report.run_record import JobRecord, Run, read_run, reading_and_writing
from rlhf_trainer.why.diagnosis import NO_CAUSE, Diagnosis, described, diagnose
from rlhf_trainer.why.outside import Outside, outside

MAX_SHOWN = 6
"""Most settings and most signals of a comparison that are shown; the number of the others is said."""
MAX_OTHERS = 20
"""Most run folders beside this one in which a healthy run of a job is looked for, the newest first."""
WIDTH = 12
"""Width of the column with the names of the parts of an answer."""
ROW, COMMAND = "default", "cyan"
"""Styles of a line that is cut at the terminal's edge, and of one that is whole, to be copied."""
Line = tuple[str, str, str]
"""Name of a part of an answer, text, and style of the text."""


class Comparison(NamedTuple):
    """Differences from another run of a job."""

    run: str
    settings: list[Row]
    """Settings that differ, with the values in this run and in the other one."""
    signals: list[Outside]


def print_why(run_dir: Path, *, only: str | None, last: int | None, against: Path | None, in_json: bool) -> None:
    """Print the diagnosis of each job that has made a step, or of one job.

    last: look at steps up to this one; against: run to compare with. SpecError if no such job has made a step.
    """
    with reading_and_writing(run_dir):
        run, given = read_run(run_dir), read_run(against) if against else None
    names = [job.name for job in run.jobs if job.records]
    chosen = [job for job in run.jobs if job.name in names and only in (None, job.name)]
    if not chosen:
        why = (
            f"no job {only} has made a step in it: {suggestion(only, names)}"
            if only
            else "no job has made a step in it"
        )
        raise SpecError([Problem(str(run_dir), why)])
    found = {job.name: diagnose(job.name, job.seen(last)) for job in chosen}
    others = {job.name: _compared(job, last, given or _healthy_run(run_dir, job)) for job in chosen}
    if in_json:
        documents = {name: each.document() | {"against": _document(others[name])} for name, each in found.items()}
        print(json.dumps(documents, indent=2, ensure_ascii=False))  # noqa: T201
        return
    console = Console(highlight=False)
    for job in chosen:
        steps = len(job.seen(last).records)
        console.print(Text(f"{job.name} ({job.algorithm}), {steps} steps", style="bold"))
        _print(console, _answer(found[job.name]))
        if other := others[job.name]:
            _print(console, _differences(other))


def _healthy_run(run_dir: Path, job: JobRecord) -> Run | None:
    """Return the newest run beside this one in which the job succeeded and shows no cause; None if there is none."""
    files = sorted(run_dir.resolve().parent.glob(f"*/{job.name}/metrics.jsonl"), key=lambda file: -file.stat().st_mtime)
    for folder in [file.parents[1] for file in files if file.parents[1] != run_dir.resolve()][:MAX_OTHERS]:
        try:
            other = read_run(folder)[job.name]
        except (ConfigError, KeyError):  # the folder or the job lacks job.yaml
            continue
        if other.status.phase == "Succeeded" and not diagnose(job.name, other.seen()).causes:
            return read_run(folder)
    return None


def _compared(job: JobRecord, last: int | None, run: Run | None) -> Comparison | None:
    if run is None or job.name not in [each.name for each in run.jobs]:
        return None
    other = run[job.name]
    settings = differences({0: job.settings, 1: other.settings}, 2)
    return Comparison(run.name, settings, outside(job.seen(last), other.seen(last)))


def _document(other: Comparison | None) -> dict[str, Any] | None:
    if other is None:
        return None
    settings = {row.name: row.values for row in other.settings}
    return {"run": other.run, "settings": settings, "signals": [each._asdict() for each in other.signals]}


def _answer(found: Diagnosis) -> Iterator[Line]:
    yield "changed", str(found.change or "no change of the measure is clear"), ""
    if found.first:
        yield "first", str(found.first), ""
    for place, cause in enumerate(found.causes, 1):
        yield f"cause {place}", f"{cause.what} ({cause.cause})", "bold yellow" if place == 1 else "bold"
        yield "", cause.evidence, ""
        yield "try", cause.remedy, ""
        if cause.set:
            yield "", f"--set '{cause.set}'", COMMAND
    if not found.causes:
        yield "cause", NO_CAUSE, ""
    yield from (("not seen", note, "dim") for note in found.notes)
    yield from (("" if place else "rows", described(row), ROW) for place, row in enumerate(found.rows))


def _differences(other: Comparison) -> Iterator[Line]:
    settings = [f"{row.name}: {row.values[0]}, there {row.values[1]}" for row in other.settings]
    signals = [
        f"{each.name}: {number(each.value)}, there {number(each.low)} to {number(each.high)} (from step {each.step} on)"
        for each in other.signals
    ]
    how = {"settings": "differ from the run", "signals": "end outside their range in the run"}
    for name, lines in (("settings", settings), ("signals", signals)):
        yield name, f"{len(lines)} {how[name]} {other.run}", "dim"
        yield from (("", line, "") for line in lines[:MAX_SHOWN])
        if len(lines) > MAX_SHOWN:
            yield "", f"and {len(lines) - MAX_SHOWN} more, which --json has", "dim"


def _print(console: Console, lines: Iterator[Line]) -> None:
    """Print the parts of an answer, each text beside its name and wrapped to the terminal."""
    for name, text, style in lines:
        whole = style in (ROW, COMMAND)
        wrapped = [Text(text, style=style)] if whole else Text(text, style=style).wrap(console, console.width - WIDTH)
        for place, line in enumerate(wrapped):
            shown = Text.assemble((f"  {'' if place else name:<{WIDTH - 2}}", "dim"), line)
            console.print(shown, no_wrap=whole, overflow="ellipsis" if style == ROW else "ignore", crop=style == ROW)
