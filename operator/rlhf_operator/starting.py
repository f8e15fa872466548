"""Problems that keep the pods of an attempt from being made or from starting, with their grace periods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Final, TypeAlias

from rlhf_api.quantities import amount
from rlhf_api.spec.run_policy import Reason
from rlhf_operator.snapshot import ObservedPod, ObservedRayJob

PULL_SECONDS: Final = 300.0
"""Seconds for which the kubelet may try to pull an image."""
MISSING_SECONDS: Final = 60.0
"""Seconds within which a missing Secret or claim, or a removed cause of refusal, may follow the job."""

QUOTA: Final = "exceeded quota"
"""Words by which the API server says that a pod exceeds a quota."""
OVER_QUOTA = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")
OF_QUOTA = re.compile(r"^(requests\.|limits\.|count/)")
"""Prefix of a resource's name in a quota. Requests serve for limits too, which are never below the requests."""
PULLING = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')

Cause: TypeAlias = tuple[Reason, str, ObservedPod | None]
"""Cause of a failure: reason, message, and the pod that it is about."""


def is_taken_up(rayjob: ObservedRayJob) -> bool:
    """Whether KubeRay has begun with a RayJob that is not suspended."""
    return rayjob.deployment_status not in ("", "Suspended")


def refusals(rayjob: ObservedRayJob, together: Mapping[str, int]) -> Iterator[tuple[float, Cause]]:
    """Yield (grace period in seconds, cause) if pods are refused and always will be.

    together: number of pods of the attempt, and their total requests.
    """
    if not rayjob.refused:
        return
    message = f"pods cannot be made: {rayjob.refused}"
    if QUOTA in rayjob.refused:
        if not (lacks := _never_enough(rayjob.refused, together)):
            return
        message = f"{message}; the whole job needs more {lacks} than that"
    yield MISSING_SECONDS, ("PodsRefused", message, None)


def problems(pod: ObservedPod) -> Iterator[tuple[float, Cause]]:
    """Yield (grace period in seconds, cause) of each problem that keeps a pod from starting."""
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


def _never_enough(refused: str, together: Mapping[str, int]) -> str:
    """Return the resource of which a quota, even if unused, can never hold this pod or the attempt; empty if none."""
    if (found := OVER_QUOTA.search(refused)) is None:
        return ""
    requested, limits = (
        dict[str, str](each.partition("=")[::2] for each in part.split(",")) for part in found.groups()
    )
    with suppress(ValueError):
        for name, limit in limits.items():
            what = OF_QUOTA.sub("", name)
            of_all = Fraction(together.get(what, 0), 1000 if what == "cpu" else 1)
            if max(amount(requested.get(name, "0")), of_all) > amount(limit):
                return name
    return ""
