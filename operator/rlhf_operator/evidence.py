"""Evidence of failures in a snapshot: one function for each source of evidence. `failure` ranks them in a table."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias

from rlhf_api.exit_codes import ExitCode
from rlhf_api.quantities import amount
from rlhf_api.spec.run_policy import Action, Reason
from rlhf_api.tables import read_table
from rlhf_operator import names
from rlhf_operator import observed_attempt as attempt
from rlhf_operator.snapshot import ObservedPod, ObservedRayJob, Snapshot
from rlhf_operator.times import since

Cause: TypeAlias = tuple[Reason, str, ObservedPod | None]
"""Cause of a failure: reason, message, and the pod that it is about."""
NODE_SECONDS: Final = 60.0  # a node that is not ready for longer counts as lost
STRENGTH: Final[tuple[Reason, ...]] = ("Preempted", "NodeLost", "Evicted", "OutOfStorage", "OutOfMemory")
"""Failure reasons of disrupted pods, the strongest evidence first."""
AWAITED: Final[tuple[Reason, ...]] = ("PodsRefused", "SecretMissing", "ClaimMissing")
"""Start problems that last until somebody creates or allows what is missing, or to the startup deadline."""
QUOTA: Final = "exceeded quota"  # in the API server's refusal of a pod
OVER_QUOTA = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")
OF_QUOTA = re.compile(r"^(requests\.|limits\.|count/)")
"""Pattern of a quota's prefix: requests., limits. or count/. Requests serve as a lower bound of limits."""
PULLING = re.compile("Image|^RegistryUnavailable|^SignatureValidation")
"""Pattern of the reasons of a container that waits because the kubelet has no image for it."""
CREATING = re.compile("^(Create|Run)Container|^P(re|ost)StartHookError")
"""Pattern of the reasons of a container that waits because the kubelet cannot make or run it."""
OVER_STORAGE = re.compile(r"exceed\w* (the|its) .*limit|consumption of ephemeral-storage")
"""Pattern in the kubelet's message about a pod that was evicted for its own use of the node's disk."""
OVER_MEMORY = re.compile("consumption of memory")
"""Pattern in the kubelet's message about a pod that was evicted for memory beyond its request."""
CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')


class Case(NamedTuple):
    """Snapshot in which evidence of a failure is looked for, and the time of the pass."""

    snapshot: Snapshot
    now: datetime
    ready_since: datetime | None
    """Time at which all pods of the attempt were first ready; None if they never were."""


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """Row of the table of failures: facts that prove a failure reason, and its consequences."""

    action: Action
    """Action if no failureRule matches; Ignore does not count against runPolicy.backoffLimit."""
    is_node_fault: bool = False
    """Whether the node may be to blame for such a failure."""
    exit_codes: tuple[int, ...] = ()
    """Exit codes of the trainer that mean such a failure."""
    is_conclusive: bool = False
    """Whether no event in the cluster causes these exit codes; a lost pod may cause others."""
    disruptions: tuple[str, ...] = ()
    """Reasons of a pod's condition DisruptionTarget that mean such a failure."""
    start_seconds: float = 0.0
    """Seconds until this start problem fails the attempt; 0: it may heal, or the failure is no start problem."""


_ROWS = read_table(__package__, "failures.yaml", dict[Reason, FailureClass])
CLASSES: Final[Mapping[str, FailureClass]] = {str(reason): each for reason, each in _ROWS.items()}
"""Facts and consequences of a failure by its reason."""
OF_EXIT_CODE: Final = {code: reason for reason, each in _ROWS.items() for code in each.exit_codes}
DISRUPTIONS: Final = {name: reason for reason, each in _ROWS.items() for name in each.disruptions}
START_SECONDS: Final = {name: seconds for name, each in CLASSES.items() if (seconds := each.start_seconds)}
"""Seconds until the attempt fails, by reason of a start problem that does not heal."""


def conclusive_exit(case: Case) -> Cause | None:
    """Find an exit code of the trainer that no event in the cluster causes."""
    code = attempt.exit_code(case.snapshot)
    if (reason := OF_EXIT_CODE.get(code or 0)) is None or not CLASSES[reason].is_conclusive:
        return None
    pod = attempt.named_pod(case.snapshot) or attempt.head_of(case.snapshot)
    return reason, attempt.trainer_message(case.snapshot) or f"the trainer ended with exit code {code}", pod


def preempted_quota(case: Case) -> Cause | None:
    """Find the cause Preempted: Kueue has evicted a running attempt; its quota is reserved until all pods are gone."""
    quota = case.snapshot.quota
    if case.ready_since and quota and quota.evicted == "Preempted":
        return "Preempted", f"Kueue took the quota away: {quota.message}", None
    return None


def disrupted_pod(case: Case) -> Cause | None:
    """Find the failure cause in a pod that the trainer cannot do without: disruption, lost node or out of memory."""
    survivable = attempt.survivable_pools(case.snapshot)
    return _strongest((pod for pod in attempt.current_pods(case.snapshot) if pod.pool not in survivable), case)


def disrupted_lost_pod(case: Case) -> Cause | None:
    """Find the failure of a disrupted pod that is already deleted."""
    return _strongest(case.snapshot.lost_pods, case)


def _strongest(pods: Iterable[ObservedPod], case: Case) -> Cause | None:
    causes = (cause for pod in pods if (cause := _end_of(pod, case)))
    return min(causes, key=lambda cause: STRENGTH.index(cause[0]), default=None)


def _end_of(pod: ObservedPod, case: Case) -> Cause | None:
    """Return the cause of a pod's end by the first sign on it; None without a sign."""
    name, details, node = f"pod {pod.name}", pod.message, pod.node or "(none)"
    is_evicted, silence = pod.reason == "Evicted", node_silence(pod, case.snapshot, case.now) or 0.0
    is_unreachable = pod.phase == "Unknown" or pod.reason in ("NodeLost", "NodeShutdown")
    memory = f"spec.runtime.{'worker' if pod.role == names.WORKER else 'controller'}.memory"
    disruption, ended = DISRUPTIONS.get(pod.disruption), f"{name} on node {node} was ended: {pod.disruption} {details}"
    signs: tuple[tuple[object, Reason, str], ...] = (
        (is_evicted and OVER_STORAGE.search(details), "OutOfStorage", f"{name} used too much disk: {details}"),
        (is_evicted and OVER_MEMORY.search(details), "OutOfMemory", f"{name} used too much memory: {details}"),
        (disruption, disruption or "Unknown", ended),
        (attempt.node_is_gone(pod, case.snapshot), "NodeLost", f"node {node} of {name} is gone"),
        (silence >= NODE_SECONDS, "NodeLost", f"node {node} of {name} is not ready"),
        (is_unreachable, "NodeLost", f"node {node} of {name} does not answer: {details}"),
        (pod.reason == "Preempting", "Preempted", f"{name} was ended: {details}"),
        (pod.reason in ("Evicted", "Terminated"), "Evicted", f"{name} was evicted from node {node}: {details}"),
        (
            pod.is_out_of_memory(attempt.OWN_CONTAINERS),
            "OutOfMemory",
            f"{name} used more memory than its limit; raise {memory}",
        ),
    )
    return next(((reason, message.rstrip(), pod) for is_seen, reason, message in signs if is_seen), None)


def unexplained_end(case: Case) -> Cause | None:
    """Find a failed end of the trainer that neither its exit code nor a pod explains."""
    if not attempt.has_failed(case.snapshot):
        return None
    rayjob, code = case.snapshot.current_rayjob(), attempt.exit_code(case.snapshot) or 0
    # The head is seldom to blame for failed communication.
    head = None if code == ExitCode.COMMUNICATION else attempt.head_of(case.snapshot)
    pod, own = attempt.named_pod(case.snapshot) or head, attempt.trainer_message(case.snapshot)
    message = own or (rayjob.message if rayjob else "")
    if reason := OF_EXIT_CODE.get(code):
        return reason, message or f"the trainer ended with exit code {code}", pod
    if rayjob is not None and rayjob.deployment_status == "ValidationFailed":
        return "Internal", f"KubeRay refused RayJob {rayjob.name}: {rayjob.message}", None
    if code > 128:
        return "Unknown", own or f"the trainer was ended by signal {code - 128}", pod
    return "Unknown", message or "the trainer ended and left no word", pod


def suspended_rayjob(case: Case) -> Cause | None:
    """Find a RayJob that was suspended while its attempt ran."""
    rayjob, quota = case.snapshot.current_rayjob(), case.snapshot.quota
    is_suspended = rayjob and (rayjob.suspended or rayjob.deployment_status in ("Suspending", "Suspended"))
    if rayjob is None or not is_suspended or not case.ready_since:
        return None
    message = f"RayJob {rayjob.name} was suspended while it ran: {quota.message if quota else ''}"
    return "Evicted", message.rstrip(": "), None


def refused_run_folder(case: Case) -> Cause | None:
    """Find a pod whose user may not write to the run folder on the job's claim."""
    found = (each for pod in attempt.current_pods(case.snapshot) for each in pod.containers)
    failed = next((each for each in found if each.name == names.FOLDER_CONTAINER and each.exit_code), None)
    return ("Environment", failed.last_words.strip() or "no run folder could be made", None) if failed else None


def lost_head(case: Case) -> Cause | None:
    """Find a head pod that is gone or has ended, or a RayJob that somebody else than the operator deleted."""
    head, rayjob, status = attempt.head_of(case.snapshot), case.snapshot.current_rayjob(), case.snapshot.job.status
    if status.head_pod and (head is None or head.name != status.head_pod):
        return "HeadLost", f"head pod {status.head_pod} is gone", None
    if head is not None and (how := attempt.how_ended(head)):
        return "HeadLost", f"head pod {head.name} {how}", head
    if status.ray_job_name and (rayjob is None or rayjob.deleting):
        return "HeadLost", f"RayJob {status.ray_job_name} was deleted, and not by the operator", None
    return None


def lost_worker(case: Case) -> Cause | None:
    """Find a worker pod that has ended, or is missing from a cluster that was complete, except of an elastic pool."""
    survivable, mapping = attempt.survivable_pools(case.snapshot), case.snapshot.job.status.mapping
    if mapping and mapping.elastic_pool:
        survivable = (*survivable, mapping.elastic_pool.name)
    workers = [pod for pod in attempt.workers_of(case.snapshot) if pod.pool not in survivable]
    for pod in workers:
        if how := attempt.how_ended(pod):
            return "WorkerLost", f"worker pod {pod.name} {how}", pod
    if case.ready_since is None:
        return None
    expected = attempt.expected_workers(case.snapshot, survivable)
    if len(workers) < expected:
        return "WorkerLost", f"a worker pod is gone: {len(workers)} of {expected} are left", None
    # A pod replaced in the second in which the cluster became complete is missed, but no trainer has begun by then.
    if new := next((pod for pod in workers if pod.created > case.ready_since), None):
        return "WorkerLost", f"a worker pod is gone; KubeRay made {new.name} in its place", None
    return None


def start_failure(case: Case) -> Cause | None:
    """Find a problem that does not heal and has kept a pod from starting for longer than its grace period."""
    return next((cause for left, cause in start_problems(case.snapshot, case.now) if left <= 0), None)


def seconds_until_failure(snapshot: Snapshot, now: datetime) -> float | None:
    """Return the seconds until a start problem or silent node is a failure, which no event reports; None: neither."""
    pods = attempt.current_pods(snapshot)
    silences = (silence for pod in pods if (silence := node_silence(pod, snapshot, now)) is not None)
    lefts = (*(left for left, _ in start_problems(snapshot, now)), *(NODE_SECONDS - each for each in silences))
    return min((left for left in lefts if 0 < left < math.inf), default=None)


def start_problems(snapshot: Snapshot, now: datetime) -> Iterator[tuple[float, Cause]]:
    """Yield (seconds until the attempt fails, cause) of each problem that keeps a pod from starting."""
    if (rayjob := snapshot.current_rayjob()) and (cause := _refusal(rayjob, snapshot)):
        waited = _waited(max(rayjob.created, rayjob.started or rayjob.created), snapshot, now)
        yield START_SECONDS.get(cause[0], math.inf) - waited, cause
    for pod in attempt.current_pods(snapshot):
        waited = _waited(max(pod.created, pod.not_ready_since or pod.created), snapshot, now)
        yield from ((START_SECONDS.get(cause[0], math.inf) - waited, cause) for cause in problems_of(pod))


def is_taken_up(rayjob: ObservedRayJob) -> bool:
    """Whether KubeRay has started to process a RayJob and does not hold it suspended."""
    return rayjob.deployment_status not in ("", "Suspended")


def _refusal(rayjob: ObservedRayJob, snapshot: Snapshot) -> Cause | None:
    """Return the cause if a RayJob's pods are refused; None if no pod is, or if a full quota may get room again."""
    message = f"pods cannot be made: {rayjob.refused}"
    if QUOTA not in rayjob.refused:
        return ("PodsRefused", message, None) if rayjob.refused else None
    together = Counter[str]()
    if "priorityClassName" not in json.dumps(snapshot.job.spec.get("runtime")):  # else a quota may count some pods only
        pods = Counter({"pods": 1 + attempt.expected_workers(snapshot)})
        together = sum((each.amounts for each in snapshot.job.status.reserved), pods)
    lacks = _never_enough(rayjob.refused, together)
    return ("QuotaTooSmall", f"{message}; the whole job needs more {lacks} than that", None) if lacks else None


def problems_of(pod: ObservedPod) -> Iterator[Cause]:
    """Yield the known problems that keep a pod from starting, besides a lack of room."""
    for each in pod.containers:
        message = f"container {each.name} of pod {pod.name}: {each.waiting_message or each.waiting_reason}"
        is_missing = "not found" in each.waiting_message or "couldn't find key" in each.waiting_message
        if each.waiting_reason == "CreateContainerConfigError" and is_missing:
            yield "SecretMissing", message, pod
        elif CREATING.search(each.waiting_reason):
            yield "ContainerRefused", message, pod
        elif PULLING.search(each.waiting_reason):
            yield "ImagePull", message, pod
    if claim := CLAIM.search(pod.unschedulable):
        yield "ClaimMissing", f"there is no PersistentVolumeClaim {claim[1]}, which pod {pod.name} needs", pod


def _never_enough(refused: str, together: Mapping[str, int]) -> str:
    """Return the resource whose quota, even if unused, is too small for this pod or the attempt; empty if none is.

    together: requests of the whole attempt, with the number of its pods.
    """
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


def node_silence(pod: ObservedPod, snapshot: Snapshot, now: datetime) -> float | None:
    """Return the seconds for which a pod's node was silent; None if node or pod is ready, or the state is unknown."""
    begun = attempt.silent_since(pod, snapshot)
    return None if begun is None or pod.ready else _waited(begun, snapshot, now)


def _waited(begun: datetime, snapshot: Snapshot, now: datetime) -> float:
    """Return the seconds of a grace period that are over, without the time before the operator began to watch."""
    return since(max(begun, snapshot.watching_since), now)
