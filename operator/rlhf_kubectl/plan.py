"""Answer of the operator's mapper for a job on the nodes of this cluster, computed here with the user's rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlhf_api.files import document_of, load
from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement
from rlhf_kubectl.installation import parse_job, settings_of
from rlhf_kubectl.jobs import find_job, job_documents
from rlhf_kubectl.kubectl import Kubectl
from rlhf_operator.cluster import parse, raw, view
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.cluster.resources import NODES, PODS
from rlhf_operator.placement.map_job import MappingResult, map_job
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedNode, Snapshot


@dataclass(frozen=True)
class VisibleCluster:
    """Part of the cluster that the user may see, with the operator's settings."""

    cache: Cache
    """Cache of the jobs of the namespace, the nodes, and all pods."""
    nodes: tuple[ObservedNode, ...] | None
    """Nodes of the cluster; None if the user may not list them."""
    settings: Settings
    notes: tuple[str, ...]
    """Sentences on what the user may not see."""


def plan(kubectl: Kubectl, what: str) -> list[tuple[str, MappingResult]]:
    """Print and return the mapper's answer for each job of a file, or for a job of the cluster as if it were new.

    Raises SpecError for a wrong file or spec, KubectlError if there is no such job.
    """
    visible = _visible_cluster(kubectl)
    existing = {job.value.name: job.value for _, job in visible.cache.jobs}
    if Path(what).is_file():
        finished = {name: raw.text(job.spec, "algorithm", "name") for name, job in existing.items()}
        jobs = load(Path(what), finished=finished)
        observed = [_observe(job, kubectl.namespace, existing.get(job.name)) for job in jobs]
    else:
        observed = [find_job(kubectl, what)]
        jobs = [parse_job(observed[0])]
    by_name = {**existing, **{each.name: each for each in observed}}
    answers = []
    console = Console(highlight=False)
    for job, each in zip(jobs, observed, strict=True):
        answer = map_job(job, _snapshot(each, by_name, visible), visible.settings)
        _print_answer(console, job.name, answer)
        answers.append((job.name, answer))
    for note in visible.notes:
        console.print(f"note: {note}", style="dim")
    return answers


def _visible_cluster(kubectl: Kubectl) -> VisibleCluster:
    cache, settings = Cache(), settings_of(kubectl, kubectl.namespace)
    for job in job_documents(kubectl):
        cache.put("jobs", job)
    nodes, pods = kubectl.find(NODES.path()), kubectl.find(PODS.path())
    for node in (nodes or {}).get("items") or []:
        cache.put("nodes", node)
    for pod in (pods or {}).get("items") or []:
        cache.put("pods", pod)
    notes = ["you may not list nodes: spec.resources is believed"] * (nodes is None)
    notes += ["you may not list the pods of all namespaces: nodes are taken to be free"] * (pods is None)
    notes += ["the operator's settings cannot be read: those of a plain installation count"] * (settings is None)
    return VisibleCluster(
        cache=cache,
        nodes=None if nodes is None else tuple(node.value for _, node in cache.nodes),
        settings=settings or Settings(),
        notes=tuple(notes),
    )


def _observe(job: Job, namespace: str, namesake: ObservedJob | None) -> ObservedJob:
    """Return a job of a file as the operator would see it, with the model shapes that its namesake's status holds."""
    document = document_of(job)
    new = parse.job({**document, "metadata": {**document["metadata"], "namespace": namespace}})
    if namesake is None:
        return new
    shapes = new.status.model_copy(update={"shapes": namesake.status.shapes})
    return replace(new, uid=namesake.uid, labels=namesake.labels, status=shapes)


def _snapshot(job: ObservedJob, by_name: Mapping[str, ObservedJob], visible: VisibleCluster) -> Snapshot:
    taken, by_jobs = view.held_by_others(visible.cache, job)
    return Snapshot(
        job=job,
        inputs={name: view.input_of(each) for name, each in by_name.items()},
        measured=tuple(view.measured(visible.cache, job)),
        nodes=visible.nodes,
        taken=taken,
        held_by_jobs=by_jobs,
        watching_since=datetime.now(UTC),
    )


def _print_answer(console: Console, name: str, answer: MappingResult) -> None:
    console.print(f"{name}: {answer.reason}", style="bold" if answer.mapping else "bold red", markup=False)
    console.print(f"  {answer.message}", markup=False, soft_wrap=True)
    if answer.mapping:
        console.print(_sizes(answer.mapping))


def _sizes(mapping: MappedPlacement) -> Table:
    """Return a table with the pool and the parallel sizes of each model, in the notation of `rlhf plan`."""
    table = Table("  model", "pool", mapping.device + "s", "p-t-d", "p_g-t_g", "offload", box=None, pad_edge=False)
    pools = {model: pool for pool in mapping.pools for model in pool.models}
    for each in mapping.sizes:
        pool = pools[each.role]
        generates = each.generation_tensor is not None
        table.add_row(
            f"  {each.role}",
            pool.name,
            f"{pool.nodes} x {pool.slots_per_node} {pool.gpu or ''}".rstrip(),
            f"{each.pipeline}-{each.tensor}-{each.data}",
            f"{each.generation_pipeline}-{each.generation_tensor}" if generates else "",
            each.offload or "",
        )
    return table
