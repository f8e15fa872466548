"""Every example's jobs as the operator sees them, on nodes of one's choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from rlhf_api.chain import inputs_of
from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement, Status
from rlhf_operator.actions import Manifest
from rlhf_operator.cluster import parse
from rlhf_operator.placement.claim_size import claim_size
from rlhf_operator.placement.map_job import MappingResult, map_job
from rlhf_operator.resources import storage
from rlhf_operator.resources.attempt import attempt_manifests
from rlhf_operator.resources.pods import AttemptPods
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedNode, Snapshot
from tests.examples.test_every_example_is_right import EXAMPLES, jobs_of

SETTINGS = Settings()
THEN = datetime(2026, 1, 31, 12, tzinfo=UTC)
_ANSWERS: dict[str, MappingResult] = {}
A100 = "NVIDIA-A100-SXM4-80GB"


@cache
def example_jobs() -> dict[str, Job]:
    """All jobs of all examples by name."""
    return {job.name: job for path in EXAMPLES for job in jobs_of(path)}


def changed(name: str, changes: Mapping[str, object]) -> Job:
    """A job of the examples with other values; `changes` are by dotted path below the spec."""
    document = json.loads(json.dumps(example_jobs()[name].model_dump(mode="json", by_alias=True)))
    for path, value in changes.items():
        *parents, last = path.split(".")
        found: Any = document["spec"]
        for parent in parents:
            found[parent] = found.get(parent) or {}
            found = found[parent]
        found[last] = value
    return Job.parse(document)


def node(name: str, *, gpus: int = 0, product: str = "", resource: str = "nvidia.com/gpu", **more: Any) -> ObservedNode:
    """A node that is ready; `more`: fields of ObservedNode."""
    labels = {**more.pop("labels", {}), **({"nvidia.com/gpu.product": product} if product else {})}
    allocatable = {"cpu": "64", "memory": "528Gi", **({resource: str(gpus)} if gpus else {})}
    fields: dict[str, Any] = {"ready": True, "schedulable": True, **more}
    return ObservedNode(name=name, labels=labels, allocatable=allocatable, **fields)


def nodes(count: int, gpus: int = 0, product: str = "", prefix: str = "n") -> tuple[ObservedNode, ...]:
    """Equal ones."""
    return tuple(node(f"{prefix}{place}", gpus=gpus, product=product) for place in range(count))


def snapshot(
    job: Job,
    there: Sequence[ObservedNode] | None = (),
    *,
    labels: Mapping[str, str] | None = None,
    namespace: str = "default",
    uid: str = "",
) -> Snapshot:
    """What is seen of a job all of whose inputs have succeeded."""
    seen = ObservedJob(
        namespace=namespace,
        name=job.name,
        uid=uid or f"uid-of-{job.name}",
        generation=1,
        resource_version="7",
        created=THEN,
        deleting=False,
        labels=labels or {},
        spec=job.model_dump(mode="json", by_alias=True)["spec"],
        status=Status(),
    )
    inputs = {name: _input(example_jobs()[name]) for name in _read_by(job)}
    return Snapshot(job=seen, inputs=inputs, nodes=None if there is None else tuple(there), watching_since=THEN)


def place(job: Job, there: Sequence[ObservedNode] | None, settings: Settings = SETTINGS) -> MappingResult:
    """Where it lives; asked once a question."""
    question = repr((job, there, settings))
    if question not in _ANSWERS:
        _ANSWERS[question] = map_job(job, snapshot(job, there), settings)
    return _ANSWERS[question]


def mapped(job: Job, there: Sequence[ObservedNode] | None, settings: Settings = SETTINGS) -> MappedPlacement:
    """The same where there is a place."""
    found = place(job, there, settings)
    assert found.mapping, found
    return found.mapping


def made(
    job: Job,
    there: Sequence[ObservedNode] | None,
    settings: Settings = SETTINGS,
    *,
    attempt: int = 1,
    avoided: Sequence[str] = (),
    **more: Any,
) -> dict[str, Manifest]:
    """The manifests of an attempt by kind; `more`: of `snapshot`."""
    seen = snapshot(job, there, **more)
    mapping = mapped(job, there, settings)
    pods = AttemptPods(snapshot=seen, job=job, mapping=mapping, settings=settings, attempt=attempt, avoided=avoided)
    return {each["kind"]: each for each in attempt_manifests(pods, claim_size=claim_size(job, seen))}


def groups(rayjob: Manifest) -> dict[str, dict[str, Any]]:
    """The worker groups by name."""
    return {each["groupName"]: each for each in rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


def head(rayjob: Manifest) -> dict[str, Any]:
    """The head group."""
    group: dict[str, Any] = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]
    return group


def pod_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The pod's spec."""
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Those that have a value, by name."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def limits(containers: Iterable[Mapping[str, Any]], resource: str) -> list[str]:
    """Of those containers that have one."""
    found = [container["resources"]["limits"].get(resource) for container in containers]
    return [each for each in found if each]


def _read_by(job: Job) -> set[str]:
    """The jobs that a job reads, and those that they read."""
    direct = inputs_of(job)
    return direct.union(*(_read_by(example_jobs()[name]) for name in direct))


def _input(job: Job) -> ObservedJob:
    spec = job.model_dump(mode="json", by_alias=True)["spec"]
    status = {"phase": "Succeeded", "output": {"uri": storage.output_uri(job)}}
    return parse.job({"metadata": {"name": job.name}, "spec": spec, "status": status})
