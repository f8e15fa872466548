"""Page `report.html` about a run, which needs neither other files nor a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_mapper.calibration import Compared, compare_phases
from rlhf_planning.numbers import between
from rlhf_trainer.report import held_out, metrics, rollouts_page
from rlhf_trainer.report.run_record import JobRecord, Run, read_run, reading_and_writing
from rlhf_trainer.report.step_timeline import step_timeline
from rlhf_trainer.report.template import rendered

REPORT = "report.html"
OFFLINE = ("SFT", "RewardModel")
MAX_EVENTS = 500


def write_report(folder: Path) -> Path:
    """Write the report of a run folder, and the page of its rollouts if there are some; return the report's path.

    Raises ConfigError if `folder` is no run folder, EnvironmentProblem if a file cannot be read or written.
    """
    with reading_and_writing(folder):
        run = read_run(folder)
        path, rollouts_path = folder / REPORT, folder / rollouts_page.PAGE
        kept = {job.name: job.rollouts for job in run.jobs if job.rollouts.rows}
        rollouts_path.unlink(missing_ok=True)
        if kept:
            rollouts_path.write_text(rollouts_page.render(run.name, kept), encoding="utf-8")
        path.write_text(render(run), encoding="utf-8", errors="replace")  # a lone surrogate cannot be encoded
    return path


def render(run: Run) -> str:
    """Return the HTML page about a run; texts of models and users are escaped, and the page runs no script."""
    jobs = [_job(job) for job in run.jobs]
    variables = {
        "run": run,
        "jobs": jobs,
        "measures": [measure for job in run.jobs for measure in held_out.measures(job)],
        "seconds": sum(job["wall"] or 0.0 for job in jobs),
        "started": next((job.status.start_time for job in run.jobs if job.status.start_time), None),
        "headline": _headline(run),
        "glance": next((job for job in reversed(jobs) if job["learning"]), None),
    }
    return rendered("page.html", variables, filters=(mapping_line, held_out.text_of))


def _headline(run: Run) -> str:
    """Return the headline of a run's page, which says how the run ended."""
    done = sum(job.status.phase == "Succeeded" for job in run.jobs)
    if done == len(run.jobs):
        return "Succeeded"
    other = next(job for job in run.jobs if job.status.phase != "Succeeded")
    return f"{other.status.phase} in {other.name}"


def _job(job: JobRecord) -> dict[str, Any]:
    """Return the variables of the page's template for one job."""
    return {
        "record": job,
        "wall": between(job.status.start_time, job.status.completion_time),
        "times": metrics.times(job),
        "timeline": step_timeline(job),
        "compared": _compared(job),
        "learning": metrics.panels(job, learning=True),
        "health": metrics.panels(job, learning=False),
        "constants": metrics.constants(job),
        "samples": held_out.samples(job),
        "samples_expected": job.algorithm not in OFFLINE,
        "settings": yaml.safe_dump(_without_unset(job.settings), sort_keys=False, allow_unicode=True),
        "events": job.events[-MAX_EVENTS:],
        "facts": _facts(job),
    }


def _compared(job: JobRecord) -> list[Compared[str]]:
    """Return predicted and measured seconds of a job's phases and step; empty without a prediction or a step."""
    if not (predicted := job.mapping.get("predicted")):
        return []
    return compare_phases({**predicted["phases"], "step": predicted["step_seconds"]}, job.records)


def mapping_line(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as one line: `2 x cpu-slot: actor 1-1-2, generation 1-1 | 1 x cpu-slot: reward 1-1-1`."""
    return " | ".join(
        f"{pool['gpus']} x {pool['gpu']}: {'; '.join(_sizes(role, mapping['models'][role]) for role in pool['models'])}"
        for pool in mapping["pools"]
    )


def _sizes(role: str, sizes: Mapping[str, Any]) -> str:
    generation = f", generation {sizes['p_g']}-{sizes['t_g']}" if "p_g" in sizes else ""
    return f"{role} {sizes['p']}-{sizes['t']}-{sizes['d']}{generation}"


def _facts(job: JobRecord) -> list[tuple[str, str]]:
    """Return (name, text) of a job's most important settings."""
    training, data = job.spec.get("training") or {}, job.spec.get("data") or {}
    facts = [*_models(job), ("data", str((data.get("train") or {}).get("uri", "")))]
    if "maxPromptTokens" in data:
        facts.append(("tokens", f"{data['maxPromptTokens']} prompt + {data.get('maxResponseTokens')} response at most"))
    for name, text in (("promptBatchSize", "prompts a step"), ("batchSize", "rows a step"), ("seed", "seed")):
        facts.append((text, str(training[name]) if training.get(name) is not None else ""))
    if kl := (job.spec.get("algorithm") or {}).get("kl"):
        place = str(kl.get("applyTo")).lower()
        facts.append(("KL penalty", f"{kl.get('coefficient')} ({kl.get('controller')}, in the {place})"))
    return [(name, text) for name, text in facts if text]


def _models(job: JobRecord) -> Iterator[tuple[str, str]]:
    """Yield (role, URI and learning rate) of each model of a job."""
    for role, model in (job.spec.get("models") or {}).items():
        optimizer = (model or {}).get("optimizer") or {}
        rate = f", learning rate {optimizer['learningRate']:g}" if "learningRate" in optimizer else ""
        if model:
            yield role, f"{model.get('uri')}{rate}"


def _without_unset(value: Any) -> Any:
    """Return a document without null fields and empty mappings."""
    if isinstance(value, Mapping):
        kept = {name: _without_unset(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None and inner != {}}
    return [_without_unset(inner) for inner in value] if isinstance(value, list) else value
