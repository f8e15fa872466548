"""`rlhf plan`: where the models of a manifest would live, how they would be cut, and what a step would take."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError, choice
from rlhf_mapper.as_json import as_json
from rlhf_mapper.auto_map import auto_map
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Infeasible, Mapping
from rlhf_mapper.search.objective import Objective
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.folder import written
from rlhf_trainer.run.machines import ClusterFlags, device_of, this_machine
from rlhf_trainer.run.mapping_text import explain
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run.timeline import timeline_of
from rlhf_trainer.run.timeline_svg import svg_of

OBJECTIVES = ("throughput", "fewest-gpus=SECONDS", "lowest-cost")
COLUMNS = 100
"""Width of the text where no terminal has one."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `rlhf plan` is asked besides the manifest."""

    only: str | None
    """One of the jobs; None: all."""
    machines: ClusterFlags
    objective: str
    """One of OBJECTIVES."""
    in_json: bool
    graph: bool
    """Whether to draw the calls of a step instead of explaining the mapping."""
    svg: Path | None


def plan(jobs: Sequence[Job], output: Path, question: Question) -> None:
    """Answer for each of the manifest's jobs, or for one; nothing is loaded, and nothing runs.

    Raises SpecError; DataError for a model whose shape cannot be read; EnvironmentProblem where no mapping fits, after
    everything has been told.
    """
    chosen, asked = _chosen(jobs, question), question.machines.cluster()
    clusters = {job.name: asked or this_machine(job) for job in chosen}
    objectives = {name: objective_of(question.objective, cluster) for name, cluster in clusters.items()}
    answers: list[tuple[Job, Mapping | Infeasible]] = []
    for job in chosen:
        cluster, shapes = clusters[job.name], shapes_of(jobs, job, output)
        mapping = auto_map(job, cluster, shapes, device=device_of(job, cluster), objective=objectives[job.name])
        answers.append((job, mapping))
    _tell(answers, question)
    if short := [f"{job.name}: {answer.reason}" for job, answer in answers if isinstance(answer, Infeasible)]:
        raise EnvironmentProblem("; ".join(short))


def objective_of(text: str, cluster: Cluster) -> Objective:
    """What `--objective` asks for. Raises SpecError."""
    name, _, value = text.partition("=")
    prices = [group.gpu_hour_price for group in cluster.groups]
    match name:
        case "throughput" if not value:
            return Objective.throughput()
        case "fewest-gpus":
            return Objective.fewest_gpus(_seconds(text, value))
        case "lowest-cost" if not value:
            known = tuple(price for price in prices if price is not None)
            if len(known) < len(prices):
                message = "lowest-cost needs the pricePerGpuHour of all nodes of an --inventory"
                raise SpecError([Problem("--objective", message)])
            return Objective.lowest_cost(known)
    raise SpecError([Problem("--objective", f"is {text}, expected {choice(OBJECTIVES)}")])


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"is {text}, expected the seconds that a step may take, such as fewest-gpus=60"
        raise SpecError([Problem("--objective", message)])
    return seconds


def _chosen(jobs: Sequence[Job], question: Question) -> list[Job]:
    """The jobs that are asked for. SpecError where there are none, or too many for one picture."""
    names = ", ".join(job.name for job in jobs)
    chosen = [job for job in jobs if question.only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("JOB", f"is {question.only}; the manifest has {names}")])
    if question.svg and len(chosen) > 1:
        raise SpecError([Problem("--svg", f"draws one job; name one of {names}")])
    if question.in_json and (question.graph or question.svg):
        raise SpecError([Problem("--json", f"is not for {'--graph' if question.graph else '--svg'}")])
    return chosen


def _tell(answers: Sequence[tuple[Job, Mapping | Infeasible]], question: Question) -> None:
    """Print what was found, in the form that is asked for."""
    found = [(job, answer) for job, answer in answers if isinstance(answer, Mapping)]
    if question.in_json:
        documents = [{"job": job.name, **as_json(answer)} for job, answer in answers]
        typer.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    elif question.graph:
        _draw(found, question.svg)
    else:
        _explain(answers)
        for job, mapping in found:
            if question.svg:
                _write_timeline(job, mapping, question.svg)


def _draw(found: Sequence[tuple[Job, Mapping]], svg: Path | None) -> None:
    try:
        from rlhf_trainer.run.draw import draw
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"--graph reads what the workers declare, which needs {error.name}") from error
    draw(found, svg)


def _explain(answers: Sequence[tuple[Job, Mapping | Infeasible]]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    for place, (job, answer) in enumerate(answers):
        typer.echo("\n" * bool(place), nl=False)
        explain(answer, title=f"{job.name}, a step of {job.spec.algorithm.name}", console=console)


def _write_timeline(job: Job, mapping: Mapping, svg: Path) -> None:
    assert mapping.prediction, "the shapes are known"
    timeline = timeline_of(mapping.pools, mapping.prediction)
    with written(svg):
        svg.write_text(svg_of(timeline, title=f"{job.name}, a step of {job.spec.algorithm.name}"))
    typer.echo(f"drawn into {svg}")
