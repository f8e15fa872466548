"""Manifests of an attempt's sandboxes: pods that run code of the model, each for one response or episode.

A pod serves the first request of the trainer and ends; `reconcile.sandboxes` replaces it. No Job does, because it would
wait up to ten minutes after pods that failed. All objects are owned by the attempt's RayJob, so they go with it.
"""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from rlhf_api import sandbox_server
from rlhf_api.job import Job
from rlhf_api.quantities import amount, mebibytes
from rlhf_api.spec.runtime import Sandbox
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.overlay import merged
from rlhf_operator.resources import identity
from rlhf_operator.resources.fixed import fixed_part
from rlhf_operator.resources.pods import SCRATCH, image_of
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import ObservedJob, ObservedRayJob

PROGRAM: Final = Path(sandbox_server.__file__)
PROGRAM_FOLDER: Final = "/rlhf/sandbox"
IDLE_SECONDS: Final = 3600
"""Seconds for which a pod waits for a request, after which it is replaced."""
MARGIN_SECONDS: Final = 60
"""Seconds after the program's own time limit until the kubelet ends the pod."""
DISK: Final = "64Mi"
"""Most bytes of a pod on the disk of its node, which are its logs: its files are in memory."""
PLACING_FIELDS: Final = ("affinity", "nodeSelector", "priorityClassName", "schedulerName", "tolerations")
"""Fields of the head's pod template that sandboxes take over, so that they go where the head may."""
DNS: Final[Mapping[str, Any]] = {
    "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
    "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
}
"""Rule of egress to the cluster's DNS."""


def surroundings(
    seen: ObservedJob, rayjob: ObservedRayJob, job: Job, sandbox: Sandbox, settings: Settings
) -> tuple[Manifest, ...]:
    """Return the objects that an attempt's sandboxes need; they must be made before the pods."""
    selector = {names.JOB_UID: seen.uid, names.ROLE: names.SANDBOX}
    metadata = _metadata(seen, rayjob, names.sandboxes_name(rayjob.name))
    port = {"port": names.SANDBOX_PORT, "protocol": "TCP"}
    workers = {"podSelector": {"matchLabels": {names.JOB_UID: seen.uid, names.ROLE: names.WORKER}}}
    on_host = settings.pod_of(job.spec.runtime, names.WORKER).host_network  # then they have addresses of nodes
    rule = {"ports": [port], **({} if on_host else {"from": [workers]})}
    public = [{"ipBlock": {"cidr": each, "except": closed}} for each, closed in fixed_part("closed_networks").items()]
    policy = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [rule],
        "egress": [{"to": public}, DNS] if sandbox.network == "Egress" else [],
    }
    return (
        identity.document("v1", "ConfigMap", metadata, immutable=True, data={PROGRAM.name: PROGRAM.read_text()}),
        identity.document("networking.k8s.io/v1", "NetworkPolicy", metadata, spec=policy),
        identity.document("v1", "Service", metadata, spec={"selector": selector, "ports": [port]}),
    )


def numbered_pod(
    seen: ObservedJob, rayjob: ObservedRayJob, job: Job, sandbox: Sandbox, settings: Settings, number: int
) -> Manifest:
    """Return a sandbox of an attempt. An attempt uses each number once."""
    name = names.sandboxes_name(rayjob.name)
    metadata = _metadata(seen, rayjob, f"{name}-{number}")
    metadata["labels"] |= {names.ROLE: names.SANDBOX}
    metadata["annotations"] = fixed_part("left_to_autoscalers")
    return identity.document("v1", "Pod", metadata, spec=pod(job, sandbox, settings, program=name))


def _metadata(seen: ObservedJob, rayjob: ObservedRayJob, name: str) -> dict[str, Any]:
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": rayjob.name, "uid": rayjob.uid, "controller": True}
    return {**identity.metadata(seen, name), "ownerReferences": [owner]}


def pod(job: Job, sandbox: Sandbox, settings: Settings, *, program: str = "") -> dict[str, Any]:
    """Return the spec of a sandbox. program: name of the ConfigMap with its program."""
    size = {"cpu": sandbox.cpu, "memory": sandbox.memory, "ephemeral-storage": DISK}
    words = (f"{PROGRAM_FOLDER}/{PROGRAM.name}", SCRATCH, names.SANDBOX_PORT, sandbox.seconds, IDLE_SECONDS)
    container = {
        "name": names.SANDBOX,
        **image_of(job, settings),
        **({"image": sandbox.image} if sandbox.image else {}),
        "command": ["python3", "-I", *map(str, words)],
        "resources": {"requests": size, "limits": size},
        "securityContext": fixed_part("container_security") | {"readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "program", "mountPath": PROGRAM_FOLDER, "readOnly": True},
        ],
    }
    # In memory, where the kernel keeps the limit: the kubelet looks for what is on the disk every few seconds only.
    files = {"medium": "Memory", "sizeLimit": mebibytes(amount(sandbox.memory) * Fraction(1, 2))}
    over, runtime = settings.template_of(job.spec.runtime, names.CONTROLLER), settings.runtime_of(job.spec.runtime)
    placing = {name: value for name, value in over.get("spec", {}).items() if name in PLACING_FIELDS}
    # Not the job's service account, which a cloud may give a role by tokens of its own.
    secrets = [{"name": name} for name in runtime.image_pull_secrets]
    ours = {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "activeDeadlineSeconds": IDLE_SECONDS + sandbox.seconds + MARGIN_SECONDS,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": files}, {"name": "program", "configMap": {"name": program}}],
        **placing,
    }
    spec: dict[str, Any] = merged(merged(fixed_part("pod_security"), fixed_part("sandbox_pod")), ours)
    return spec
