"""Manifests of an attempt's sandboxes: pods that run code of the model, each for one response or episode.

A pod serves the first request of the trainer and ends; `reconcile.sandboxes` replaces it. No Job does, because it would
wait up to ten minutes after pods that failed. All objects are owned by the attempt's RayJob, so they go with it.
"""

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
"""Most bytes of a pod's logs, which are on the disk of its node; all its other files are in memory."""
PLACING_FIELDS: Final = ("affinity", "nodeSelector", "priorityClassName", "schedulerName", "tolerations")
"""Fields of the head's pod template that sandboxes take over, so that they go where the head may."""
DNS_PORTS: Final = tuple({"port": port, "protocol": each} for port in (53, 5353) for each in ("UDP", "TCP"))
"""Ports of pods that serve DNS; those of OpenShift use 5353."""


def manifests(
    seen: ObservedJob, rayjob: ObservedRayJob, job: Job, settings: Settings, numbers: range
) -> tuple[Manifest, ...]:
    """Return the objects of an attempt's sandboxes in the order of their creation, with the pods of these numbers."""
    if (sandbox := job.spec.sandbox) is None:
        return ()
    name, selector = names.sandboxes_name(rayjob.name), {names.JOB_UID: seen.uid, names.ROLE: names.SANDBOX}
    metadata = identity.metadata(seen, name, rayjob=rayjob)
    port = {"port": names.SANDBOX_PORT, "protocol": "TCP"}
    workers = {"podSelector": {"matchLabels": {names.JOB_UID: seen.uid, names.ROLE: names.WORKER}}}
    on_host = settings.pod_of(job.spec.runtime, names.WORKER).host_network  # then workers have addresses of nodes
    rule = {"ports": [port], **({} if on_host else {"from": [workers]})}
    public = [
        {"ipBlock": {"cidr": each, "except": closed}} for each, closed in identity.fixed_part("closed_networks").items()
    ]
    dns = [{"to": list(peers), "ports": list(DNS_PORTS)}] if (peers := settings.sandbox_dns) else []
    policy = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [rule],
        "egress": [{"to": public}, *dns] if sandbox.network == "Egress" else [],
    }
    labels = {"labels": identity.labels(seen) | {names.ROLE: names.SANDBOX}}
    of_pod = metadata | labels | {"annotations": identity.fixed_part("left_to_autoscalers")}
    spec = pod(job, sandbox, settings, program=name)
    return (
        identity.document("v1", "ConfigMap", metadata, immutable=True, data={PROGRAM.name: PROGRAM.read_text()}),
        identity.document("networking.k8s.io/v1", "NetworkPolicy", metadata, spec=policy),
        identity.document("v1", "Service", metadata, spec={"selector": selector, "ports": [port]}),
        *(identity.document("v1", "Pod", {**of_pod, "name": f"{name}-{number}"}, spec=spec) for number in numbers),
    )


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
        "securityContext": identity.fixed_part("container_security") | {"readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "program", "mountPath": PROGRAM_FOLDER, "readOnly": True},
        ],
    }
    # Files are in memory, where the kernel keeps the limit: the kubelet measures the disk only every few seconds.
    files = {"medium": "Memory", "sizeLimit": mebibytes(amount(sandbox.memory) * Fraction(1, 2))}
    over, runtime = settings.template_of(job.spec.runtime, names.CONTROLLER), settings.runtime_of(job.spec.runtime)
    placing = {name: value for name, value in over.get("spec", {}).items() if name in PLACING_FIELDS}
    # The pod lacks the job's service account, to which a cloud may give a role by tokens of its own.
    secrets = [{"name": name} for name in runtime.image_pull_secrets]
    ours = {
        **({"imagePullSecrets": secrets} if secrets else {}),
        "activeDeadlineSeconds": IDLE_SECONDS + sandbox.seconds + MARGIN_SECONDS,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": files}, {"name": "program", "configMap": {"name": program}}],
        **placing,
    }
    spec: dict[str, Any] = merged(merged(identity.fixed_part("pod_security"), identity.fixed_part("sandbox_pod")), ours)
    return spec
