"""Mapping that the operator would choose for a job on this cluster, computed on the user's machine."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path

from rich.console import Console

from rlhf_api.files import document_of, load
from rlhf_api.job import Job
from rlhf_kubectl.jobs import find_job, job_documents, settings_of
from rlhf_kubectl.kubectl import Kubectl
from rlhf_mapper.hardware import Cluster
from rlhf_operator.cluster import parse, view
from rlhf_operator.cluster.cache import Cache, KindName
from rlhf_operator.cluster.resources import NODES, PODS, SLICES, preferred
from rlhf_operator.conditions import found
from rlhf_operator.placement.map_job import map_job
from rlhf_operator.placement.shapes import shapes_of
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, ObservedJob, Snapshot
from rlhf_planning.job_plan import notes_of
from rlhf_planning.mapping_text import explain, printing

NOTES = (
    "you may not list the pods of all namespaces: nodes are taken to be free",
    "you may not list the ConfigMaps of all namespaces, with the operator's settings: those of a plain chart count",
)
"""Notes on the plan's assumptions if the user may not read the pods or the operator's settings."""


def plan(kubectl: Kubectl, what: str) -> list[str]:
    """Print the mapper's answer for each job of a file, or for a job of the cluster; return the jobs without a mapping.

    A user who may not list nodes gets the operator's answer for a job of the cluster. Raises SpecError for a wrong
    file or spec, KubectlError if there is no such job, or for a file if the user may not list nodes.
    """
    console = Console(highlight=False)
    if (nodes := kubectl.items(NODES.path())) is None:
        return _print_operators_answer(kubectl, console, what)
    settings, pods = settings_of(kubectl, kubectl.namespace), kubectl.items(PODS.path())
    slices = kubectl.items(preferred(SLICES, kubectl.find(f"/apis/{SLICES.group}")).path())
    cache, jobs = Cache(), job_documents(kubectl)
    listed: dict[KindName, list[Document] | None] = {"jobs": jobs, "nodes": nodes, "pods": pods, "slices": slices}
    for kind, documents in listed.items():
        for document in documents or ():
            cache.put(kind, document)
    existing = {job.value.name: job.value for _, job in cache.jobs}
    observed = _jobs_to_plan(kubectl, what, existing)
    by_name = existing | {each.name: each for _, each in observed}
    used, without = settings or Settings(), list[str]()
    for job, each in observed:
        snapshot = _snapshot(cache, each, by_name, used)
        result = map_job(job, snapshot, used)
        _print_answer(console, job.name, result.reason, result.message, has_place=result.mapping is not None)
        if result.answer:
            notes = notes_of(job, result.answer, Cluster(), shapes_of(job, snapshot).known)
            title = f"{job.name}, a step of {job.spec.algorithm.name}"
            with printing() as wide:
                explain(result.answer, title=title, console=wide, notes=notes)
        without += [job.name] * (result.mapping is None)
    for note in compress(NOTES, (pods is None, settings is None)):
        console.print(f"note: {note}", style="dim")
    return without


def _print_operators_answer(kubectl: Kubectl, console: Console, what: str) -> list[str]:
    """Print the condition Mapped of a job of the cluster; return the job if it has no place."""
    mapped = None if Path(what).is_file() else found(find_job(kubectl, what).status.conditions, "Mapped")
    if mapped is None:
        kubectl.get(NODES.path())  # raises KubectlError, which names the missing right
        return [what]
    has_place, when = mapped.status == "True", mapped.last_transition_time
    _print_answer(console, what, mapped.reason, mapped.message, has_place=has_place)
    console.print(f"note: you may not list nodes; this is the operator's answer of {when}", style="dim")
    return [] if has_place else [what]


def _jobs_to_plan(kubectl: Kubectl, what: str, existing: Mapping[str, ObservedJob]) -> list[tuple[Job, ObservedJob]]:
    """Return the jobs of a file, or the job of the cluster, each as the operator would see it."""
    if not Path(what).is_file():
        job = find_job(kubectl, what)
        return [(parse_job(job), job)]
    finished = {name: job.algorithm for name, job in existing.items()}
    jobs = load(Path(what), finished=finished)
    return [(job, _observe(job, kubectl.namespace, existing.get(job.name))) for job in jobs]


def _observe(job: Job, namespace: str, namesake: ObservedJob | None) -> ObservedJob:
    """Return a job of a file as the operator would see it; model shapes come from the cluster's job of that name."""
    document = document_of(job)
    new = parse.job({**document, "metadata": {**document["metadata"], "namespace": namespace}})
    if namesake is None:
        return new
    shapes = new.status.model_copy(update={"shapes": namesake.status.shapes})
    return replace(new, uid=namesake.uid, labels=namesake.labels, status=shapes)


def _snapshot(cache: Cache, job: ObservedJob, by_name: Mapping[str, ObservedJob], settings: Settings) -> Snapshot:
    """Return the operator's view of a job and the cluster; by_name: all jobs, whose outputs the job may read."""
    taken, by_jobs = view.held_by_others(cache, job, settings)
    return Snapshot(
        job=job,
        inputs=by_name,
        measured=tuple(view.measured_attempts(cache, job)),
        nodes=view.nodes_of(cache, settings) if settings.read_nodes else None,
        taken=taken,
        held_by_jobs=by_jobs,
        claimable_gpus=view.claimable_gpus(cache),
        watching_since=datetime.now(UTC),
    )


def _print_answer(console: Console, name: str, reason: str, message: str, *, has_place: bool) -> None:
    console.print(f"{name}: {reason}", style="bold" if has_place else "bold red", markup=False)
    console.print(f"  {message}", markup=False, soft_wrap=True)
