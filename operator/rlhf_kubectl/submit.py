"""Jobs of a manifest, given to a cluster with the code of their own that they name."""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import typer

from rlhf_api import kubectl_yaml
from rlhf_api.chain import SCHEME, inputs_of
from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load, read_text, strings_in
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_kubectl.jobs import ENDED_PHASES, job_documents
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_kubectl.own_files import config_map, own_files, with_files
from rlhf_operator.cluster import parse, raw
from rlhf_operator.resources import identity
from rlhf_operator.snapshot import Document, ObservedJob

READ_PARTS = ("models", "data", "evaluation", "rollout")
"""Parts of a spec that name what a job reads."""
ON_THE_CLUSTER = ("pvc://", "file://", "http://", "https://")
"""Schemes of what pods may have and this machine not, or another thing of that name."""


def submit(kubectl: Kubectl, manifest: Path | str, only: str | None = None) -> list[str]:
    """Check the jobs of a manifest, or the one named `only`, apply each with its own code, and print what was done.

    manifest: a file, or its text. Returns the jobs' names, each after the jobs that it reads. Raises SpecError,
    OwnCodeError or KubectlError for mistakes before anything is changed, and KubectlError if the cluster refuses.
    """
    existing = {raw.text(each, "metadata", "name"): each for each in job_documents(kubectl)}
    finished = {name: raw.text(each, "spec", "algorithm", "name") for name, each in existing.items()}
    jobs = load(manifest, finished=finished)
    chosen = [job for job in jobs if only in (None, job.name)]
    if not chosen:
        raise SpecError([Problem("JOB", f"is {only}; the manifest has {', '.join(job.name for job in jobs)}")])
    text, folders = manifest, [Path()]
    if isinstance(manifest, Path):
        text, folders = read_text(manifest), [manifest.parent, *folders]
    documents = {each["metadata"]["name"]: each for each in kubectl_yaml.read(str(text), "") if each}
    files = {job.name: own_files(documents[job.name], folders) for job in chosen}
    _try_here(chosen, documents)
    for name, code in files.items():
        typer.echo(f"{name}: {_apply(kubectl, documents[name], code, existing.get(name))}")
    return [*files]


def _try_here(jobs: Sequence[Job], documents: Mapping[str, Document]) -> None:
    """Try jobs on this machine, and print what cannot be tried here. Raises the mistakes of all jobs."""
    triable = dict[str, Job]()
    for job in jobs:
        missing = [f"{SCHEME}{name}" for name in inputs_of(job) - triable.keys()]
        if elsewhere := [*missing, *_on_the_cluster(job.name, documents[job.name]["spec"])]:
            typer.echo(f"note: {job.name} is not tried here: {elsewhere[0]} is looked for on the cluster")
        else:
            triable[job.name] = job
    try:
        (check,) = entry_points(group="rlhf.checks")
        errors = list(check.load()([*triable.values()])) if triable else []
    except ModuleNotFoundError as lack:
        typer.echo(f"note: models, data and code are not tried here: {lack.name} is not installed")
        return
    mistakes = []
    for error in errors:
        if error.exit_code == ExitCode.ENVIRONMENT or "cannot be reached" in str(error):
            typer.echo(f"note: on this machine {error}")
        else:
            mistakes.append(error)
    if mistakes:
        raise KubectlError("\n".join(map(str, mistakes)), mistakes[0].exit_code)


def _on_the_cluster(job: str, spec: Document) -> list[str]:
    """Return the URIs that a job reads and that pods look for. SpecError for files beside the manifest."""
    uris = list(strings_in({part: spec.get(part) for part in READ_PARTS}))
    why = "is beside the manifest, where no pod finds it; use hf://, pvc:// or a folder of the image"
    beside = [each for each in uris if each[1].startswith("file://") and not each[1].startswith("file:///")]
    if beside:
        raise SpecError([Problem(f"{job}: spec.{path}", f"{uri} {why}") for path, uri in beside])
    return [uri for _, uri in uris if uri.startswith(ON_THE_CLUSTER)]


def _apply(kubectl: Kubectl, document: Document, files: Mapping[str, str], before: Document | None) -> str:
    """Apply a job and the ConfigMap of its files; return what was done as a part of a sentence.

    before: the job of this name that the cluster has. If it has ended, nothing is applied.
    """
    code = config_map(document["metadata"]["name"], files)
    wanted = with_files(document, code, files) if files else document
    job = parse.job(before) if before else None
    has_ended = job is not None and (job.deleting or job.status.phase in ENDED_PHASES)
    try:
        made = parse.job(kubectl.apply(wanted, *["--dry-run=server"] * has_ended))
    except KubectlError as error:
        if job is None or error.reason == "Forbidden":
            raise
        raise _taken(job, str(error)) from None
    is_same = job is not None and (made.generation, made.labels) == (job.generation, job.labels)
    if job and has_ended and not (is_same and not job.deleting):
        raise _taken(job, "it is being deleted" if job.deleting else "it has ended, and is not run again")
    if files:
        metadata = {**code["metadata"], "ownerReferences": [identity.owner(made)]}
        kubectl.apply({**code, "metadata": metadata})
    told = f"; its code is in ConfigMap {code['metadata']['name']}: {', '.join(files)}" if files else ""
    if is_same:
        return f"is there already as it is here, {made.status.phase}; nothing was changed"
    return f"{'changed' if job else 'created'} in namespace {made.namespace}{told}"


def _taken(job: ObservedJob, why: str) -> KubectlError:
    remedy = f"give this job another name, or `kubectl delete rlhf {job.name}` and submit it again"
    return KubectlError(f"{job.name} is there already, {job.status.phase}: {why}; {remedy}", ExitCode.SPEC)
