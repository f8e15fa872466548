"""Manifests of an attempt, with the RayJob. Pure."""

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
"""How long KubeRay leaves the pods of a job that has ended: the operator reads the last status of the head pod."""
KEPT_FOR_EVER = 2**31 - 1
"""Time to live without end: Kueue admits no RayJob whose cluster KubeRay never takes down."""
NO_NEW_HEAD = "ray.io/disable-provisioned-head-restart"
"""A head that is lost ends the attempt; on a new one KubeRay would submit the job once more."""

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
    """Everything that an attempt needs, in the order in which it is to be made; its pods go to no node of `avoided`.

    All jobs that this one reads have succeeded: the snapshot says where their models are. claim_size: what the run
    folder needs at least.
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
    """The RayJob of an attempt: made once, never changed, and its end is the end of the attempt.

    KubeRay makes the cluster of it, submits the entrypoint over HTTP, and takes the cluster down.
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
