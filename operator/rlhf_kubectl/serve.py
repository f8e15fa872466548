"""Manifests of a server of a job's model: a Deployment that runs `rlhf serve` on the job's claim, and a Service."""

from typing import Any, Final

from rlhf_api.exit_codes import ExitCode
from rlhf_api.tables import read_table
from rlhf_kubectl.files import CLAIM, image_for
from rlhf_kubectl.kubectl import KubectlError
from rlhf_operator import names
from rlhf_operator.overlay import merged
from rlhf_operator.reconcile.context import parse_job
from rlhf_operator.resources import identity
from rlhf_operator.resources.storage import PVC, Place
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob

PARTS: Final = read_table(__package__, "serving.yaml", dict[str, Any])
MANAGER: Final = "kubectl-rlhf"  # the pods lack names.JOB_NAME, by which the operator finds the pods of jobs


def manifests(job: ObservedJob, settings: Settings, *, image: str | None, gpus: int | None) -> list[dict[str, Any]]:
    """Return the Deployment and the Service; gpus None: 1 if the job used GPUs. KubectlError if no actor was made."""
    parsed = parse_job(job)
    if not job.output_uri.startswith(PVC) or "actor" not in parsed.trained():
        message = f"{job.name} has made no model yet, it is {job.status.phase}; kubectl rlhf why {job.name}"
        if job.output_uri:
            message = f"{job.name} trains no language model, as its algorithm is {parsed.spec.algorithm.name}"
        raise KubectlError(message, ExitCode.SPEC)
    place, runtime = Place.of(job.output_uri), parsed.spec.runtime
    if gpus is None:
        gpus = int(bool(job.status.mapping and job.status.mapping.gpus))
    command = ["rlhf", "serve", f"{CLAIM}/{place.path}", "--host=0.0.0.0", "--port=8000"]
    resource = settings.gpu_resource_of(runtime)
    server = {
        "name": "server",
        "image": image_for(job, image),
        "command": [*command, *(["--", f"--tensor-parallel-size={gpus}"] if gpus > 1 else [])],
        "resources": {"limits": {resource: str(gpus)}} if gpus else {},
        "securityContext": identity.fixed_part("container_security"),
    }
    secrets = job.status.image_pull_secrets or runtime.image_pull_secrets
    pod = {
        **identity.pod_security(runtime.model_copy(update={"image_pull_secrets": secrets})),
        "containers": [server],
        "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}] if gpus else [],
        "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": place.claim, "readOnly": True}}],
    }
    chosen = {"app.kubernetes.io/instance": f"{job.name}-serve", names.MANAGED_BY: MANAGER}
    metadata = {"name": f"{job.name}-serve", "namespace": job.namespace, "labels": chosen}
    template = {"metadata": {"labels": chosen}, "spec": pod}
    deployment = {"metadata": metadata, "spec": {"selector": {"matchLabels": chosen}, "template": template}}
    return [
        merged(PARTS["deployment"], deployment),
        merged(PARTS["service"], {"metadata": metadata, "spec": {"selector": chosen}}),
    ]
