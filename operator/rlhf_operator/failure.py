"""Why an attempt has failed: what pods, Ray and the trainer itself have left as evidence, and what is done about it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final, get_args

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.run_policy import Action, Reason, RunPolicy
from rlhf_api.status import Failure
from rlhf_operator import names, starting
from rlhf_operator.snapshot import ObservedNode, ObservedPod, ObservedRayJob, Snapshot
from rlhf_operator.starting import Cause
from rlhf_operator.times import parsed, since, timestamp

FAILS: Final = ("UserCode", "Data", "Spec", "PodsRefused")
IGNORED: Final = ("NodeLost", "Preempted", "Evicted")
DEFAULT_ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {each: "Fail" if each in FAILS else "Ignore" if each in IGNORED else "Restart" for each in get_args(Reason)}
)
"""What follows a failure that no rule of the job's matches. What would fail again in the same way fails the job; what
the cluster did to it is not held against it; the rest is tried again, runPolicy.backoffLimit times."""

CONCLUSIVE_EXIT_CODES: Final[Mapping[int, Reason]] = MappingProxyType(
    {
        ExitCode.SPEC: "Spec",
        ExitCode.DATA: "Data",
        ExitCode.OUT_OF_MEMORY: "OutOfMemory",
        ExitCode.NUMERICS: "Numerics",
        ExitCode.USER_CODE: "UserCode",
    }
)
"""Exit codes that say enough; no event in the cluster makes a trainer end with one of them."""
INCONCLUSIVE_EXIT_CODES: Final[Mapping[int, Reason]] = MappingProxyType(
    {
        ExitCode.INTERNAL: "Internal",
        ExitCode.ENVIRONMENT: "Environment",
        ExitCode.COMMUNICATION: "Communication",
        126: "Environment",
        127: "Environment",
    }
)
"""Exit codes that a lost pod may well be behind. 126 and 127 are the shell's: the program is not in the image."""
DISRUPTIONS: Final[Mapping[str, Reason]] = MappingProxyType(
    {
        "PreemptionByScheduler": "Preempted",
        "DeletionByTaintManager": "NodeLost",
        "DeletionByPodGC": "NodeLost",
        "EvictionByEvictionAPI": "Evicted",
        "TerminationByKubelet": "Evicted",
    }
)
"""Reasons of a pod's condition DisruptionTarget."""
STRENGTH: Final[tuple[Reason, ...]] = ("Preempted", "NodeLost", "Evicted", "OutOfMemory")
"""Which evidence wins where pods tell different stories."""

NODE_FAULTS: Final[tuple[Reason, ...]] = (
    *("NodeLost", "WorkerLost", "HeadLost"),
    *("Hang", "Communication", "Environment"),
)
"""Reasons that may be a node's: the next attempts keep off it for a time, if there is room elsewhere."""
AVOIDED_SECONDS: Final = 3600.0
"""So long after the failure."""

UNEXPLAINED: Final = ("HeadLost", "WorkerLost", "Communication", "Unknown")
"""For these a pod that is gone already may tell more."""

NODE_SECONDS: Final = 60.0
"""So long the node of a pod may be not ready."""
EVIDENCE_SECONDS: Final = 60.0
"""A node counts as lost only after 40 to 50 s; a trainer that ends for that reason ends earlier."""
EVICTION_SECONDS: Final = 10.0
"""So long Kueue's Workload may say why later than the RayJob that Kueue has suspended is observed."""
LAST_WORDS_SECONDS: Final = 30.0
"""So long the trainer's last status may take to be read once Ray has said that the job ended."""

OWN_CONTAINERS = frozenset({names.HEAD_CONTAINER, names.WORKER_CONTAINER})
EXIT_CODE = re.compile(r"exit code:? (-?\d{1,9})\b")


def action_on(failure: Failure, policy: RunPolicy) -> tuple[Action, str | None]:
    """What to do about a failure, and the job's rule that says so."""
    for rule in policy.failure_rules:
        if (
            (not rule.reasons or failure.reason in rule.reasons)
            and (not rule.exit_codes or failure.exit_code in rule.exit_codes)
            and (rule.message_contains is None or rule.message_contains in failure.message)
        ):
            return rule.action, rule.name
    return DEFAULT_ACTIONS.get(failure.reason, "Restart"), None


def classify(snapshot: Snapshot, now: datetime, *, ready_since: datetime | None) -> Failure | None:
    """Why the current attempt has failed; None as long as nothing says that it has.

    ready_since: when all its pods were ready for the first time. Deadlines are not looked at.
    """
    cause = (
        _reported(snapshot)
        or _disruption(snapshot, now, ready_since)
        or _unreported_end(snapshot, ready_since=ready_since)
        or _start_failure(snapshot, now)
    )
    if cause is None:
        return None
    reason, message, pod = cause
    if reason in UNEXPLAINED and (explained := _strongest_disruption(snapshot.lost_pods, snapshot, now)):
        reason, message, pod = explained
    if reason in ("Communication", "Unknown") and (lost := _lost_worker(snapshot, ready_since=ready_since)):
        reason, message, pod = "WorkerLost", lost[0], lost[1]
    return failed(snapshot, now, reason, message, pod)


def failed(snapshot: Snapshot, now: datetime, reason: Reason, message: str, pod: ObservedPod | None = None) -> Failure:
    """A failure of the current attempt."""
    return Failure(
        reason=reason,
        exit_code=exit_code(snapshot),
        message=message[:1000],
        attempt=snapshot.job.status.attempt,
        pod=pod.name if pod else None,
        node=pod.node or None if pod else None,
        time=timestamp(now),
    )


def seconds_to_wait(failure: Failure, snapshot: Snapshot) -> float:
    """Seconds after the end of an attempt in which a better explanation than this may come."""
    if failure.reason == "Communication":
        return EVIDENCE_SECONDS
    if failure.reason == "Evicted" and failure.pod is None and snapshot.quota and not snapshot.quota.evicted:
        return EVICTION_SECONDS
    if failure.reason == "Unknown" and failure.exit_code is None and head_can_answer(snapshot):
        return LAST_WORDS_SECONDS
    return 0.0


def exit_code(snapshot: Snapshot) -> int | None:
    """The trainer's exit code: of its process, else from the status that it wrote, else from Ray's message."""
    beat, rayjob = snapshot.current_heartbeat(), snapshot.current_rayjob()
    codes: list[int | None] = []
    if beat is not None:
        last = beat.status.last_failure
        codes = [beat.exit_code if beat.complete else None, last.exit_code if last else None]
    if rayjob is not None and _has_failed(rayjob) and (match := EXIT_CODE.search(rayjob.message)):
        codes.append(int(match[1]))
    code = next((each for each in codes if each is not None), None)
    if code is not None and code < 0:
        code = 128 - code  # killed by a signal, in Python's words; now in the shell's
    return code if code is not None and 0 <= code <= 255 else None


def head_of(snapshot: Snapshot) -> ObservedPod | None:
    """The head pod of the current attempt; of two, the older one, in which the trainer ran."""
    heads = [pod for pod in current_pods(snapshot) if pod.role == names.CONTROLLER]
    return min(heads, key=lambda pod: (pod.created, pod.name), default=None)


def named_pod(snapshot: Snapshot) -> ObservedPod | None:
    """The pod with the rank to blame, as the trainer says; with hostNetwork it knows the node only."""
    beat = snapshot.current_heartbeat()
    named = beat.status.last_failure.pod if beat and beat.status.last_failure else None
    return next((pod for pod in current_pods(snapshot) if named and named in (pod.name, pod.node)), None)


def head_can_answer(snapshot: Snapshot) -> bool:
    """Whether there is a head pod that can still be asked for the trainer's last status."""
    head = head_of(snapshot)
    return head is not None and head.deleting_since is None and head.phase == "Running"


def current_pods(snapshot: Snapshot) -> tuple[ObservedPod, ...]:
    """The pods of the current attempt."""
    return tuple(pod for pod in snapshot.pods if pod.attempt == snapshot.job.status.attempt)


def _replaced_by_trainer(snapshot: Snapshot) -> tuple[str, ...]:
    """The pools that a trainer goes on without until there are new pods: those that only generate, while it runs."""
    mapping, rollout = snapshot.job.status.mapping, snapshot.job.spec.get("rollout") or {}
    if not mapping or rollout.get("stream") or exit_code(snapshot) is not None:
        return ()
    return tuple(pool.name for pool in mapping.pools if pool.models == ("rollout",))


def workers_of(snapshot: Snapshot) -> tuple[ObservedPod, ...]:
    """The worker pods of the current attempt."""
    return tuple(pod for pod in current_pods(snapshot) if pod.role == names.WORKER)


def node_of(pod: ObservedPod, snapshot: Snapshot) -> ObservedNode | None:
    """The node of a pod, if it is known and there."""
    return next((node for node in snapshot.nodes or () if node.name == pod.node), None)


def node_is_gone(pod: ObservedPod, snapshot: Snapshot) -> bool:
    """Whether a pod was bound to a node that has been removed."""
    return bool(pod.node) and snapshot.nodes is not None and node_of(pod, snapshot) is None


def bad_nodes(snapshot: Snapshot, now: datetime) -> tuple[str, ...]:
    """The nodes, of those that are known, on which an attempt of the job failed not long ago as if by their fault."""
    failed = {
        each.node
        for each in snapshot.job.status.attempts
        if each.outcome == "Failed" and each.reason in NODE_FAULTS
        if (end := parsed(each.end_time)) and since(end, now) < AVOIDED_SECONDS
    }
    return tuple(sorted(node.name for node in snapshot.nodes or () if node.name in failed))


def _reported(snapshot: Snapshot) -> Cause | None:
    """What the trainer itself says, where its word is enough."""
    code = exit_code(snapshot)
    if code is None or (reason := CONCLUSIVE_EXIT_CODES.get(code)) is None:
        return None
    pod = named_pod(snapshot) or head_of(snapshot)
    return reason, _trainer_message(snapshot) or f"the trainer ended with exit code {code}", pod


def _trainer_message(snapshot: Snapshot) -> str:
    """The trainer's last message."""
    beat = snapshot.current_heartbeat()
    return beat.status.last_failure.message if beat and beat.status.last_failure else ""


def _disruption(snapshot: Snapshot, now: datetime, ready_since: datetime | None) -> Cause | None:
    """What was done to a pod of the attempt, or by Kueue to all of them."""
    # The quota is still reserved until all pods are gone.
    if ready_since and snapshot.quota and snapshot.quota.evicted == "Preempted":
        return "Preempted", f"Kueue took the quota away: {snapshot.quota.message}", None
    replaced = _replaced_by_trainer(snapshot)
    pods = (pod for pod in current_pods(snapshot) if pod.pool not in replaced)
    return _strongest_disruption(pods, snapshot, now)


def _strongest_disruption(pods: Iterable[ObservedPod], snapshot: Snapshot, now: datetime) -> Cause | None:
    causes = [cause for pod in pods if (cause := _pod_disruption(pod, snapshot, now))]
    return min(causes, key=lambda cause: STRENGTH.index(cause[0]), default=None)


def _pod_disruption(pod: ObservedPod, snapshot: Snapshot, now: datetime) -> Cause | None:
    what = f"pod {pod.name}"
    if pod.disruption and (reason := DISRUPTIONS.get(pod.disruption)):
        return reason, f"{what} on node {pod.node or '(none)'} was ended: {pod.disruption} {pod.message}".rstrip(), pod
    if node_is_gone(pod, snapshot):
        return "NodeLost", f"node {pod.node} of {what} is gone", pod
    if (_silence(pod, snapshot, now) or 0.0) >= NODE_SECONDS:
        return "NodeLost", f"node {pod.node} of {what} is not ready", pod
    if pod.phase == "Unknown" or pod.reason in ("NodeLost", "NodeShutdown"):
        return "NodeLost", f"node {pod.node} of {what} does not answer: {pod.message}", pod
    if pod.reason == "Preempting":
        return "Preempted", f"{what} was ended: {pod.message}", pod
    if pod.reason in ("Evicted", "Terminated"):
        return "Evicted", f"{what} was evicted from node {pod.node}: {pod.message}", pod
    if any(each.ended_reason == "OOMKilled" and each.name in OWN_CONTAINERS for each in pod.containers):
        role = "worker" if pod.role == names.WORKER else "controller"
        return "OutOfMemory", f"{what} used more memory than its limit; raise spec.runtime.{role}.memory", pod
    return None


def _unreported_end(snapshot: Snapshot, *, ready_since: datetime | None) -> Cause | None:
    """An end that nothing in the cluster explains, or a pod that was lost without a trace."""
    rayjob, code, head = snapshot.current_rayjob(), exit_code(snapshot), head_of(snapshot)
    beat = snapshot.current_heartbeat()
    has_exited = code not in (None, 0) and beat is not None and beat.complete
    if has_exited or (rayjob is not None and _has_failed(rayjob)):
        culprit = None if code == ExitCode.COMMUNICATION else head  # that one is hardly ever to blame
        return _unexplained(rayjob, code, _trainer_message(snapshot), named_pod(snapshot) or culprit)
    if (
        rayjob is not None
        and ready_since
        and (rayjob.suspended or rayjob.deployment_status in ("Suspending", "Suspended"))
    ):
        why = snapshot.quota.message if snapshot.quota else ""
        return "Evicted", f"RayJob {rayjob.name} was suspended while it ran: {why}".rstrip(": "), None
    if lost := _lost_head(snapshot):
        return lost
    if snapshot.job.status.ray_job_name and (rayjob is None or rayjob.deleting):
        return "HeadLost", f"RayJob {snapshot.job.status.ray_job_name} was deleted, and not by the operator", None
    if lost_worker := _lost_worker(snapshot, ready_since=ready_since):
        return "WorkerLost", *lost_worker
    return None


def _has_failed(rayjob: ObservedRayJob) -> bool:
    """Whether KubeRay says that the job is over, and not well."""
    is_over = rayjob.deployment_status in ("Failed", "ValidationFailed", "Complete")
    return rayjob.job_status != "SUCCEEDED" and (is_over or rayjob.job_status in ("FAILED", "STOPPED"))


def _unexplained(rayjob: ObservedRayJob | None, code: int | None, from_trainer: str, pod: ObservedPod | None) -> Cause:
    message = rayjob.message if rayjob else ""
    if code is not None and (reason := INCONCLUSIVE_EXIT_CODES.get(code)):
        return reason, from_trainer or message or f"the trainer ended with exit code {code}", pod
    if rayjob is not None and rayjob.deployment_status == "ValidationFailed":
        return "Internal", f"KubeRay refused RayJob {rayjob.name}: {message}", None
    if code is not None and code > 128:
        return "Unknown", from_trainer or f"the trainer was ended by signal {code - 128}", pod
    return "Unknown", from_trainer or message or "the trainer ended and left no word", pod


def _lost_head(snapshot: Snapshot) -> Cause | None:
    head, known = head_of(snapshot), snapshot.job.status.head_pod
    if known and (head is None or head.name != known):
        return "HeadLost", f"head pod {known} is gone", None
    if head is not None and (how := _ended(head)):
        return "HeadLost", f"head pod {head.name} {how}", head
    return None


def _lost_worker(snapshot: Snapshot, *, ready_since: datetime | None) -> tuple[str, ObservedPod | None] | None:
    """A worker that ended, or, of a cluster that was whole, one that is missing; and what to say of it.

    Kubernetes' times are whole seconds: one replaced in the second in which the cluster became whole is not missed,
    and need not be, for no trainer has begun by then.
    """
    mapping, replaced = snapshot.job.status.mapping, _replaced_by_trainer(snapshot)
    workers = [pod for pod in workers_of(snapshot) if pod.pool not in replaced]
    for pod in workers:
        if how := _ended(pod):
            return f"worker pod {pod.name} {how}", pod
    expected = sum(pool.nodes for pool in mapping.pools if pool.name not in replaced) if mapping else 0
    if ready_since and len(workers) < expected:
        return f"a worker pod is gone: {len(workers)} of {expected} are left", None
    if ready_since and (late := next((pod for pod in workers if pod.created > ready_since), None)):
        return f"a worker pod is gone; KubeRay made {late.name} in its place", None
    return None


def _ended(pod: ObservedPod) -> str:
    """How a pod ended; empty if it has not."""
    if pod.deleting_since is not None:
        return "was deleted"
    if pod.phase in ("Failed", "Succeeded"):
        return f"ended ({pod.phase}): {pod.reason} {pod.message}".rstrip(": ")
    own = (each for each in pod.containers if each.name in OWN_CONTAINERS)
    ended = next((each for each in own if each.exit_code is not None and not each.running), None)
    return f"ended: container {ended.name}, exit code {ended.exit_code}" if ended else ""


def seconds_until_failure(snapshot: Snapshot, now: datetime) -> float | None:
    """Seconds until what keeps a pod from starting, or a silent node, becomes a failure; None where nothing will.

    No event may come by then.
    """
    silences = (silence for pod in current_pods(snapshot) if (silence := _silence(pod, snapshot, now)) is not None)
    lefts = (*(left for left, _ in _start_problems(snapshot, now)), *(NODE_SECONDS - each for each in silences))
    return min((left for left in lefts if left > 0), default=None)


def _start_failure(snapshot: Snapshot, now: datetime) -> Cause | None:
    """What keeps a pod from starting and has had its time."""
    return next((cause for left, cause in _start_problems(snapshot, now) if left <= 0), None)


def _start_problems(snapshot: Snapshot, now: datetime) -> Iterator[tuple[float, Cause]]:
    """(seconds that are left to it, cause) of all that keeps the attempt's pods from starting."""
    if rayjob := snapshot.current_rayjob():
        waited = since(_latest(max(rayjob.created, rayjob.started or rayjob.created), snapshot), now)
        yield from ((limit - waited, cause) for limit, cause in starting.refusals(rayjob, _together(snapshot)))
    for pod in current_pods(snapshot):
        waited = since(_latest(max(pod.created, pod.not_ready_since or pod.created), snapshot), now)
        yield from ((limit - waited, cause) for limit, cause in starting.problems(pod))


def _together(snapshot: Snapshot) -> Counter[str]:
    """How many pods the attempt has, and what they request together where the operator has reserved it.

    Nothing where templates name priorities: a quota may then count some of the pods only.
    """
    status, runtime = snapshot.job.status, snapshot.job.spec.get("runtime")
    if "priorityClassName" in json.dumps(runtime):
        return Counter()
    pods = 1 + sum(pool.nodes for pool in status.mapping.pools) if status.mapping else 1
    return sum((each.amounts for each in status.reserved), Counter({"pods": pods}))


def _silence(pod: ObservedPod, snapshot: Snapshot, now: datetime) -> float | None:
    """Seconds for which the node of a pod has been silent; None where it is not."""
    node = node_of(pod, snapshot)
    if node is None or node.ready or pod.ready:
        return None
    return since(_latest(pod.not_ready_since or pod.created, snapshot), now)


def _latest(moment: datetime, snapshot: Snapshot) -> datetime:
    """When a grace period begins: not before the operator was there to see."""
    return max(moment, snapshot.watching_since)
