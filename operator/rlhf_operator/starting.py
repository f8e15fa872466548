"""What keeps the pods of an attempt from being made or from starting, and how long it may last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, TypeAlias

from rlhf_api.quantities import amount
from rlhf_api.run_policy import Reason
from rlhf_operator.snapshot import ObservedPod, ObservedRayJob

PULL_SECONDS: Final = 300.0
"""So long the kubelet may go on trying to pull an image."""
MISSING_SECONDS: Final = 60.0
"""So long a Secret, a claim or what pods are refused for may follow the job."""

QUOTA: Final = "exceeded quota"
"""In the words of the API server."""
OVER_QUOTA = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")
PULLING = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')

Cause: TypeAlias = tuple[Reason, str, ObservedPod | None]
"""Reason and message of a failure, and the pod that it is about."""


def is_taken_up(rayjob: ObservedRayJob) -> bool:
    """Whether KubeRay has begun with a RayJob that is not suspended."""
    return rayjob.deployment_status not in ("", "Suspended")


def refusals(rayjob: ObservedRayJob) -> Iterator[tuple[float, Cause]]:
    """(seconds that it may last, cause) where pods are refused that will be refused again."""
    if rayjob.refused and not _may_have_room(rayjob.refused):
        yield MISSING_SECONDS, ("PodsRefused", f"pods cannot be made: {rayjob.refused}", None)


def problems(pod: ObservedPod) -> Iterator[tuple[float, Cause]]:
    """(seconds that it may last, cause) of what keeps a pod from starting."""
    for each in pod.containers:
        message = f"container {each.name} of pod {pod.name}: {each.waiting_message or each.waiting_reason}"
        if each.waiting_reason in PULLING:
            yield PULL_SECONDS, ("ImagePull", message, pod)
        is_missing = "not found" in each.waiting_message or "couldn't find key" in each.waiting_message
        if each.waiting_reason == "CreateContainerConfigError" and is_missing:
            yield MISSING_SECONDS, ("SecretMissing", message, pod)
    if claim := CLAIM.search(pod.unschedulable):
        message = f"there is no PersistentVolumeClaim {claim[1]}, which pod {pod.name} needs"
        yield MISSING_SECONDS, ("ClaimMissing", message, pod)


def _may_have_room(refused: str) -> bool:
    """Whether a quota that refuses a pod may take it later: not if the pod asks for more than there is in all."""
    if (found := OVER_QUOTA.search(refused)) is None:
        return QUOTA in refused
    asked, limits = (dict(each.partition("=")[::2] for each in part.split(",")) for part in found.groups())
    try:
        return all(amount(asked[name]) <= amount(limit) for name, limit in limits.items() if name in asked)
    except ValueError:
        return True
