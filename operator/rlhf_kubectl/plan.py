"""What the operator's mapper says of a job on the nodes of this cluster, asked here with the user's rights."""

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
from rlhf_kubectl.installation import parsed, settings_of
from rlhf_kubectl.jobs import documents, named
from rlhf_kubectl.kubectl import Kubectl
from rlhf_operator.cluster import parse, raw
from rlhf_operator.cluster.cache import Cache
from rlhf_operator.cluster.resources import NODES, PODS
from rlhf_operator.cluster.view import View, input_of
from rlhf_operator.placement import MappingResult, map_job
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedNode, Snapshot


@dataclass(frozen=True)
class Here:
    """The cluster as the user sees it."""

    cache: Cache
    """The jobs of the namespace, the nodes and all pods."""
    nodes: tuple[ObservedNode, ...] | None
    """None where the user may not list them."""
    settings: Settings
    notes: tuple[str, ...]
    """What is not known, in sentences."""


def plan(kubectl: Kubectl, what: str) -> list[tuple[str, MappingResult]]:
    """The answer for each job of a file, or for a job of the cluster as if it were mapped anew; prints them.

    Raises SpecError for a wrong file or spec, KubectlError where there is no such job.
    """
    here = _look(kubectl)
    there = {job.value.name: job.value for _, job in here.cache.jobs}
    if Path(what).is_file():
        finished = {name: raw.text(job.spec, "algorithm", "name") for name, job in there.items()}
        jobs = load(Path(what), finished=finished)
        seen = [_observed(job, kubectl.namespace, there.get(job.name)) for job in jobs]
    else:
        seen = [named(kubectl, what)]
        jobs = [parsed(seen[0])]
    known = {**there, **{each.name: each for each in seen}}
    answers = []
    console = Console(highlight=False)
    for job, each in zip(jobs, seen, strict=True):
        answer = map_job(job, _snapshot(each, known, here), here.settings)
        _tell(console, job.name, answer)
        answers.append((job.name, answer))
    for note in here.notes:
        console.print(f"note: {note}", style="dim")
    return answers


def _look(kubectl: Kubectl) -> Here:
    cache, settings = Cache(), settings_of(kubectl, kubectl.namespace)
    for job in documents(kubectl):
        cache.put("jobs", job)
    nodes, pods = kubectl.find(NODES.path()), kubectl.find(PODS.path())
    for node in (nodes or {}).get("items") or []:
        cache.put("nodes", node)
    for pod in (pods or {}).get("items") or []:
        cache.put("pods", pod)
    notes = ["you may not list nodes: spec.resources is believed"] * (nodes is None)
    notes += ["you may not list the pods of all namespaces: nodes are taken to be free"] * (pods is None)
    notes += ["the operator's settings cannot be read: those of a plain installation count"] * (settings is None)
    return Here(
        cache=cache,
        nodes=None if nodes is None else tuple(node.value for _, node in cache.nodes),
        settings=settings or Settings(),
        notes=tuple(notes),
    )


def _observed(job: Job, namespace: str, there: ObservedJob | None) -> ObservedJob:
    """A job of a file as the operator would see it; what was read of its models' shapes is that of its namesake."""
    document = document_of(job)
    new = parse.job({**document, "metadata": {**document["metadata"], "namespace": namespace}})
    if there is None:
        return new
    shapes = new.status.model_copy(update={"shapes": there.status.shapes})
    return replace(new, uid=there.uid, labels=there.labels, status=shapes)


def _snapshot(job: ObservedJob, known: Mapping[str, ObservedJob], here: Here) -> Snapshot:
    view = View(here.cache)
    taken, by_jobs = view.held_by_others(job)
    return Snapshot(
        job=job,
        inputs={name: input_of(each) for name, each in known.items()},
        measured=tuple(view.measured(job)),
        nodes=here.nodes,
        taken=taken,
        held_by_jobs=by_jobs,
        watching_since=datetime.now(UTC),
    )


def _tell(console: Console, name: str, answer: MappingResult) -> None:
    console.print(f"{name}: {answer.reason}", style="bold" if answer.mapping else "bold red", markup=False)
    console.print(f"  {answer.message}", markup=False, soft_wrap=True)
    if answer.mapping:
        console.print(_sizes(answer.mapping))


def _sizes(mapping: MappedPlacement) -> Table:
    """Where each model lives and how it is cut, as `rlhf plan` writes it."""
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
