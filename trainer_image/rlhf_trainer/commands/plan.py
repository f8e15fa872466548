"""`rlhf plan`: placement and parallel sizes of the models of a manifest, and the predicted step."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from rlhf_api.files import read_text
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping, Infeasible, as_json
from rlhf_mapper.workload import lognormal
from rlhf_planning.checkpoint_size import in_words
from rlhf_planning.graph_text import LEGEND, mermaid_of, text_of
from rlhf_planning.job_plan import networks_of, objective_of, plan_job, prices_of
from rlhf_planning.machines import device_of, local_cluster
from rlhf_planning.mapping_text import print_plan, step_price
from rlhf_planning.timeline import timeline_of
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.report.calibrate import RunCalibration, calibration_of
from rlhf_trainer.report.run_record import read_run
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run_folder.folder import writing

LENGTHS = "fixed(TOKENS) or lognormal(MEAN,P99)"
DISTRIBUTION = re.compile(r"(?P<name>fixed|lognormal)\((?P<mean>[1-9]\d*)(, *(?P<p99>[1-9]\d*))?\)")


@dataclass(frozen=True)
class JobPlan:
    """Plan of a job: the placement of its models (mapping), and everything else that is printed about the job."""

    job: Job
    mapping: DeviceMapping | Infeasible
    calibration: RunCalibration | None
    """Past run that corrects the prediction; None: no correction."""
    prices: Mapping[str, float]
    """Price of a GPU-hour by GPU type; empty if a price is not known."""
    networks: tuple[str, ...]
    """Sentences on the network speeds that the prediction assumes for the nodes."""
    checkpoints: str

    @property
    def title(self) -> str:
        return f"{self.job.name}, a step of {self.job.spec.algorithm.name}"


def choose(jobs: Sequence[Job], *, only: str | None, in_json: bool, graph: bool, svg: Path | None) -> Sequence[Job]:
    """Return the jobs to plan: all, or the one named `only`. SpecError for an unknown name or conflicting options."""
    names = ", ".join(job.name for job in jobs)
    chosen = [job for job in jobs if only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("JOB", f"is {only}; the manifest has {names}")])
    if svg and len(chosen) > 1:
        raise SpecError([Problem("--svg", f"draws one job; name one of {names}")])
    if in_json and (graph or svg):
        raise SpecError([Problem("--json", f"is not for {'--graph' if graph else '--svg'}")])
    return chosen


def plans_of(
    chosen: Sequence[Job],
    jobs: Sequence[Job],
    output: Path,
    cluster: Cluster | None,
    *,
    objective: str | None = None,
    calibrate: Path | None = None,
    lengths: str | None = None,
) -> list[JobPlan]:
    """Return the plan of each chosen job of a manifest, from models' shapes (config.json); no weight is loaded.

    cluster: by default this machine. objective: by default the manifest's. calibrate: run folder of an earlier run,
    whose measured times correct the prediction. lengths: those of responses, a named distribution or a file of past
    lengths in tokens; by default all are the longest. Raises SpecError; DataError if a model's shape cannot be read.
    """
    plans = []
    for job in chosen:
        machines = cluster or local_cluster(job, gpus_here)
        device = device_of(job, machines)
        calibration = calibration_of(calibrate, read_run(calibrate).jobs, job, machines) if calibrate else None
        shapes = shapes_of(jobs, job, output)
        mapping = plan_job(
            job,
            machines,
            shapes,
            device=device,
            objective=None if objective is None else objective_of(objective, machines),
            correction=calibration.correction if calibration else None,
            responses=_lengths(lengths, job) if lengths else (),
        )
        prices, networks, checkpoints = prices_of(machines), tuple(networks_of(machines)), in_words(job, shapes)
        plans.append(JobPlan(job, mapping, calibration, prices, networks, checkpoints))
    return plans


def print_plans(plans: Sequence[JobPlan], *, in_json: bool, graph: bool, svg: Path | None) -> None:
    """Print plans as JSON, graphs of calls, or text and tables; then EnvironmentProblem if a job does not fit."""
    if in_json:
        documents = [*documents_of(plans).values()]
        typer.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    elif graph:
        _draw(plans, svg)
    else:
        for each in plans:
            _explain(each, svg)
    if short := [f"{each.job.name}: {each.mapping}" for each in plans if isinstance(each.mapping, Infeasible)]:
        raise EnvironmentProblem("; ".join(short))


def documents_of(plans: Sequence[JobPlan]) -> dict[str, dict[str, Any]]:
    """Return the JSON document of each job's plan, by name of the job; with prices if they are known."""
    documents = {plan.job.name: {"job": plan.job.name, **as_json(plan.mapping)} for plan in plans}
    for plan in plans:
        document = documents[plan.job.name]
        for each in (document, *document["rejected"]) if plan.prices and document["predicted"] else ():
            pools = [(pool["gpu"], pool["gpus"]) for pool in each["pools"]]
            each["predicted"]["price"] = step_price(pools, each["predicted"]["step_seconds"], plan.prices)
    return documents


def _lengths(text: str, job: Job) -> tuple[float, ...]:
    """Return lengths of responses in tokens, from a distribution or a file. SpecError if the job cannot have them."""
    path, most = f"--response-tokens {text}", job.spec.data.max_response_tokens
    if named := DISTRIBUTION.fullmatch(text):
        mean, p99 = int(named["mean"]), int(named["p99"] or 0)
        if mean > most or bool(p99) != (named["name"] == "lognormal"):
            raise SpecError([Problem(path, f"is none of {LENGTHS}, of at most {most} tokens")])
        try:
            return lognormal(mean, p99, most=most) if p99 else (float(mean),)
        except ValueError as error:
            raise SpecError([Problem(path, f"cannot be: {error}")]) from None
    return _past_lengths(text, path, most)


def _past_lengths(file: str, path: str, most: int) -> tuple[float, ...]:
    """Return the lengths in tokens of a file, one per line; path: for error messages. SpecError for any other line."""
    lines = read_text(Path(file), path).split()
    wrong = next((line for line in lines if not (line.isdecimal() and 1 <= int(line) <= most)), None)
    if wrong is not None or not lines:
        found = f"has {wrong}" if wrong else "is empty"
        raise SpecError([Problem(path, f"{found}, expected a number of tokens from 1 to {most} in each line")])
    return tuple(map(float, lines))


def _draw(plans: Sequence[JobPlan], svg: Path | None) -> None:
    try:
        from rlhf_trainer.run.graph import graph_of
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"--graph reads what the workers declare, which needs {error.name}") from error
    found = [(each, each.mapping) for each in plans if isinstance(each.mapping, DeviceMapping)]
    for each, placed in found:
        pools = "; ".join(f"{pool.name}: {placed.described(pool)}" for pool in placed.pools)
        graph, title = graph_of(each.job, placed), f"{each.title}. {pools}"
        typer.echo(f"{text_of(graph, title=title)}\n")
        if svg:
            is_mermaid = svg.suffix in (".md", ".mmd")
            lanes = [pool.name for pool in placed.pools]
            text = mermaid_of(graph) if is_mermaid else _pictures().graph_svg(graph, title=title, pools=lanes)
            _write(svg, text)
            typer.echo("")
    if found:
        typer.echo(LEGEND)


def _explain(answer: JobPlan, svg: Path | None) -> None:
    print_plan(answer.mapping, title=answer.title, prices=answer.prices, networks=answer.networks)
    typer.echo(f"{answer.checkpoints}\n")
    typer.echo(f"{answer.calibration}\n" if answer.calibration else "")
    if svg and isinstance(answer.mapping, DeviceMapping):
        assert answer.mapping.prediction, "the shapes are known"
        timeline = timeline_of(answer.mapping.pools, answer.mapping.prediction)
        _write(svg, _pictures().timeline_svg(timeline, title=answer.title))


def _pictures() -> ModuleType:
    try:
        from rlhf_trainer.report import plan_pictures
    except ModuleNotFoundError as error:
        message = f"--svg draws by {error.name}, which is not installed: pip install 'rlhf-operator[plots]'"
        raise EnvironmentProblem(message) from error
    return plan_pictures


def _write(svg: Path, text: str) -> None:
    with writing(svg):
        svg.write_text(text)
    typer.echo(f"drawn into {svg}")
