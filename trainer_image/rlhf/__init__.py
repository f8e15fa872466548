"""The public Python API: algorithms and workers of one's own, and runs from Python (docs/extending.md).

It imports neither torch nor Ray; what needs them is in `rlhf.workers`. Names of this package change only with a major
version; everything in `rlhf_api`, `rlhf_trainer` and the other packages is private.
"""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_api import kubectl_yaml
from rlhf_api.files import load as load_manifest
from rlhf_api.job import Job
from rlhf_api.own_code import OwnCodeError
from rlhf_api.problems import SpecError
from rlhf_api.spec.algorithms import ActorCritic, Algorithm, PolicyGradient, Preference
from rlhf_kubectl.follow import ClusterJob
from rlhf_trainer.algorithms.models import (
    Actor,
    Advantage,
    B,
    Critic,
    CriticsAdvantage,
    PreferenceActor,
    Reference,
    Reward,
    SupervisedActor,
    Tensor,
    Whiten,
    sample_and_learn,
)
from rlhf_trainer.errors import TrainerError
from rlhf_trainer.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    TransferProtocol,
)
from rlhf_trainer.report.run_record import JobRecord, Run, read_run
from rlhf_trainer.types import Batch, register

__all__ = [
    "ALL_TO_ALL",
    "DP_PROTO",
    "ONE_TO_ALL",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_ONLY",
    "THREE_D_PROTO",
    "Actor",
    "ActorCritic",
    "Advantage",
    "Algorithm",
    "B",
    "Batch",
    "ClusterJob",
    "Critic",
    "CriticsAdvantage",
    "Job",
    "JobRecord",
    "Manifest",
    "OwnCodeError",
    "PolicyGradient",
    "Preference",
    "PreferenceActor",
    "Reference",
    "Reward",
    "Run",
    "SpecError",
    "SupervisedActor",
    "Tensor",
    "TrainerError",
    "TransferProtocol",
    "Whiten",
    "load",
    "load_run",
    "plan",
    "register",
    "run",
    "sample_and_learn",
    "submit",
]

Manifest: TypeAlias = str | PathLike[str] | Job | Mapping[str, Any] | Sequence[Job | Mapping[str, Any]]
"""Manifest of a call: path of a file, or jobs, as `load` returns them or as mappings with a manifest's keys."""


def load(manifest: Manifest, *, sets: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of a manifest, each after the jobs it reads.

    sets: as `--set`, such as "ppo:training.totalSteps=5".
    Raises SpecError with every mistake, and OwnCodeError for an own algorithm that is missing or wrong.
    """
    return load_manifest(_source(manifest), sets)


def run(
    manifest: Manifest,
    *,
    output: str | PathLike[str] | None = None,
    sets: Sequence[str] = (),
    restart: bool = False,
    address: str | None = None,
) -> Run:
    """Run the jobs of a manifest as `rlhf run` does, in the main thread, and read the run folder.

    output: the run folder, by default runs/<name of the file or of the last job>; a run that is in it continues unless
    `restart`. address: address of a running Ray; by default RAY_ADDRESS, else a new Ray on this machine. Raises
    SpecError, OwnCodeError or TrainerError, each with its `exit_code`.
    """
    from rlhf_trainer.run.chain import run_file

    folder = _folder(manifest, output)
    run_file(_source(manifest), output=folder, overrides=sets, restart=restart, address=address)
    return read_run(folder)


def plan(
    manifest: Manifest,
    *,
    output: str | PathLike[str] | None = None,
    sets: Sequence[str] = (),
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the placement of each job's models by job name, as `rlhf plan --json` does.

    nodes, gpus_per_node, gpu: of a cluster; by default this machine. output: the run folder whose finished jobs
    `job://` may name. Raises SpecError, OwnCodeError, and TrainerError for a model whose shape cannot be read.
    """
    from rlhf_planning.machines import requested_cluster
    from rlhf_trainer.commands.plan import documents_of, plans_of
    from rlhf_trainer.run_folder.folder import load_with_finished

    folder = _folder(manifest, output)
    jobs = load_with_finished(folder, _source(manifest), sets)
    cluster = requested_cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu, inventory=None)
    return documents_of(plans_of(jobs, jobs, folder, cluster))


def submit(
    manifest: Manifest, job: str | None = None, *, namespace: str | None = None, context: str | None = None
) -> ClusterJob:
    """Submit the jobs of a manifest, or the one named `job`, as `rlhf submit` does; return a handle of the last one.

    namespace, context: as for kubectl, whose current ones are the default. Raises SpecError, OwnCodeError or
    TrainerError for a mistake, and an error with an `exit_code` for what the cluster refuses.
    """
    from rlhf_kubectl.kubectl import Kubectl
    from rlhf_kubectl.submit import submit as submit_jobs

    names = submit_jobs(Kubectl(context, namespace), _source(manifest), job)
    return ClusterJob(names[-1], namespace=namespace, context=context)


def load_run(folder: str | PathLike[str]) -> Run:
    """Read a run folder, also of an unfinished run: `run["job"].metrics()` is a pandas DataFrame.

    Raises TrainerError if the folder is no run folder.
    """
    return read_run(Path(folder))


def _source(manifest: Manifest) -> Path | str:
    """Return the path of a manifest's file, or its text."""
    if isinstance(manifest, str | PathLike):
        return Path(manifest)
    jobs = [manifest] if isinstance(manifest, Job | Mapping) else manifest
    return "---\n".join(kubectl_yaml.write(_document(job)) for job in jobs)


def _document(job: Job | Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as a manifest's document, without a default namespace, so that kubectl's current one applies."""
    if not isinstance(job, Job):
        return dict(job)
    given = {} if "namespace" in job.metadata.model_fields_set else {"metadata": {"namespace"}}
    return job.model_dump(mode="json", by_alias=True, exclude=given)


def _folder(manifest: Manifest, output: str | PathLike[str] | None) -> Path:
    """Return the run folder: `output`, or runs/<name of the manifest's file or of its last job>."""
    if output is not None:
        return Path(output)
    source = _source(manifest)
    return Path("runs") / (Path(fspath(source)).stem if isinstance(source, Path) else load_manifest(source)[-1].name)
