"""Pages `report.html` about a run and `rollouts.html` with responses that it learned from; they need no network."""

import base64
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_api.spec.algorithm_table import ALGORITHMS
from rlhf_mapper.calibration import compare_phases
from rlhf_planning.numbers import between, duration, number, shortened, step_list
from rlhf_trainer.report import held_out, metrics
from rlhf_trainer.report.run_record import JobRecord, Rollouts, Run, mapping_line, read_run
from rlhf_trainer.report.step_timeline import step_timeline
from rlhf_trainer.run_folder.folder import writing
from rlhf_trainer.run_folder.rollouts import NUMBERS
from rlhf_trainer.why.diagnosis import NO_CAUSE, described, diagnose

REPORT, ROLLOUTS = "report.html", "rollouts.html"
OFFLINE = [name for name, algorithm in ALGORITHMS.items() if algorithm.offline]
MAX_EVENTS = 500
MAX_CHARACTERS = 2000
"""Most characters that the page shows of a prompt or response; the page says how many more there are."""


def write_report(folder: Path) -> Path:
    """Write the report of a run folder, and the page of its rollouts if there are some; return the report's path.

    Raises ConfigError if `folder` is no run folder, EnvironmentProblem if a file cannot be read or written.
    """
    with writing(folder, what=""):
        run = read_run(folder)
        path, rollouts_path = folder / REPORT, folder / ROLLOUTS
        kept = {job.name: job.rollouts for job in run.jobs if job.rollouts.rows}
        rollouts_path.unlink(missing_ok=True)
        if kept:
            rollouts_path.write_text(render_rollouts(run.name, kept), encoding="utf-8")
        path.write_text(render(run), encoding="utf-8", errors="replace")  # a lone surrogate cannot be encoded
    return path


def render(run: Run, *, live: bool = False) -> str:
    """Return the HTML page about a run; texts of models and users are escaped.

    live: for `rlhf ui`, with a script that keeps the page up to date. A file has no script.
    """
    jobs = [_job(job) for job in run.jobs]
    unfinished = [job for job in run.jobs if job.status.phase != "Succeeded"]
    variables = {
        "run": run,
        "jobs": jobs,
        "measures": [measure for job in run.jobs for measure in held_out.measures(job)],
        "seconds": sum(job["wall"] or 0.0 for job in jobs),
        "started": next(filter(None, (job.status.start_time for job in run.jobs)), None),
        "headline": f"{unfinished[0].status.phase} in {unfinished[0].name}" if unfinished else "Succeeded",
        "glance": next((job for job in reversed(jobs) if job["learning"]), None),
    }
    return rendered("page.html", variables, live=live)


def _job(job: JobRecord) -> dict[str, Any]:
    compared = None
    if predicted := job.mapping.get("predicted"):
        compared = compare_phases({**predicted["phases"], "step": predicted["step_seconds"]}, job.records)
    return {
        "record": job,
        "wall": between(job.status.start_time, job.status.completion_time),
        "times": metrics.times(job),
        "timeline": step_timeline(job),
        "compared": compared,
        "learning": metrics.panels({0: job}, learning=True),
        "health": metrics.panels({0: job}, learning=False),
        "constants": metrics.constants(job),
        "samples": held_out.sample_table(job),
        "samples_expected": job.algorithm not in OFFLINE,
        "settings": yaml.safe_dump(_without_unset(job.settings), sort_keys=False, allow_unicode=True),
        "events": job.events[-MAX_EVENTS:],
        "why": diagnose(job.name, job.seen()) if job.records and job.algorithm not in OFFLINE else None,
        "no_cause": NO_CAUSE,
    }


def _without_unset(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {name: _without_unset(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None and inner != {}}
    return [_without_unset(inner) for inner in value] if isinstance(value, list) else value


def render_rollouts(name: str, jobs: Mapping[str, Rollouts], *, live: bool = False) -> str:
    """Return the HTML page with responses of a run's jobs; its only script, rollouts.js, shows texts as plain text."""
    rows = [_row(job, row) for job, found in jobs.items() for row in found.rows]
    return rendered("rollouts.html", {"name": name, "jobs": jobs, "data": {"rows": rows}}, live=live)


def _row(job: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of rollouts.jsonl as data for the page; a number that is not finite becomes None, null in JSON."""
    parts, columns, turns, episode = (row.get(name) for name in ("reward_parts", "columns", "turns", "episode"))
    return {
        "job": job,
        "step": row["step"],
        "row": row["row"],
        "finished": bool(row.get("finished")),
        "prompt": shortened(row["prompt"], MAX_CHARACTERS),
        "response": shortened(row["response"], MAX_CHARACTERS),
        "columns": shortened(json.dumps(columns, ensure_ascii=False), MAX_CHARACTERS) if columns else "",
        "parts": _numbers(parts),
        "episode": _numbers(episode),
        "turns": [
            {
                "text": shortened(str(turn.get("text")), MAX_CHARACTERS),
                "written": bool(turn.get("written")),
                "reward": _number(turn.get("reward")),
                **({"after": _number(turn["after"])} if "after" in turn else {}),
            }
            for turn in (turns if isinstance(turns, list) else [])
            if isinstance(turn, dict)
        ],
        **{name: _number(row.get(name)) for name in NUMBERS},
    }


def _numbers(found: object) -> dict[str, float | None]:
    return {str(name): _number(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def script(name: str) -> Markup:
    """Return a script of the templates' folder."""
    return Markup((files("rlhf_trainer.report") / "templates" / name).read_text(encoding="utf-8"))


def digest(name: str) -> str:
    """Return the source expression of a script for a Content-Security-Policy: a browser runs no other script."""
    return Markup(f"'sha256-{base64.b64encode(hashlib.sha256(script(name).encode()).digest()).decode()}'")


def rendered(template: str, variables: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the HTML page that a template makes of the variables; live: a page of `rlhf ui`, not a file."""
    environment = Environment(
        loader=PackageLoader("rlhf_trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (duration, number, shortened, step_list, mapping_line, held_out.text_of, described)
    environment.filters |= {shown.__name__: shown for shown in filters}
    environment.globals |= {"script": script, "digest": digest, "live": live}
    return environment.get_template(template).render(variables)
