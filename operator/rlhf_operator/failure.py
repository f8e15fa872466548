"""The table of failures: evidence in a snapshot, the class (reason) that it proves, and the action that follows."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Final

from rlhf_api.spec.run_policy import Action, Reason, RunPolicy
from rlhf_api.status import Failure
from rlhf_operator import evidence, names
from rlhf_operator.evidence import CLASSES, Case, Cause, disrupted_lost_pod, lost_worker
from rlhf_operator.observed_attempt import exit_code, head_can_answer
from rlhf_operator.snapshot import ObservedPod, Snapshot
from rlhf_operator.times import parsed, since, timestamp

NODE_AVOIDED_SECONDS: Final = 3600.0
"""Seconds after a failure for which the next attempts avoid its node, if there is room elsewhere."""
EVIDENCE_SECONDS: Final = 60.0
"""Seconds to wait for evidence of a lost node: Kubernetes takes 40 to 50 s, and the trainer may end earlier."""
EVICTION_SECONDS: Final = 10.0
"""Seconds to wait for the reason in Kueue's Workload, which may come after the RayJob is suspended."""
LAST_STATUS_SECONDS: Final = 30.0
"""Seconds to wait for the trainer's last status once Ray has reported the end of the job."""


Evidence = Callable[[Case], Cause | None]
"""Function that looks for one kind of evidence of a failure; returns the proved cause, or None."""
EVIDENCE: Final[tuple[Evidence, ...]] = (
    evidence.conclusive_exit,
    evidence.preempted_quota,
    evidence.disrupted_pod,
    evidence.unexplained_end,
    evidence.suspended_rayjob,
    evidence.refused_run_folder,
    evidence.lost_head,
    evidence.lost_worker,
    evidence.start_failure,
)
"""Table of evidence, the strongest first; `reconcile.running` checks deadlines (Hang, StartupTimeout)."""
YIELDS_TO: Final[Mapping[Reason, tuple[Evidence, ...]]] = {
    "HeadLost": (disrupted_lost_pod,),
    "WorkerLost": (disrupted_lost_pod,),
    "Communication": (disrupted_lost_pod, lost_worker),
    "Unknown": (disrupted_lost_pod, lost_worker),
}
"""Kinds of evidence by failure reason; if one of them is found, its cause replaces the cause with this reason."""


def action_on(failure: Failure, policy: RunPolicy) -> tuple[Action, str | None]:
    """Return the action after a failure, and the name of the failureRule that demands it; None without such a rule."""
    for rule in policy.failure_rules:
        if (
            (not rule.reasons or failure.reason in rule.reasons)
            and (not rule.exit_codes or failure.exit_code in rule.exit_codes)
            and (rule.message_contains is None or rule.message_contains in failure.message)
        ):
            return rule.action, rule.name
    return CLASSES.get(failure.reason, CLASSES["Unknown"]).action, None


def classify(snapshot: Snapshot, now: datetime, *, ready_since: datetime | None) -> Failure | None:
    """Return the failure of the current attempt by the strongest evidence besides deadlines; None without evidence."""
    case = Case(snapshot, now, ready_since)
    if (cause := _first(EVIDENCE, case)) is None:
        return None
    return failed(snapshot, now, *(_first(YIELDS_TO.get(cause[0], ()), case) or cause))


def _first(rows: Iterable[Evidence], case: Case) -> Cause | None:
    return next((cause for find in rows if (cause := find(case))), None)


def failed(snapshot: Snapshot, now: datetime, reason: Reason, message: str, pod: ObservedPod | None = None) -> Failure:
    """Return the description of a failure of the current attempt, for its status."""
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
    """Return the seconds for which the operator waits after an attempt's end, because stronger evidence may come."""
    if failure.reason == "Communication":
        return EVIDENCE_SECONDS
    if failure.reason == "Evicted" and failure.pod is None and snapshot.quota and not snapshot.quota.evicted:
        return EVICTION_SECONDS
    if failure.reason == "Unknown" and failure.exit_code is None and head_can_answer(snapshot):
        return LAST_STATUS_SECONDS
    return 0.0


def bad_nodes(snapshot: Snapshot, now: datetime) -> tuple[str, ...]:
    """Return the names of nodes to avoid: blamed for a recent failure, or of a group that added no node in time."""
    # For a withdrawn attempt the status names the node that its group did not add.
    blamed = {
        each.node
        for each in snapshot.job.status.attempts
        if each.node and (each.outcome == "Withdrawn" or (each.reason and CLASSES[each.reason].is_node_fault))
        if (end := parsed(each.end_time)) and since(end, now) < NODE_AVOIDED_SECONDS
    }
    groups = {names.group_of(each) for each in blamed} - {""}
    return tuple(sorted(each.name for each in snapshot.nodes or () if each.name in blamed or each.group in groups))
