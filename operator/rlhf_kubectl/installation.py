"""Installation of the operator in a cluster, as far as the user may see it."""

from __future__ import annotations

from pydantic import ValidationError

from rlhf_api import kubectl_yaml
from rlhf_api.job import Job
from rlhf_api.names import API_VERSION, KIND
from rlhf_api.problems import SpecError
from rlhf_kubectl.kubectl import Kubectl
from rlhf_operator.cluster import raw
from rlhf_operator.cluster.resources import CONFIG_MAPS
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob

CONFIG = "config.yaml"
SELECTOR = "?labelSelector=app.kubernetes.io/name%3Drlhf-operator"


def settings_of(kubectl: Kubectl, namespace: str) -> Settings | None:
    """Return the settings of the operator of a namespace; None if there is none, or the user may not read them."""
    found = kubectl.find(CONFIG_MAPS.path() + SELECTOR) or {}
    for each in found.get("items") or []:
        try:
            (document,) = kubectl_yaml.read(raw.text(each, "data", CONFIG), "")
            settings = Settings.model_validate(document, by_alias=True, by_name=False)
        except (ValueError, ValidationError):  # of another version
            continue
        if not settings.namespaces or namespace in settings.namespaces:
            return settings
    return None


def parse_job(job: ObservedJob) -> Job:
    """Return a job of the cluster with its defaults. SpecError if it breaks a rule."""
    metadata = {"name": job.name, "namespace": job.namespace}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": dict(job.spec)}
    return Job.parse(document, step=job.status.step)


def image_of(kubectl: Kubectl, job: ObservedJob) -> str:
    """Return the image of a job's pods; empty if the user may not know it."""
    try:
        own = parse_job(job).spec.runtime.image
    except SpecError:
        own = None
    settings = None if own else settings_of(kubectl, job.namespace)
    return own or (settings.trainer_image if settings else "")
