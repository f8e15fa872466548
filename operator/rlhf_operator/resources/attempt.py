"""Manifests of an attempt, including its RayJob with the head pod; pure functions."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.overlay import merged
from rlhf_operator.resources import identity, job_file, storage, workers
from rlhf_operator.resources.pods import SCRATCH, AttemptPods, image_of, object_store, shared_memory
from rlhf_operator.settings import JobNetworkPolicy
from rlhf_operator.snapshot import ObservedJob, ObservedRayJob

KEPT_SECONDS = 300
"""Seconds for which KubeRay keeps the pods of an ended job, so that the head pod's last status can be read."""
KEPT_FOR_EVER = 2**31 - 1
"""Time to live in seconds that in effect never ends; Kueue admits only RayJobs whose cluster KubeRay will delete."""

PORTS = {"gcs-server": 6379, "dashboard": names.DASHBOARD_PORT, "metrics": names.RAY_METRICS_PORT}
"""Named ports of the head pod's Ray container, from which KubeRay makes the head's Service."""
LOG_PORTS = {"status": names.STATUS_PORT, "rlhf-metrics": names.TRAINER_METRICS_PORT}
"""Named ports of the log container, with the trainer's status and metrics; no Service is made of them."""


def attempt_manifests(pods: AttemptPods, *, claim_size: str) -> tuple[Manifest, ...]:
    """Return the manifests of all objects that an attempt needs, in the order of their creation.

    All input jobs have succeeded, so the snapshot says where their models are. claim_size: smallest size of the claim
    for the run folder.
    """
    seen, job, settings = pods.snapshot.job, pods.job, pods.settings
    document = job_file.config_map(pods.snapshot, job, pods.mapping)
    claim = storage.output_claim(seen, job, settings, at_least=claim_size)
    claims = (claim,) if storage.has_own_claim(job) else ()
    # Pods on the network of their node have its address: a policy would shut them out from the head.
    on_host = any(settings.pod_of(job.spec.runtime, role).host_network for role in (names.CONTROLLER, names.WORKER))
    admitted = None if on_host else settings.job_network_policy
    policies = (_network_policy(seen, admitted, has_sandboxes=job.spec.sandbox is not None),) if admitted else ()
    return (*claims, document, *policies, rayjob(replace(pods, config_map=document["metadata"]["name"])))


def rayjob(pods: AttemptPods) -> Manifest:
    """Return the RayJob of an attempt, which is made once and never changed; the attempt ends with its RayJob.

    KubeRay makes the RayJob's cluster, submits the entrypoint over HTTP, and takes the cluster down.
    """
    name = names.rayjob_name(pods.job.name, pods.attempt)
    metadata, policy = identity.metadata(pods.snapshot.job, name, attempt=pods.attempt), pods.job.spec.run_policy
    run = ("rlhf", "run", f"{names.JOB_FOLDER}/{job_file.KEY}", "--output", names.OUTPUT_FOLDER)
    metadata["labels"] |= identity.queue(pods.snapshot.job)
    spec = {
        "jobId": name,
        "entrypoint": shlex.join((*run, "--metrics-port", str(names.TRAINER_METRICS_PORT))),
        "ttlSecondsAfterFinished": KEPT_FOR_EVER if policy.keep_pods_on_failure else KEPT_SECONDS,
        "rayClusterSpec": {
            "rayVersion": pods.settings.ray_version,
            "headGroupSpec": head_group(pods),
            "workerGroupSpecs": workers.groups(pods),
        },
    }
    document: Manifest = merged(
        identity.fixed_part("rayjob"), identity.document("ray.io/v1", "RayJob", metadata, spec=spec)
    )
    return document


def head_group(pods: AttemptPods) -> dict[str, Any]:
    """Return the head group of the Ray cluster, without its fixed fields."""
    size, default = pods.job.spec.runtime.controller, pods.settings.controller
    resources = {"cpu": size.cpu or default.cpu, "memory": size.memory or default.memory}
    # the controller holds references to data, never the bytes
    shared = shared_memory("4Gi", resources["memory"], share=Fraction(1, 4))
    ray = {**pods.container(names.HEAD_CONTAINER, resources, {}), "ports": _named(PORTS)}
    pod = {"containers": [ray, _driver_log(pods)], "volumes": pods.volumes(shared)}
    parameters = {"object-store-memory": object_store(shared)}
    return {"rayStartParams": parameters, "template": pods.template(names.CONTROLLER, pod)}


def _driver_log(pods: AttemptPods) -> dict[str, Any]:
    """Return the container that prints the controller's log, keeps it on the claim, and serves the status."""
    folder = f"{names.OUTPUT_FOLDER}/{pods.job.name}"
    output = [each for each in storage.volume_mounts(pods.mounts) if each["mountPath"] == names.OUTPUT_FOLDER]
    return {
        "name": names.LOG_CONTAINER,
        **image_of(pods.job, pods.settings),
        "command": ["python", "-m", "rlhf_trainer.pods.sidecar", folder, "--port", str(names.STATUS_PORT)],
        "env": pods.environment({}),
        "ports": _named(LOG_PORTS),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
        "securityContext": identity.fixed_part("container_security"),
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH, "readOnly": True}, *output],
    }


def _named(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def disruption_budget(job: ObservedJob, rayjob: ObservedRayJob, pods: int) -> Manifest:
    """Return the PodDisruptionBudget of an attempt, owned by its RayJob: no ready pod may be evicted, as by a drain.

    pods: number of the attempt's pods, all of which must run; pods of an elastic pool do not count, and may be evicted.
    """
    selector: dict[str, Any] = {"matchLabels": {names.JOB_UID: job.uid, names.ATTEMPT: str(rayjob.attempt)}}
    if job.status.mapping and (pool := job.status.mapping.elastic_pool):
        selector["matchExpressions"] = [{"key": names.POOL, "operator": "NotIn", "values": [pool.name]}]
    metadata = identity.metadata(job, rayjob.name, attempt=rayjob.attempt, rayjob=rayjob)
    # maxUnavailable would need controllers that can be scaled.
    spec = {"selector": selector, "minAvailable": pods, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return identity.document("policy/v1", "PodDisruptionBudget", metadata, spec=spec)


def _network_policy(job: ObservedJob, admitted: JobNetworkPolicy, *, has_sandboxes: bool) -> Manifest:
    """Return the NetworkPolicy of a job: its pods may reach each other, admitted peers some ports; egress is open.

    The policy does not select sandboxes, which have their own.
    """
    own: dict[str, Any] = {"matchLabels": {names.JOB_UID: job.uid}}
    if has_sandboxes:
        own["matchExpressions"] = [{"key": names.ROLE, "operator": "NotIn", "values": [names.SANDBOX]}]
    ports_of = (
        (admitted.kube_ray, (names.DASHBOARD_PORT,)),
        (admitted.operator, (names.STATUS_PORT,)),
        (admitted.prometheus, (names.TRAINER_METRICS_PORT, names.RAY_METRICS_PORT)),
    )
    spec: dict[str, Any] = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            *(
                {"from": list(peers), "ports": [{"port": port, "protocol": "TCP"} for port in ports]}
                for peers, ports in ports_of
                if peers  # an empty `from` would admit everybody
            ),
        ],
    }
    metadata = identity.metadata(job, names.by_content(job.name, json.dumps(spec, sort_keys=True)))
    return identity.document("networking.k8s.io/v1", "NetworkPolicy", metadata, spec=spec)
