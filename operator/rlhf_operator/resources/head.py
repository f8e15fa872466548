"""Head pod: Ray's own services, the trainer's controller process, and the container that shows its log."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlhf_operator import names
from rlhf_operator.resources import identity, storage
from rlhf_operator.resources.pods import SCRATCH, Pods, image_of, object_store, shared_memory

PORTS = {"gcs-server": 6379, "dashboard": names.DASHBOARD_PORT, "metrics": names.RAY_METRICS_PORT}
"""Named ports of the head pod's Ray container, from which KubeRay makes the head's Service."""
LOG_PORTS = {"status": names.STATUS_PORT, "rlhf-metrics": names.METRICS_PORT}
"""Named ports of the log container, with the trainer's status and metrics; no Service is made of them."""
SHARED_MEMORY = "4Gi"
"""Size of /dev/shm in the head pod; the controller holds references to data, never the bytes."""


def group(pods: Pods) -> dict[str, Any]:
    """Return the head group of the Ray cluster; only the controller runs there, without CPUs of Ray's."""
    size, default = pods.job.spec.runtime.controller, pods.settings.controller
    resources = {"cpu": size.cpu or default.cpu, "memory": size.memory or default.memory}
    shared = shared_memory(SHARED_MEMORY, resources["memory"], share=Fraction(1, 4))
    ray = {
        **pods.container(names.HEAD_CONTAINER, resources, {}),
        "ports": _named(PORTS),
        "securityContext": identity.of_container(),
    }
    pod = {"containers": [ray, _driver_log(pods)], "volumes": pods.volumes(shared)}
    return {
        "serviceType": "ClusterIP",
        "rayStartParams": {
            "num-cpus": "0",
            "num-gpus": "0",
            "dashboard-host": "0.0.0.0",  # KubeRay submits the job there
            "no-monitor": "true",  # Ray's autoscaler: an attempt keeps the hosts that it was given
            "object-store-memory": object_store(shared),
        },
        "template": pods.template(names.CONTROLLER, pod),
    }


def _driver_log(pods: Pods) -> dict[str, Any]:
    """Return the container that prints the controller's log, keeps it on the claim, and serves the status."""
    folder = f"{names.OUTPUT_FOLDER}/{pods.job.name}"
    output = [each for each in storage.of_container(pods.mounts) if each["mountPath"] == names.OUTPUT_FOLDER]
    return {
        "name": names.LOG_CONTAINER,
        **image_of(pods.job, pods.settings),
        "command": ["python", "-m", "rlhf_trainer.pods.sidecar", folder, "--port", str(names.STATUS_PORT)],
        "env": pods.environment({}),
        "ports": _named(LOG_PORTS),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
        "securityContext": identity.of_container(),
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH, "readOnly": True}, *output],
    }


def _named(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]
