"""`rlhf why`: prints the diagnosis of the jobs of a run folder, and what differs from a healthy run of the same job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_planning.comparison import differences
from rlhf_planning.numbers import number
from rlhf_trainer.errors import ConfigError
from rlhf_trainer.report.run_record import JobRecord, Run, read_run
from rlhf_trainer.run_folder.folder import writing
from rlhf_trainer.why.diagnosis import NO_CAUSE, Diagnosis, described, diagnose, outside

MAX_SHOWN = 6
"""Most settings and most signals of a comparison that are shown; the answer says how many more there are."""
MAX_OTHERS = 20
"""Most run folders beside this one in which a healthy run of a job is looked for, the newest first."""
Line = tuple[str, str, str]
"""Name of a part of an answer, text, and style of the text."""


def print_why(run_dir: Path, *, only: str | None, last: int | None, in_json: bool) -> None:
    """Print the diagnosis of each job that has made a step, or of one job.

    last: look at steps up to this one. SpecError if no such job has made a step.
    """
    with writing(run_dir, what=""):
        run = read_run(run_dir)
    names = [job.name for job in run.jobs if job.records]
    chosen = [job for job in run.jobs if job.name in names and only in (None, job.name)]
    if not chosen:
        which, near = (f"job {only}", f": {suggestion(only, names)}") if only else ("job", "")
        raise SpecError([Problem(str(run_dir), f"no {which} has made a step in it{near}")])
    console, documents = Console(highlight=False), dict[str, Any]()
    for job in chosen:
        seen = job.seen(last)
        found, other = diagnose(job.name, seen), _compared(job, last, _healthy_run(run_dir, job))
        documents[job.name] = found.document() | {"against": other}
        if not in_json:
            console.print(Text(f"{job.name} ({job.algorithm}), {len(seen.records)} steps", style="bold"))
            table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 0, 0, 2))
            for name, text, style in (*_answer(found), *(_differences(other) if other else ())):
                table.add_row(Text(name, "dim"), Text(text, style))
            console.print(table)
    if in_json:
        print(json.dumps(documents, indent=2, ensure_ascii=False))  # noqa: T201


def _healthy_run(run_dir: Path, job: JobRecord) -> Run | None:
    """Return the newest run beside this one in which the job succeeded and shows no cause; None if there is none."""
    files = sorted(run_dir.resolve().parent.glob(f"*/{job.name}/metrics.jsonl"), key=lambda file: -file.stat().st_mtime)
    for folder in [file.parents[1] for file in files if file.parents[1] != run_dir.resolve()][:MAX_OTHERS]:
        try:
            run = read_run(folder)
            other = run[job.name]
        except (ConfigError, KeyError):  # the folder or the job lacks job.yaml
            continue
        if other.status.phase == "Succeeded" and not diagnose(job.name, other.seen()).causes:
            return run
    return None


def _compared(job: JobRecord, last: int | None, run: Run | None) -> dict[str, Any] | None:
    """Return the differences from another run of a job: settings (here, there) and signals; None without the run."""
    if run is None:
        return None
    other = run[job.name]
    settings = {row.name: row.values for row in differences([job.settings, other.settings])}
    signals = [each._asdict() for each in outside(job.seen(last), other.seen(last))]
    return {"run": run.name, "settings": settings, "signals": signals}


def _answer(found: Diagnosis) -> Iterator[Line]:
    yield "changed", str(found.change or "no change of the measure is clear"), ""
    if found.first:
        yield "first", str(found.first), ""
    for place, cause in enumerate(found.causes, 1):
        yield f"cause {place}", f"{cause.what} ({cause.cause})", "bold yellow" if place == 1 else "bold"
        yield "", cause.evidence, ""
        yield "try", cause.remedy, ""
        if cause.set:
            yield "", f"--set '{cause.set}'", "cyan"
    if not found.causes:
        yield "cause", NO_CAUSE, ""
    yield from (("not seen", note, "dim") for note in found.notes)
    yield from (("" if place else "rows", described(row), "") for place, row in enumerate(found.rows))


def _differences(other: Mapping[str, Any]) -> Iterator[Line]:
    settings = [f"{name}: {here}, there {there}" for name, (here, there) in other["settings"].items()]
    signals = [
        "{}: {}, there {} to {} (from step {} on)".format(
            each["name"], *(number(each[name]) for name in ("value", "low", "high")), each["step"]
        )
        for each in other["signals"]
    ]
    how = {"settings": "differ from the run", "signals": "end outside their range in the run"}
    for name, lines in (("settings", settings), ("signals", signals)):
        yield name, f"{len(lines)} {how[name]} {other['run']}", "dim"
        yield from (("", line, "") for line in lines[:MAX_SHOWN])
        if len(lines) > MAX_SHOWN:
            yield "", f"and {len(lines) - MAX_SHOWN} more, which --json has", "dim"
