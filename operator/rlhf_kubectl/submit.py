"""Jobs of a manifest, given to a cluster with the Python files beside the manifest that they name."""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import entry_points, packages_distributions
from itertools import product
from modulefinder import ModuleFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer

from rlhf_api import kubectl_yaml
from rlhf_api.chain import SCHEME, inputs_of
from rlhf_api.checks.pod_template import CONTAINERS
from rlhf_api.contract import ENTRYPOINT
from rlhf_api.exit_codes import ExitCode
from rlhf_api.files import load, read_text, strings_in
from rlhf_api.job import Job
from rlhf_api.problems import Problem, SpecError
from rlhf_kubectl.jobs import ENDED_PHASES, list_jobs
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_operator import names
from rlhf_operator.cluster import parse, raw
from rlhf_operator.overlay import merged
from rlhf_operator.resources import identity
from rlhf_operator.snapshot import Document, ObservedJob

READ_PARTS: Final = ("models", "data", "evaluation", "rollout")
"""Parts of a spec that name what a job reads."""
ON_THE_CLUSTER: Final = ("pvc://", "file://", "http://", "https://")
"""Schemes of URIs that pods may find, but this machine not, or with another content."""
FOLDER: Final = "/code"
"""Folder of the job's own code in the pods, which is on their PYTHONPATH."""
VARIABLE: Final = "PYTHONPATH"
MAX_BYTES: Final = 1 << 20
"""Most bytes that the API server takes as the data of a ConfigMap."""


def submit(kubectl: Kubectl, manifest: Path | str, only: str | None = None, *, folder: Path = Path()) -> list[str]:
    """Check the jobs of a manifest, or the one named `only`, apply each with its own code, and print what was done.

    manifest: a file, or its text, whose code lies in `folder`. Returns the jobs' names, each after the jobs that it
    reads. Raises SpecError, OwnCodeError or KubectlError for mistakes before anything is changed, and KubectlError if
    the cluster refuses.
    """
    existing = {job.name: job for job in list_jobs(kubectl)}
    finished = {name: job.algorithm for name, job in existing.items()}
    jobs = load(manifest, finished=finished)
    if not (chosen := [job for job in jobs if only in (None, job.name)]):
        raise SpecError([Problem("JOB", f"is {only}; the manifest has {', '.join(job.name for job in jobs)}")])
    if isinstance(manifest, Path):
        text, folder = read_text(manifest), manifest.parent
    else:
        text = manifest
    folders = [*dict.fromkeys([folder, Path()])]
    documents = {each["metadata"]["name"]: each for each in kubectl_yaml.read(text, "") if each}
    namespaces = {job.name: raw.text(documents[job.name], "metadata", "namespace") for job in chosen}
    if elsewhere := [name for name, namespace in namespaces.items() if namespace not in ("", kubectl.namespace)]:
        message = f"is not {kubectl.namespace}, the namespace that jobs are submitted to; see --namespace"
        raise SpecError(Problem(f"{name}: metadata.namespace", message) for name in elsewhere)
    files = {job.name: own_files(documents[job.name], folders) for job in chosen}
    _try_here(jobs, documents, files)
    for name, code in files.items():
        typer.echo(f"{name}: {_apply(kubectl, documents[name], code, existing.get(name))}")
    return [*files]


def own_files(document: Document, folders: Sequence[Path]) -> dict[str, str]:
    """Return path -> text of the Python files that a job's pods need: modules that the job names, and their imports.

    folders: where modules are searched, in this order. Installed packages are left out, as the image has them. A job
    that sets PYTHONPATH gets no files. Raises SpecError for too many bytes, or a file that is no Python in UTF-8.
    """
    spec = {part: value for part, value in document["spec"].items() if part != "runtime"}
    runtime = strings_in(document["spec"].get("runtime"))
    variables = {text for path, text in runtime if re.search(r"(^|\.containers\.\d+\.)env\.\d+\.name$", path)}
    named = {text.partition(":")[0] for _, text in strings_in(spec) if re.match(ENTRYPOINT, text)}
    if not named or VARIABLE in variables:
        return {}
    files = _read_modules(named, folders)
    if (size := sum(len(text.encode()) for text in files.values())) > MAX_BYTES:
        message = f"its own code has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; put the code into the image"
        raise SpecError([Problem(f"{document['metadata']['name']}: spec", message)])
    return files


def _read_modules(named: Collection[str], folders: Sequence[Path]) -> dict[str, str]:
    """Return path -> text of modules in the folders and of their imports. SpecError for a file that is no Python."""
    elsewhere = {*sys.stdlib_module_names, *packages_distributions()}  # Python finds these before the job's own modules
    finder = _OwnModules([str(folder.resolve()) for folder in folders], excludes=elsewhere)
    PathFinder.invalidate_caches()
    for module in sorted(named):
        with suppress(ImportError):  # then the image has the module
            finder.import_hook(module)
    files = dict[str, str]()
    for name, each in sorted(finder.modules.items()):
        if file := getattr(each, "__file__", None):
            path = name.replace(".", "/") + "/__init__" * (Path(file).stem == "__init__")
            files[f"{path}.py"] = read_text(Path(file))
    return files


class _OwnModules(ModuleFinder):
    """Finder of modules and their imports; packages need no __init__.py. SpecError for a file that is no Python."""

    def import_module(self, partname: str, fqname: str, parent: Any) -> Any:
        spec = PathFinder.find_spec(partname, (parent.__path__ or []) if parent else self.path)
        if spec is None or spec.loader or fqname in self.excludes:
            return super().import_module(partname, fqname, parent)
        folder: Any = self.add_module(fqname)
        folder.__path__ = list(spec.submodule_search_locations or ())
        return folder

    def load_module(self, fqname: str, fp: Any, pathname: str, file_info: Any) -> Any:
        try:
            return super().load_module(fqname, fp, pathname, file_info)
        except SyntaxError:
            raise SpecError([Problem(pathname, "is no Python that can be read")]) from None


def _try_here(jobs: Sequence[Job], documents: Mapping[str, Document], chosen: Collection[str]) -> None:
    """Try the chosen jobs on this machine; print which cannot be tried. KubectlError with the mistakes of all jobs."""
    triable = dict[str, Job]()
    for job in jobs:
        missing = [f"{SCHEME}{name}" for name in inputs_of(job) - triable.keys()]
        elsewhere = [*missing, *_on_the_cluster(job.name, documents[job.name]["spec"])]
        triable |= {} if elsewhere else {job.name: job}
        if elsewhere and job.name in chosen:
            typer.echo(f"note: {job.name} is not tried here: {elsewhere[0]} is looked for on the cluster")
    mistakes = []
    for error in _problems(triable, chosen):
        if error.exit_code == ExitCode.ENVIRONMENT or "cannot be reached" in str(error):
            typer.echo(f"note: on this machine {error}")
        else:
            mistakes.append(error)
    if mistakes:
        raise KubectlError("\n".join(map(str, mistakes)), mistakes[0].exit_code)


def _problems(jobs: Mapping[str, Job], chosen: Collection[str]) -> Iterator[Any]:
    """Yield the errors that the trainer's checks find in the chosen jobs; none if its packages are not installed."""
    tried = [job for job in jobs.values() if job.name in chosen]
    try:
        checks = [each.load() for each in entry_points(group="rlhf.checks") if tried]
    except ModuleNotFoundError as error:
        typer.echo(f"note: models, data and code are not tried here: {error.name} is not installed")
        return
    with TemporaryDirectory() as folder:
        for check, job in product(checks, tried):
            yield from check(job, jobs, Path(folder), elsewhere=True).problems()


def _on_the_cluster(job: str, spec: Document) -> list[str]:
    """Return the URIs of a job's inputs that are resolved on the cluster. SpecError for files beside the manifest."""
    uris = list(strings_in({part: spec.get(part) for part in READ_PARTS}))
    why = "is beside the manifest, where no pod finds it; use hf://, pvc:// or a folder of the image"
    beside = [each for each in uris if each[1].startswith("file://") and not each[1].startswith("file:///")]
    if beside:
        raise SpecError([Problem(f"{job}: spec.{path}", f"{uri} {why}") for path, uri in beside])
    return [uri for _, uri in uris if uri.startswith(ON_THE_CLUSTER)]


def _apply(kubectl: Kubectl, document: Document, files: Mapping[str, str], job: ObservedJob | None) -> str:
    """Apply a job and the ConfigMap of its files; return what was done as a part of a sentence.

    job: the cluster's job of this name, if there is one. If it has ended, it is compared by a dry run.
    """
    code = names.by_content(f"{document['metadata']['name']}-code", json.dumps(files))
    made = _apply_job(kubectl, _with_files(document, code, files) if files else document, job)
    if files:
        _apply_code(kubectl, made, code, files)
    if job and _is_same(made, job):
        return f"is already on the cluster, unchanged; it is {made.status.phase}"
    place = f"; its code is in ConfigMap {code}: {', '.join(files)}" if files else ""
    return f"{'changed' if job else 'created'} in namespace {made.namespace}{place}"


def _apply_job(kubectl: Kubectl, document: Document, job: ObservedJob | None) -> ObservedJob:
    """Apply a job. KubectlError if refused, or if `job`, its namesake, is being deleted, or has ended and differs."""
    is_over = job is not None and (job.deleting or job.status.phase in ENDED_PHASES)
    try:
        made = parse.job(kubectl.apply(document, *["--dry-run=server"] * is_over))
    except KubectlError as error:
        if job is None or not re.search(r" is invalid: |\d conflicts?: ", str(error)):
            raise
        raise _taken(job, str(error)) from None
    if job and job.deleting:
        raise _taken(job, "it is being deleted")
    if job and is_over and not _is_same(made, job):
        raise _taken(job, "it has ended, and is not run again")
    return made


def _is_same(made: ObservedJob, job: ObservedJob) -> bool:
    """Whether applying a job has changed nothing."""
    return (made.generation, made.labels) == (job.generation, job.labels)


def _apply_code(kubectl: Kubectl, job: ObservedJob, name: str, files: Mapping[str, str]) -> None:
    """Apply the ConfigMap of a job's own files, which goes when the job goes."""
    metadata = {"name": name, "labels": {names.JOB_NAME: job.name}, "ownerReferences": [identity.owner(job)]}
    data = {_key_of(path): text for path, text in files.items()}
    kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": data})


def _with_files(document: Document, code: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Return a job's document whose pods have the files of the ConfigMap `code` in FOLDER."""
    items = [{"key": _key_of(path), "path": path} for path in files]
    volume = {"name": "own-code", "configMap": {"name": code, "items": items}}
    runtime: dict[str, Any] = {"env": [{"name": VARIABLE, "value": FOLDER}]}
    for role, containers in CONTAINERS.items():
        container = {"name": containers[0], "volumeMounts": [{"name": volume["name"], "mountPath": FOLDER}]}
        runtime[role] = {"template": {"spec": {"volumes": [volume], "containers": [container]}}}
    return dict(merged(document, {"spec": {"runtime": runtime}}))


def _key_of(path: str) -> str:
    return path.replace("/", ".")  # no two modules get the same key


def _taken(job: ObservedJob, why: str) -> KubectlError:
    remedy = f"give this job another name, or `kubectl delete rlhf {job.name}` and submit it again"
    return KubectlError(f"{job.name} is there already, {job.status.phase}: {why}; {remedy}", ExitCode.SPEC)
