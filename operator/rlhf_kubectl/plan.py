"""Mapping that the operator would choose for a job on this cluster, computed on the user's machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path

from rich.console import Console

from rlhf_api.files import document_of, load
from rlhf_api.job import Job
from rlhf_kubectl.jobs import find_job, job_documents, settings_of
from rlhf_kubectl.kubectl import Kubectl
from rlhf_operator.cluster import parse, raw, view
from rlhf_operator.cluster.cache import Cache, KindName
from rlhf_operator.cluster.resources import NODES, PODS
from rlhf_operator.placement.map_job import MappingResult, map_job
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, ObservedJob, Snapshot
from rlhf_planning.mapping_text import print_plan

NOTES = (
    "you may not list nodes: spec.resources is believed",
    "you may not list the pods of all namespaces: nodes are taken to be free",
    "the operator's settings cannot be read: those of a plain installation count",
)
"""Notes on the plan's assumptions if the user may not read the nodes, the pods or the operator's settings."""


def plan(kubectl: Kubectl, what: str) -> list[tuple[str, MappingResult]]:
    """Print and return the mapper's answer for each job of a file, or for a job of the cluster as if it were new.

    Raises SpecError for a wrong file or spec, KubectlError if there is no such job.
    """
    cache, settings = Cache(), settings_of(kubectl, kubectl.namespace)
    documents, nodes, pods = job_documents(kubectl), kubectl.items(NODES.path()), kubectl.items(PODS.path())
    found: dict[KindName, Sequence[Document] | None] = {"jobs": documents, "nodes": nodes, "pods": pods}
    for kind, listed in found.items():
        for document in listed or ():
            cache.put(kind, document)
    existing = {job.value.name: job.value for _, job in cache.jobs}
    if Path(what).is_file():
        finished = {name: raw.text(job.spec, "algorithm", "name") for name, job in existing.items()}
        jobs = load(Path(what), finished=finished)
        observed = [_observe(job, kubectl.namespace, existing.get(job.name)) for job in jobs]
    else:
        observed = [find_job(kubectl, what)]
        jobs = [parse_job(observed[0])]
    by_name = {**existing, **{each.name: each for each in observed}}
    answers, console = [], Console(highlight=False)
    for job, each in zip(jobs, observed, strict=True):
        snapshot = _snapshot(cache, each, by_name, settings or Settings(), knows_nodes=nodes is not None)
        answers.append((job.name, map_job(job, snapshot, settings or Settings())))
        _print_answer(console, job, answers[-1][1])
    for note in compress(NOTES, (nodes is None, pods is None, settings is None)):
        console.print(f"note: {note}", style="dim")
    return answers


def _observe(job: Job, namespace: str, namesake: ObservedJob | None) -> ObservedJob:
    """Return a job of a file as the operator would see it; model shapes come from the cluster's job of that name."""
    document = document_of(job)
    new = parse.job({**document, "metadata": {**document["metadata"], "namespace": namespace}})
    if namesake is None:
        return new
    shapes = new.status.model_copy(update={"shapes": namesake.status.shapes})
    return replace(new, uid=namesake.uid, labels=namesake.labels, status=shapes)


def _snapshot(
    cache: Cache, job: ObservedJob, by_name: Mapping[str, ObservedJob], settings: Settings, *, knows_nodes: bool
) -> Snapshot:
    """Return the operator's view of a job and the cluster; by_name: all jobs, whose outputs the job may read."""
    taken, by_jobs = view.held_by_others(cache, job, settings)
    return Snapshot(
        job=job,
        inputs={name: view.input_of(other) for name, other in by_name.items()},
        measured=tuple(view.measured_attempts(cache, job)),
        nodes=view.nodes_of(cache, settings) if knows_nodes else None,
        taken=taken,
        held_by_jobs=by_jobs,
        watching_since=datetime.now(UTC),
    )


def _print_answer(console: Console, job: Job, result: MappingResult) -> None:
    console.print(f"{job.name}: {result.reason}", style="bold" if result.mapping else "bold red", markup=False)
    console.print(f"  {result.message}", markup=False, soft_wrap=True)
    if result.answer:
        print_plan(result.answer, title=f"{job.name}, a step of {job.spec.algorithm.name}")
