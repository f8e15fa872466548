"""Identity of objects and pods: labels, owners, users and rights; and parts that are the same for every job."""

import re
from copy import deepcopy
from typing import Any, Final

from rlhf_api.checks.pod_template import OWN_LABEL
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.spec.runtime import Runtime
from rlhf_api.tables import read_table
from rlhf_operator import names
from rlhf_operator.snapshot import ObservedJob, ObservedRayJob

_PARTS: Final = read_table(__package__, "fixed.yaml", dict[str, dict[str, Any]])
TRACKING = r"argocd\.argoproj\.io/.*|helm\.sh/.*|(helm|kustomize)\.toolkit\.fluxcd\.io/.*|app\.kubernetes\.io/instance"
NOT_COPIED = re.compile(f"{OWN_LABEL.pattern}|{TRACKING}")
"""Labels that objects do not get from their job: the operator's, and tracking labels of Argo CD, Flux and Helm."""


def fixed_part(name: str) -> dict[str, Any]:
    """Return a copy of a part of a manifest, by its name in fixed.yaml."""
    return deepcopy(_PARTS[name])


def metadata(
    job: ObservedJob, name: str, *, attempt: int | None = None, rayjob: ObservedRayJob | None = None
) -> dict[str, Any]:
    """Return metadata of an object owned by `rayjob` if given, else by the job. attempt: for objects of an attempt."""
    ray = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": rayjob.name, "uid": rayjob.uid} if rayjob else None
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": labels(job, attempt),
        "ownerReferences": [{**(ray or owner(job)), "controller": True}],
    }


def document(api_version: str, kind: str, metadata: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def owner(job: ObservedJob) -> dict[str, Any]:
    """Return the owner reference of an object that is deleted with the job."""
    return {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}


def labels(job: ObservedJob, attempt: int | None = None) -> dict[str, str]:
    """Return the labels of every object made for a job: the user's own, such as a cost centre, and the operator's."""
    common = {label: value for label, value in job.labels.items() if not NOT_COPIED.fullmatch(label)}
    common |= {names.MANAGED_BY: names.OPERATOR, names.JOB_NAME: job.name, names.JOB_UID: job.uid}
    return common if attempt is None else {**common, names.ATTEMPT: str(attempt)}


def queue(job: ObservedJob) -> dict[str, str]:
    """Return Kueue's queue and priority labels of a job, which objects that need quota for the job must also have."""
    return {label: value for label, value in job.labels.items() if label in (names.QUEUE, names.QUEUE_PRIORITY)}


def pod_security(runtime: Runtime) -> dict[str, Any]:
    """Return pod fields for the restricted profile of Kubernetes, without a service account token."""
    pod = fixed_part("pod_security")
    if runtime.service_account_name:
        pod["serviceAccountName"] = runtime.service_account_name
    if runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in runtime.image_pull_secrets]
    return pod
