"""`rlhf plan`: where the models of a manifest would live, how they would be cut, and what a step would take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError, choice
from rlhf_mapper.as_json import as_json
from rlhf_mapper.auto_map import auto_map, predicted
from rlhf_mapper.hardware import Cluster
from rlhf_mapper.mapping import Device, DeviceMapping, Infeasible, Inventory
from rlhf_mapper.place import place
from rlhf_mapper.search.objective import Objective
from rlhf_trainer.errors import EnvironmentProblem
from rlhf_trainer.run.folder import written
from rlhf_trainer.run.machines import ClusterFlags, device_of, this_machine
from rlhf_trainer.run.mapping_text import explain, step_price
from rlhf_trainer.run.measured import Measured, measured
from rlhf_trainer.run.shapes import shapes_of
from rlhf_trainer.run.timeline import seconds_text, timeline_of
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
    calibrate: Path | None
    """Run folder whose times correct the prediction."""
    lengths: Path | None
    """File with the tokens of past responses, one a line; None: all are as long as may be."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is told about a job."""

    job: Job
    mapping: DeviceMapping | Infeasible
    measured: Measured | None
    """By which the prediction is corrected."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Of a GPU for an hour, by type; none where one is not known."""

    @property
    def title(self) -> str:
        return f"{self.job.name}, a step of {self.job.spec.algorithm.name}"


def plan(jobs: Sequence[Job], output: Path, question: Question) -> None:
    """Answer for each of the manifest's jobs, or for one; nothing is loaded, and nothing runs.

    Raises SpecError; DataError for a model whose shape cannot be read; EnvironmentProblem where no mapping fits, after
    everything has been told.
    """
    chosen, cluster = _chosen(jobs, question), question.machines.cluster()
    prices = _prices(cluster) if cluster else {}
    answers = [
        replace(_answer(job, cluster or this_machine(job), jobs, output, question), prices=prices) for job in chosen
    ]
    _tell(answers, question)
    if short := [f"{each.job.name}: {each.mapping}" for each in answers if isinstance(each.mapping, Infeasible)]:
        raise EnvironmentProblem("; ".join(short))


def _answer(job: Job, cluster: Cluster, jobs: Sequence[Job], output: Path, question: Question) -> Answer:
    """The best mapping of a job onto a cluster, or the one that its manifest says."""
    device, objective = device_of(job, cluster), objective_of(question.objective, cluster)
    found = measured(question.calibrate, job, cluster) if question.calibrate else None
    correction = found.correction if found else None
    shapes = shapes_of(jobs, job, output)
    responses = _lengths(question.lengths, job) if question.lengths else ()
    if job.spec.placement.mode == "Manual":
        placed = place(job, _inventory(cluster, device))
        kept = predicted(job, placed, cluster, shapes, correction=correction, responses=responses)
        return Answer(job=job, mapping=kept, measured=found)
    search = partial(auto_map, job, cluster, shapes, device=device, correction=correction, responses=responses)
    mapping = search(objective=objective)
    if isinstance(mapping, Infeasible) and objective.kind == "fewest_gpus":
        mapping = _too_slow(search(), objective.most_seconds)
    return Answer(job=job, mapping=mapping, measured=found)


def _prices(cluster: Cluster) -> dict[str, float]:
    """Price of a GPU for an hour by type; none where a type has none, or more than one."""
    groups = {(group.gpu.name, group.gpu_hour_price) for group in cluster.groups}
    prices = {gpu: price for gpu, price in groups if price is not None}
    return prices if len(prices) == len(groups) else {}


def _lengths(file: Path, job: Job) -> tuple[float, ...]:
    """Tokens of past responses. SpecError where they cannot be read or cannot be those of the job."""
    path, most = f"--response-tokens {file}", job.spec.data.max_response_tokens
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem(path, f"cannot be read: {getattr(error, 'strerror', None) or 'not text'}")]) from None
    wrong = next((line for line in lines if not (line.isdecimal() and 1 <= int(line) <= most)), None)
    if wrong is not None or not lines:
        found = f"has {wrong}" if wrong else "is empty"
        raise SpecError([Problem(path, f"{found}, expected a number of tokens from 1 to {most} in each line")])
    return tuple(map(float, lines))


def _inventory(cluster: Cluster, device: Device) -> Inventory:
    """The GPUs of each machine; CPU slots are none."""
    return Inventory(
        gpus_per_machine=tuple(
            group.gpus_per_node if device == "GPU" else 0 for group in cluster.groups for _ in range(group.count)
        )
    )


def _too_slow(fastest: DeviceMapping | Infeasible, most_seconds: float) -> Infeasible:
    """Why no mapping takes so few seconds; fastest: the best one without that limit."""
    if isinstance(fastest, Infeasible):
        return fastest
    assert fastest.prediction, "the shapes are known"
    seconds = seconds_text(fastest.prediction.step_seconds)
    return Infeasible(
        short_bytes=0.0,
        smallest=(),
        reason=f"no mapping takes {seconds_text(most_seconds)} a step or less; the fastest takes {seconds}",
    )


def objective_of(text: str, cluster: Cluster) -> Objective:
    """What `--objective` asks for. Raises SpecError."""
    name, equals, value = text.partition("=")
    prices = [group.gpu_hour_price for group in cluster.groups]
    match name:
        case "throughput" if not equals:
            return Objective.throughput()
        case "fewest-gpus":
            return Objective.fewest_gpus(_seconds(text, value))
        case "lowest-cost" if not equals:
            known = tuple(price for price in prices if price is not None)
            if len(known) < len(prices):
                message = "lowest-cost needs the pricePerGpuHour of all nodes of an --inventory"
                raise SpecError([Problem("--objective", message)])
            return Objective.lowest_cost(known)
    raise SpecError([Problem("--objective", f"is {text or 'empty'}, expected {choice(OBJECTIVES)}")])


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


def _tell(answers: Sequence[Answer], question: Question) -> None:
    """Print what was found, in the form that is asked for."""
    found = [(each.job, each.mapping) for each in answers if isinstance(each.mapping, DeviceMapping)]
    if question.in_json:
        documents = [{"job": each.job.name, **_priced(as_json(each.mapping), each.prices)} for each in answers]
        typer.echo(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    elif question.graph:
        _draw(found, question.svg)
    else:
        for each in answers:
            _explain(each, question.svg)


def _priced(document: dict[str, Any], prices: Mapping[str, float]) -> dict[str, Any]:
    """The JSON of an answer; where prices are known, the best placement and each that was rejected have theirs."""
    for each in (document, *document["rejected"]) if prices and document["predicted"] else ():
        pools = [(pool["gpu"], pool["gpus"]) for pool in each["pools"]]
        each["predicted"]["price"] = step_price(pools, each["predicted"]["step_seconds"], prices)
    return document


def _draw(found: Sequence[tuple[Job, DeviceMapping]], svg: Path | None) -> None:
    try:
        from rlhf_trainer.run.draw import draw
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(f"--graph reads what the workers declare, which needs {error.name}") from error
    draw(found, svg)


def _explain(answer: Answer, svg: Path | None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    with console.capture() as shown:
        explain(answer.mapping, title=answer.title, console=console, prices=answer.prices)
    typer.echo(re.sub(r" +$", "", shown.get(), flags=re.MULTILINE), nl=False)
    typer.echo(f"{answer.measured}\n" if answer.measured else "")
    if svg and isinstance(answer.mapping, DeviceMapping):
        assert answer.mapping.prediction, "the shapes are known"
        timeline = timeline_of(answer.mapping.pools, answer.mapping.prediction)
        with written(svg):
            svg.write_text(svg_of(timeline, title=answer.title))
        typer.echo(f"drawn into {svg}")
