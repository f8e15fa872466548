"""Manifest of the Job that reads model shapes or a custom algorithm: a small pod with the job's image and claims.

The pod has no credential of Kubernetes. Its termination message holds the answer, which the operator reads.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rlhf_api.job import Job
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.overlay import merged
from rlhf_operator.resources import identity, storage
from rlhf_operator.resources.pods import SCRATCH, environment, image_of, installed_mounts, installed_volumes
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

ReadRequest = Sequence[tuple[str, str | None]] | Mapping[str, Any]
"""Request to a reader pod: (URI as the job names it, revision) of each model, or a custom algorithm."""
MESSAGE = "/dev/termination-log"
CONTAINERS = ("containers", "initContainers")
"""Fields of the head's pod template that the reader pod does not take over."""


def name(snapshot: Snapshot, job: Job, request: ReadRequest) -> str:
    """Return the name of the Job for a request, a new one after each attempt; its pods add a dash and a suffix."""
    content = f"{snapshot.job.status.attempt or 0} {_argument(snapshot, request)}"
    return f"{job.name}-shapes-{sha256(content.encode()).hexdigest()[:8]}"


def manifest(snapshot: Snapshot, job: Job, settings: Settings, request: ReadRequest) -> Manifest:
    """Return the Job that reads model shapes or a custom algorithm; its pod is retried only after a disruption."""
    metadata = identity.metadata(snapshot.job, name(snapshot, job, request))
    mounts = tuple(each for each in storage.mounts(job, snapshot.inputs) if each.read_only)
    container = {
        "name": names.READER,
        **image_of(job, settings),
        "command": ["python", "-m", "rlhf_trainer.pods.read_shapes", _argument(snapshot, request), MESSAGE],
        "env": environment(job, settings, {}),
        "securityContext": identity.fixed_part("container_security"),
        **identity.fixed_part("reader_container"),
        "volumeMounts": [
            # A user's variable may put the hub's cache into the run folder, which does not exist yet.
            *({"name": "scratch", "mountPath": folder} for folder in (SCRATCH, names.OUTPUT_FOLDER)),
            *installed_mounts(settings),
            *storage.volume_mounts(mounts),
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": job.spec.run_policy.startup_deadline_seconds,
        **identity.pod_security(settings.runtime_of(job.spec.runtime)),
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}, *installed_volumes(settings), *storage.volumes(mounts)],
    }
    # The pod may go where the head may, and has what the cluster's policies require of the head.
    over = settings.template_of(job.spec.runtime, names.CONTROLLER)
    for head in over.get("spec", {}).get("containers", ()):
        if head["name"] == names.HEAD_CONTAINER:  # a volume may hold the user's code
            container |= merged({"volumeMounts": container["volumeMounts"]}, {"volumeMounts": head.get("volumeMounts")})
    spec = {field: value for field, value in over.get("spec", {}).items() if field not in CONTAINERS}
    labels = {**identity.labels(snapshot.job), names.ROLE: names.READER}
    template = merged({"metadata": {"labels": labels}, "spec": pod}, {**over, "spec": spec})
    metadata["labels"] |= identity.queue(snapshot.job)
    spec = {**identity.fixed_part("reader_job"), "template": template}
    return identity.document("batch/v1", "Job", metadata, spec=spec)


def _argument(snapshot: Snapshot, request: ReadRequest) -> str:
    if isinstance(request, Mapping):
        return json.dumps(request)
    return json.dumps([[storage.in_pod(uri, snapshot.inputs), revision] for uri, revision in request])
