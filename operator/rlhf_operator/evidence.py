"""Evidence of failures: predicates on the pods, the RayJob and the trainer of an attempt. `failure` ranks them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.run_policy import Reason
from rlhf_operator import names, starting
from rlhf_operator import observed_attempt as attempt
from rlhf_operator.snapshot import ObservedPod, Snapshot
from rlhf_operator.starting import Cause
from rlhf_operator.times import since

NODE_SECONDS: Final = 60.0
"""Time for which the node of a pod may be not ready."""
STRENGTH: Final[tuple[Reason, ...]] = ("Preempted", "NodeLost", "Evicted", "OutOfMemory")
"""Reasons of disrupted pods, the strongest first."""

Found: TypeAlias = tuple[str, ObservedPod | None]
"""Message of a failure, and the pod that the failure is about."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A snapshot in which evidence is looked for."""

    snapshot: Snapshot
    now: datetime
    ready_since: datetime | None
    """Time at which all pods of the attempt were ready for the first time."""

    @cached_property
    def exit_code(self) -> int | None:
        """Exit code of the trainer."""
        return attempt.exit_code(self.snapshot)

    @cached_property
    def has_ended(self) -> bool:
        """Whether the trainer has exited with an error, or its Ray job has failed."""
        beat = self.snapshot.current_heartbeat()
        has_exited = self.exit_code not in (None, 0) and beat is not None and beat.complete
        return has_exited or attempt.ray_job_failed(self.snapshot.current_rayjob())

    @cached_property
    def blamed_pod(self) -> ObservedPod | None:
        """Pod that the trainer blames, or else the head; a failed communication is hardly ever the head's fault."""
        is_head = self.exit_code != ExitCode.COMMUNICATION
        return attempt.named_pod(self.snapshot) or (attempt.head_of(self.snapshot) if is_head else None)

    @cached_property
    def disruption(self) -> Cause | None:
        """Strongest disruption of the pods that the trainer cannot do without."""
        survivable = attempt.survivable_pools(self.snapshot)
        return self._strongest(pod for pod in attempt.current_pods(self.snapshot) if pod.pool not in survivable)

    @cached_property
    def past_disruption(self) -> Cause | None:
        """Strongest disruption of the pods that are gone."""
        return self._strongest(self.snapshot.lost_pods)

    def _strongest(self, pods: Iterable[ObservedPod]) -> Cause | None:
        causes = [cause for pod in pods if (cause := _disruption(pod, self))]
        return min(causes, key=lambda cause: STRENGTH.index(cause[0]), default=None)

    @cached_property
    def start_failure(self) -> Cause | None:
        """Problem that has kept a pod from starting for longer than it may."""
        return next((cause for left, cause in start_problems(self.snapshot, self.now) if left <= 0), None)

    @cached_property
    def needed_workers(self) -> list[ObservedPod]:
        """Worker pods that the trainer cannot do without."""
        survivable = attempt.survivable_pools(self.snapshot)
        return [pod for pod in attempt.workers_of(self.snapshot) if pod.pool not in survivable]


class PodSign(NamedTuple):
    """Row of the table of pods: a sign that explains why a pod has ended, or will."""

    reason: Reason
    is_seen: Callable[[ObservedPod, Case], bool]
    message: str
    """Sentence with the fields pod, node and role."""


DISRUPTIONS: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "PreemptionByScheduler": "Preempted",
        "DeletionByTaintManager": "NodeLost",
        "DeletionByPodGC": "NodeLost",
        "EvictionByEvictionAPI": "Evicted",
        "TerminationByKubelet": "Evicted",
    }
)
"""Failure by the reason of a pod's condition DisruptionTarget."""


def _has_disruption(pod: ObservedPod, _: Case, *, disruption: str) -> bool:
    return pod.disruption == disruption


POD_SIGNS: Final = (
    *(
        PodSign(
            reason,
            partial(_has_disruption, disruption=disruption),
            "pod {pod.name} on node {node} was ended: {pod.disruption} {pod.message}",
        )
        for disruption, reason in DISRUPTIONS.items()
    ),
    PodSign(
        "NodeLost",
        lambda pod, case: attempt.node_is_gone(pod, case.snapshot),
        "node {node} of pod {pod.name} is gone",
    ),
    PodSign(
        "NodeLost",
        lambda pod, case: (node_silence(pod, case.snapshot, case.now) or 0.0) >= NODE_SECONDS,
        "node {node} of pod {pod.name} is not ready",
    ),
    PodSign(
        "NodeLost",
        lambda pod, _: pod.phase == "Unknown" or pod.reason in ("NodeLost", "NodeShutdown"),
        "node {node} of pod {pod.name} does not answer: {pod.message}",
    ),
    PodSign("Preempted", lambda pod, _: pod.reason == "Preempting", "pod {pod.name} was ended: {pod.message}"),
    PodSign(
        "Evicted",
        lambda pod, _: pod.reason in ("Evicted", "Terminated"),
        "pod {pod.name} was evicted from node {node}: {pod.message}",
    ),
    PodSign(
        "OutOfMemory",
        lambda pod, _: any(
            each.ended_reason == "OOMKilled" and each.name in attempt.OWN_CONTAINERS for each in pod.containers
        ),
        "pod {pod.name} used more memory than its limit; raise spec.runtime.{role}.memory",
    ),
)
"""Signs on a pod; the first that is seen explains the pod."""


def _disruption(pod: ObservedPod, case: Case) -> Cause | None:
    sign = next((each for each in POD_SIGNS if each.is_seen(pod, case)), None)
    if sign is None:
        return None
    role = "worker" if pod.role == names.WORKER else "controller"
    return sign.reason, sign.message.format(pod=pod, node=pod.node or "(none)", role=role).rstrip(), pod


def exited(case: Case, *, code: int) -> Found | None:
    """The trainer has reported an exit code that no event in the cluster causes."""
    if case.exit_code != code:
        return None
    pod = attempt.named_pod(case.snapshot) or attempt.head_of(case.snapshot)
    return attempt.trainer_message(case.snapshot) or f"the trainer ended with exit code {code}", pod


def quota_preempted(case: Case) -> Found | None:
    """Kueue has preempted a running attempt; the quota stays reserved until all pods are gone."""
    quota = case.snapshot.quota
    if case.ready_since and quota and quota.evicted == "Preempted":
        return f"Kueue took the quota away: {quota.message}", None
    return None


def pod_disrupted(case: Case, *, reason: Reason) -> Found | None:
    """The cluster has done something to a pod of the attempt."""
    return case.disruption[1:] if case.disruption and case.disruption[0] == reason else None


def lost_pod_disrupted(case: Case, *, reason: Reason) -> Found | None:
    """The cluster has done something to a pod that is gone."""
    return case.past_disruption[1:] if case.past_disruption and case.past_disruption[0] == reason else None


def ended(case: Case, *, code: int) -> Found | None:
    """The trainer has ended with an exit code that a lost pod may explain."""
    if not case.has_ended or case.exit_code != code:
        return None
    rayjob = case.snapshot.current_rayjob()
    message = attempt.trainer_message(case.snapshot) or (rayjob.message if rayjob else "")
    return message or f"the trainer ended with exit code {code}", case.blamed_pod


def refused_by_kuberay(case: Case) -> Found | None:
    """KubeRay has refused the RayJob."""
    rayjob = case.snapshot.current_rayjob()
    if not case.has_ended or rayjob is None or rayjob.deployment_status != "ValidationFailed":
        return None
    return f"KubeRay refused RayJob {rayjob.name}: {rayjob.message}", None


def ended_unexplained(case: Case) -> Found | None:
    """The trainer has ended by a signal, or without an exit code that says why."""
    if not case.has_ended:
        return None
    rayjob = case.snapshot.current_rayjob()
    message = (rayjob.message if rayjob else "") or "the trainer ended and left no word"
    if case.exit_code is not None and case.exit_code > 128:
        message = f"the trainer was ended by signal {case.exit_code - 128}"
    return attempt.trainer_message(case.snapshot) or message, case.blamed_pod


def rayjob_suspended(case: Case) -> Found | None:
    """The RayJob of a running attempt was suspended."""
    rayjob, quota = case.snapshot.current_rayjob(), case.snapshot.quota
    if rayjob is None or not case.ready_since:
        return None
    if not rayjob.suspended and rayjob.deployment_status not in ("Suspending", "Suspended"):
        return None
    message = f"RayJob {rayjob.name} was suspended while it ran: {quota.message if quota else ''}"
    return message.rstrip(": "), None


def head_gone(case: Case) -> Found | None:
    """The head pod that the status names is gone."""
    head, known = attempt.head_of(case.snapshot), case.snapshot.job.status.head_pod
    return (f"head pod {known} is gone", None) if known and (head is None or head.name != known) else None


def head_ended(case: Case) -> Found | None:
    """The head pod has ended."""
    head = attempt.head_of(case.snapshot)
    how = attempt.how_ended(head) if head else ""
    return (f"head pod {head.name} {how}", head) if head and how else None


def rayjob_deleted(case: Case) -> Found | None:
    """Somebody else than the operator has deleted the RayJob."""
    name, rayjob = case.snapshot.job.status.ray_job_name, case.snapshot.current_rayjob()
    if not name or (rayjob is not None and not rayjob.deleting):
        return None
    return f"RayJob {name} was deleted, and not by the operator", None


def worker_ended(case: Case) -> Found | None:
    """A worker pod has ended."""
    hows = ((pod, attempt.how_ended(pod)) for pod in case.needed_workers)
    return next(((f"worker pod {pod.name} {how}", pod) for pod, how in hows if how), None)


def worker_missing(case: Case) -> Found | None:
    """A cluster that was complete has fewer worker pods than its mapping."""
    mapping, survivable = case.snapshot.job.status.mapping, attempt.survivable_pools(case.snapshot)
    expected = sum(pool.nodes for pool in mapping.pools if pool.name not in survivable) if mapping else 0
    if not case.ready_since or len(case.needed_workers) >= expected:
        return None
    return f"a worker pod is gone: {len(case.needed_workers)} of {expected} are left", None


def worker_replaced(case: Case) -> Found | None:
    """KubeRay has replaced a worker pod of a cluster that was complete.

    Kubernetes' times are whole seconds. A pod replaced in the second in which the cluster became complete is missed,
    which is harmless: no trainer has begun by then.
    """
    since_ready = case.ready_since
    late = next((pod for pod in case.needed_workers if since_ready and pod.created > since_ready), None)
    return (f"a worker pod is gone; KubeRay made {late.name} in its place", None) if late else None


def cannot_start(case: Case, *, reason: Reason) -> Found | None:
    """A problem has kept a pod from starting for longer than it may."""
    return case.start_failure[1:] if case.start_failure and case.start_failure[0] == reason else None


def seconds_until_failure(snapshot: Snapshot, now: datetime) -> float | None:
    """Seconds until a start problem or a silent node becomes a failure; None without one. No event may come then."""
    pods = attempt.current_pods(snapshot)
    silences = (silence for pod in pods if (silence := node_silence(pod, snapshot, now)) is not None)
    lefts = (*(left for left, _ in start_problems(snapshot, now)), *(NODE_SECONDS - each for each in silences))
    return min((left for left in lefts if left > 0), default=None)


def start_problems(snapshot: Snapshot, now: datetime) -> Iterator[tuple[float, Cause]]:
    """Yield (seconds that are left, cause) of each problem that keeps a pod of the attempt from starting."""
    if rayjob := snapshot.current_rayjob():
        waited = since(_watched(max(rayjob.created, rayjob.started or rayjob.created), snapshot), now)
        yield from ((limit - waited, cause) for limit, cause in starting.refusals(rayjob, _total_requests(snapshot)))
    for pod in attempt.current_pods(snapshot):
        waited = since(_watched(max(pod.created, pod.not_ready_since or pod.created), snapshot), now)
        yield from ((limit - waited, cause) for limit, cause in starting.problems(pod))


def _total_requests(snapshot: Snapshot) -> Counter[str]:
    """Number of pods of the attempt, and their total requests if the operator has reserved them.

    The result is empty if templates name priorities: a quota may then count only some of the pods.
    """
    status, runtime = snapshot.job.status, snapshot.job.spec.get("runtime")
    if "priorityClassName" in json.dumps(runtime):
        return Counter()
    pods = Counter({"pods": 1 + attempt.expected_workers(snapshot)})
    return sum((each.amounts for each in status.reserved), pods)


def node_silence(pod: ObservedPod, snapshot: Snapshot, now: datetime) -> float | None:
    """Seconds for which the node of a pod has been silent; None if the node is ready."""
    node = attempt.node_of(pod, snapshot)
    if node is None or node.ready or pod.ready:
        return None
    return since(_watched(pod.not_ready_since or pod.created, snapshot), now)


def _watched(moment: datetime, snapshot: Snapshot) -> datetime:
    """Begin of a grace period: never before the operator has watched."""
    return max(moment, snapshot.watching_since)
