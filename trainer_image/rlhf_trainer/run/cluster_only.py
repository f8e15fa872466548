"""What a manifest says that only a cluster's operator can do; it gives the trainer a manifest without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError

CLAIM = "pvc://"


def require_no_cluster(jobs: Sequence[Job]) -> None:
    """SpecError for each address on a cluster's volumes, and for a job that is suspended."""
    claims = {f"{job.name}: spec.{path}": uri for job in jobs for path, uri in _addresses(job) if uri.startswith(CLAIM)}
    sentence = "is on a volume of a cluster, and no operator runs this job"
    problems = [Problem(path, f"{uri} {sentence}") for path, uri in claims.items()]
    problems += [
        Problem(f"{job.name}: spec.suspend", "is true, so the job is not run") for job in jobs if job.spec.suspend
    ]
    if problems:
        raise SpecError(problems)


def _addresses(job: Job) -> Iterator[tuple[str, str]]:
    """(path of the field, URI) of all that a job reads or writes; that of a shared model comes twice."""
    spec = job.spec
    for role, model in job.models().items():
        yield f"models.{spec.models.source_field(role)}.uri", model.uri
    yield "data.train.uri", spec.data.train.uri
    if spec.data.pretrain:
        yield "data.pretrain.uri", spec.data.pretrain.uri
    if spec.evaluation:
        yield "evaluation.data.uri", spec.evaluation.data.uri
    if spec.checkpoint.storage:
        yield "checkpoint.storage", spec.checkpoint.storage
