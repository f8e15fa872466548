"""RLHFJobs of a cluster, their pods and events, and the operator's settings, as the API server has them now."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_api import kubectl_yaml
from rlhf_api.contract import JOB_NAME
from rlhf_api.exit_codes import ExitCode
from rlhf_api.problems import suggestion
from rlhf_kubectl.kubectl import Kubectl, KubectlError
from rlhf_operator import names
from rlhf_operator.cluster import parse, raw
from rlhf_operator.cluster.resources import CONFIG_MAPS, EVENTS, JOBS, PODS
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Document, ObservedJob, ObservedPod
from rlhf_planning.job_table import JobLine

NO_RLHFJOBS = "this cluster knows no RLHFJobs: install the operator's chart (helm/rlhf-operator)"
ENDED_PHASES = ("Succeeded", "Failed")
CONFIG = "config.yaml"


class JobWarning(NamedTuple):
    """Warning event about a job or one of its pods."""

    time: str
    """Time of the event (RFC 3339)."""
    note: str
    about: str
    """Name of the job or pod that the event is about."""


def job_documents(kubectl: Kubectl, *, everywhere: bool = False) -> list[Document]:
    """Return the jobs of the namespace, or of all namespaces, as raw objects of the API server."""
    try:
        found = kubectl.get(JOBS.path(None if everywhere else kubectl.namespace))
    except KubectlError as error:
        if error.reason != "NotFound":
            raise
        raise KubectlError(NO_RLHFJOBS, reason=error.reason) from None
    return found.get("items") or []


def list_jobs(kubectl: Kubectl, *, everywhere: bool = False) -> list[ObservedJob]:
    """Return the jobs of the namespace, or of all namespaces, the oldest first."""
    jobs = map(parse.job, job_documents(kubectl, everywhere=everywhere))
    return sorted(jobs, key=lambda job: (job.created, job.name))


def find_job(kubectl: Kubectl, name: str) -> ObservedJob:
    """Return the job of this name. KubectlError with the nearest name if there is none."""
    is_name = re.fullmatch(JOB_NAME, name)  # other texts could change the path of the request
    if is_name and (found := kubectl.find(JOBS.path(kubectl.namespace, name))):
        return parse.job(found)
    near = suggestion(name, [job.name for job in list_jobs(kubectl)])
    message = f"there is no RLHFJob {name} in namespace {kubectl.namespace}: {near}"
    raise KubectlError(message, ExitCode.SPEC, "NotFound")


def pods_of(kubectl: Kubectl, job: ObservedJob) -> list[ObservedPod]:
    """Return the pods of a job. KubectlError if the user may not list pods."""
    selector = f"?labelSelector={names.MANAGED_BY}%3D{names.OPERATOR},{names.JOB_UID}%3D{job.uid}"
    return [parse.pod(each) for each in kubectl.get(PODS.path(job.namespace) + selector).get("items") or []]


def head_of(job: ObservedJob, pods: Sequence[ObservedPod]) -> ObservedPod | None:
    """Return the head pod of the job's current attempt; None if there is none, or if it is still Pending."""
    heads = (pod for pod in pods if (pod.role, pod.attempt) == (names.CONTROLLER, job.status.attempt))
    return next((pod for pod in heads if pod.phase != "Pending"), None)


def last_warning(kubectl: Kubectl, job: ObservedJob, pods: Sequence[ObservedPod]) -> JobWarning | None:
    """Return the latest warning about a job and its pods, if any. KubectlError if the user may not list events."""
    uids, events = {job.uid, *(pod.uid for pod in pods)}, kubectl.get(EVENTS.path(job.namespace)).get("items") or []
    warnings = [each for each in events if raw.text(each, "type") == "Warning"]
    about = (each for each in warnings if raw.text(each, "regarding", "uid") in uids)
    return max(
        (JobWarning(*parse.complaint(each), raw.text(each, "regarding", "name")) for each in about), default=None
    )


def seen_of(kubectl: Kubectl, job: ObservedJob) -> tuple[list[ObservedPod], JobWarning | None, list[str]]:
    """Return (pods of a job, latest warning about them, sentences on pods or events that cannot be listed)."""
    pods, warning, refused = list[ObservedPod](), None, []
    try:
        pods = pods_of(kubectl, job)
    except KubectlError as error:
        refused.append(f"Its pods are not known here: {error}.")
    try:
        warning = last_warning(kubectl, job, pods)
    except KubectlError as error:
        refused.append(f"Its events are not known here: {error}.")
    return pods, warning, refused


def line_of(job: ObservedJob, *, everywhere: bool) -> JobLine:
    """Return the row of a job in the table of `top`."""
    return JobLine(
        name=f"{job.namespace}/{job.name}" if everywhere else job.name,
        algorithm=job.algorithm,
        phase=job.status.phase,
        status=job.status,
        began=job.created.isoformat(),
    )


def settings_of(kubectl: Kubectl, namespace: str) -> Settings | None:
    """Return the settings of the operator that serves a namespace; None if the user can read no such settings."""
    for each in kubectl.items(CONFIG_MAPS.path() + "?labelSelector=app.kubernetes.io/name%3Drlhf-operator") or []:
        try:
            (document,) = kubectl_yaml.read(raw.text(each, "data", CONFIG), "")
            settings = Settings.model_validate(document, by_alias=True, by_name=False)
        except ValueError:  # settings of another release
            continue
        if not settings.namespaces or namespace in settings.namespaces:
            return settings
    return None
