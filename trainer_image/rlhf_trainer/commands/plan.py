"""`rlhf plan`: placement and parallel sizes of the models of a manifest, and the predicted step."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import typer

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import DeviceMapping, Infeasible, as_json
from rlhf_mapper.workload import lengths_around
from rlhf_planning.checkpoint_size import in_words, upload_in_words
from rlhf_planning.graph_text import LEGEND, mermaid_of, text_of
from rlhf_planning.job_plan import networks_of, notes_of, objective_of, plan_job, prices_of
from rlhf_planning.lengths import lengths_of
from rlhf_planning.machines import device_of, in_worker_pods, local_cluster
from rlhf_planning.mapping_text import explain, printing, step_price
from rlhf_planning.timeline import timeline_of
from rlhf_trainer.device import gpus_here
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.report.calibrate import Calibration, calibration_of
from rlhf_trainer.report.run_record import JobRecord, read_run
from rlhf_trainer.run.placement import with_cpu_slots
from rlhf_trainer.run.preconditions import require_generating, require_mixtures
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run_folder.folder import writing


@dataclass(frozen=True)
class JobPlan:
    """Plan of a job: the placement of its models (mapping), and everything else that is printed about the job."""

    job: Job = field(compare=False)
    mapping: DeviceMapping | Infeasible
    calibration: Calibration | None
    """Past runs that correct the prediction; None: no correction."""
    prices: Mapping[str, float]
    """Price of a GPU-hour by GPU type; empty if a price is not known."""
    notes: tuple[str, ...]
    """Sentences on what the prediction assumes."""
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
    calibrate: Sequence[Path] = (),
    responses: str | None = None,
    prompts: str | None = None,
) -> list[JobPlan]:
    """Return the plan of each chosen job of a manifest, from models' shapes (config.json); no weight is loaded.

    cluster: by default this machine. objective: by default the manifest's. calibrate: folders of earlier runs, whose
    measured times correct the prediction. responses, prompts: lengths as of `lengths_of`; responses are by default as
    long as in these runs, or in an earlier run in `output`. Raises SpecError; DataError if a model's shape
    cannot be read.
    """
    names, slots = {job.name for job in chosen}, ""
    if cluster is None:
        jobs, slots = with_cpu_slots(jobs, output)
    plans = []
    for job in (job for job in jobs if job.name in names):
        if job.spec.algorithm.data == "layers":
            sys.stderr.write(f"{job.name}: merges models on one CPU slot; its steps are not predicted\n")
            continue
        machines = in_worker_pods(cluster, job) if cluster else local_cluster(job, gpus_here)
        device = device_of(job, machines)
        runs = {run: read_run(run).jobs for run in calibrate}
        calibration = Calibration([calibration_of(*item, job, machines) for item in runs.items()]) if runs else None
        data = job.spec.data
        earlier = [*runs.values()] or ([read_run(output).jobs] if (output / job.name / "job.yaml").exists() else [])
        given = lengths_of(responses, "--response-tokens", most=data.max_response_tokens) if responses else ()
        shapes = shapes_of(jobs, job, output)
        require_generating(jobs, job, output)
        require_mixtures(job, {role: shape.experts for role, shape in shapes.items()})
        mapping = plan_job(
            job,
            machines,
            shapes,
            device=device,
            objective=None if objective is None else objective_of(objective, machines),
            correction=calibration.correction if calibration else None,
            responses=given or _measured_lengths(earlier, job),
            prompts=lengths_of(prompts, "--prompt-tokens", most=data.max_prompt_tokens) if prompts else (),
        )
        upload = upload_in_words(job, shapes, mapping, machines)
        notes = filter(None, (*networks_of(machines), *notes_of(job, mapping, machines, shapes), slots, upload))
        plans.append(JobPlan(job, mapping, calibration, prices_of(machines), tuple(notes), in_words(job, shapes)))
    return plans


def _measured_lengths(runs: Sequence[Sequence[JobRecord]], job: Job) -> Sequence[float]:
    """Return response lengths by the median of a job's mean lengths in some runs; empty if unmeasured."""
    records = [row for run in runs for record in run if record.name == job.name for row in record.records]
    means = [row["response_length/mean"] for row in records if row.get("response_length/mean", 0) > 0]
    return lengths_around(max(median(means), 1.0), float(job.spec.data.max_response_tokens)) if means else ()


def print_plans(plans: Sequence[JobPlan], *, in_json: bool, graph: bool, svg: Path | None) -> None:
    """Print plans as JSON, graphs of calls, or text and tables; then EnvironmentProblem if a job does not fit."""
    if in_json:
        documents = [*documents_of(plans).values()]
        typer.echo(json.dumps(documents if len(documents) != 1 else documents[0], indent=2))
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


def _draw(plans: Sequence[JobPlan], svg: Path | None) -> None:
    from rlhf_trainer.run.graph import graph_of  # torch

    found = [(each, each.mapping) for each in plans if isinstance(each.mapping, DeviceMapping)]
    for each, placed in found:
        pools = "; ".join(f"{pool.name}: {placed.described(pool)}" for pool in placed.pools)
        graph, title = graph_of(each.job, placed), f"{each.title}. {pools}"
        typer.echo(f"{text_of(graph, title=title)}\n")
        if svg and svg.suffix in (".md", ".mmd"):
            _write(svg, mermaid_of(graph))
        elif svg:
            from rlhf_trainer.report.plan_pictures import graph_svg  # matplotlib

            _write(svg, graph_svg(graph, title=title, pools=[pool.name for pool in placed.pools]))
        typer.echo("", nl=svg is not None)
    if found:
        typer.echo(LEGEND)


def _explain(answer: JobPlan, svg: Path | None) -> None:
    with printing() as console:
        explain(answer.mapping, title=answer.title, console=console, prices=answer.prices, notes=answer.notes)
    typer.echo(f"{answer.checkpoints}\n")
    typer.echo(f"{answer.calibration}\n" if answer.calibration else "")
    if svg and isinstance(answer.mapping, DeviceMapping):
        assert answer.mapping.prediction, "the shapes are known"
        from rlhf_trainer.report.plan_pictures import timeline_svg  # matplotlib

        timeline = timeline_of(answer.mapping.pools, answer.mapping.prediction)
        _write(svg, timeline_svg(timeline, title=answer.title))


def _write(svg: Path, text: str) -> None:
    with writing(svg):
        svg.write_text(text)
    typer.echo(f"drawn into {svg}")
