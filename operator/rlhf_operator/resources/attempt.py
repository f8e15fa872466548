"""Manifests of an attempt, including its RayJob; pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rlhf_api.job import Job
from rlhf_api.status import MappedPlacement
from rlhf_operator import names
from rlhf_operator.actions import Manifest
from rlhf_operator.resources import head, identity, job_file, network, storage, workers
from rlhf_operator.resources.pods import Pods
from rlhf_operator.settings import Settings
from rlhf_operator.snapshot import Snapshot

KEPT_SECONDS = 300
"""Seconds for which KubeRay keeps the pods of an ended job, so that the head pod's last status can be read."""
KEPT_FOR_EVER = 2**31 - 1
"""Time to live in seconds that never ends: Kueue admits only RayJobs whose cluster KubeRay takes down."""
NO_NEW_HEAD = "ray.io/disable-provisioned-head-restart"
"""Annotation that forbids a new head pod, on which KubeRay would submit the job once more."""

PODS_FIRST = "foregroundDeletion"
"""Finalizer with which Kubernetes ends the pods at once, whoever deletes the RayJob and even without KubeRay."""


def attempt_manifests(
    snapshot: Snapshot,
    job: Job,
    mapping: MappedPlacement,
    settings: Settings,
    *,
    attempt: int,
    claim_size: str,
    avoided: Sequence[str] = (),
) -> tuple[Manifest, ...]:
    """Return the manifests of all objects that an attempt needs, in the order of their creation.

    All input jobs have succeeded, so the snapshot says where their models are. claim_size: least size of the claim for
    the run folder. avoided: nodes that the pods do not go to.
    """
    document = job_file.config_map(snapshot, job, mapping)
    pods = Pods(
        snapshot=snapshot,
        job=job,
        mapping=mapping,
        settings=settings,
        attempt=attempt,
        avoided=avoided,
        config_map=document["metadata"]["name"],
    )
    claim = storage.output_claim(snapshot.job, job, settings, at_least=claim_size)
    claims = (claim,) if storage.has_own_claim(job) else ()
    # Pods on the network of their node have its address: a policy would shut them out from the head.
    on_host = any(settings.pod_of(job.spec.runtime, role).host_network for role in (names.CONTROLLER, names.WORKER))
    admitted = None if on_host else settings.job_network_policy
    policies = (network.policy(snapshot.job, admitted),) if admitted else ()
    return (*claims, document, *policies, rayjob(pods))


def rayjob(pods: Pods) -> Manifest:
    """Return the RayJob of an attempt, which is made once and never changed; its end is that of the attempt.

    KubeRay makes the RayJob's cluster, submits the entrypoint over HTTP, and takes the cluster down.
    """
    name = names.rayjob(pods.job.name, pods.attempt)
    metadata, policy = identity.metadata(pods.snapshot.job, name, attempt=pods.attempt), pods.job.spec.run_policy
    run = ("rlhf", "run", f"{names.JOB_FOLDER}/{job_file.KEY}", "--output", names.OUTPUT_FOLDER)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            **metadata,
            "labels": {**metadata["labels"], **identity.queue(pods.snapshot.job)},
            "annotations": {NO_NEW_HEAD: "true"},
            "finalizers": [PODS_FIRST],
        },
        "spec": {
            "submissionMode": "HTTPMode",
            "jobId": name,
            "entrypoint": shlex.join((*run, "--metrics-port", str(names.METRICS_PORT))),
            "entrypointNumCpus": 0,
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_FOR_EVER if policy.keep_pods_on_failure else KEPT_SECONDS,
            "rayClusterSpec": {
                "rayVersion": pods.settings.ray_version,
                # KubeRay makes a Secret that goes with this Ray, which answers to nobody without the token in it.
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": False,
                "headGroupSpec": head.group(pods),
                "workerGroupSpecs": workers.groups(pods),
            },
        },
    }
