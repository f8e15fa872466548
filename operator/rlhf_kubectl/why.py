"""Sentences on what a job waits for, since when, and what to do; for a failed job on what failed. Pure, without I/O."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from rlhf_api.exit_codes import ExitCode
from rlhf_api.spec.run_policy import Action, Reason
from rlhf_api.status import Condition, ConditionType, Failure, Phase, Status
from rlhf_api.tables import read_table
from rlhf_kubectl.jobs import ENDED_PHASES, JobWarning
from rlhf_operator import names
from rlhf_operator.conditions import explaining, found
from rlhf_operator.snapshot import ObservedJob, ObservedPod
from rlhf_operator.times import parsed, since
from rlhf_planning.numbers import duration

STARTING: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Reasons for which every container waits for a while before it starts."""
MAX_PODS: Final = 4
WORTH_SHOWING: Final = frozenset({"BetterPlacement", "SmallerMicroBatches", "ShapesUnknown", "QueueIgnored"})
"""Reasons of conditions that are explained to the user even while the job runs."""
TROUBLE: Final[Mapping[ConditionType, str]] = {
    "Training": "Unknown",
    "Slow": "True",
    "SandboxesReady": "False",
    "Healthy": "False",
}
"""Type of a condition -> status in which the condition is explained to the user while the job runs."""
OPERATORS: Final = "kubectl get deployments -A -l app.kubernetes.io/name=rlhf-operator"


class Row(NamedTuple):
    """Meaning of a word, in Markdown, and its remedy, in which {job} stands for the job's name."""

    means: str
    remedy: str = ""


class StatusTable(NamedTuple):
    """Table status_table.yaml of the words of a job's status, which docs/status.md shows.

    The key of a condition's row is status and reason, such as `False InvalidSpec`.
    """

    phases: Mapping[Phase, str]
    about: Mapping[ConditionType, str]
    conditions: Mapping[ConditionType, Mapping[str, Row]]
    failures: Mapping[Reason, Row]
    actions: Mapping[Action, str]
    events: Mapping[str, str]
    exit_codes: Mapping[int, Row]


TABLE: Final = read_table(__package__, "status_table.yaml", StatusTable)
CONDITIONS: Final[Mapping[tuple[str, str], str]] = {
    (kind, key.split()[1]): row.remedy for kind, rows in TABLE.conditions.items() for key, row in rows.items()
}
FAILURES: Final[Mapping[str, str]] = {reason: row.remedy for reason, row in TABLE.failures.items()}


def why(job: ObservedJob, pods: Sequence[ObservedPod], warning: JobWarning | None, now: datetime) -> list[str]:
    """Return sentences about a job: its state first, then what to do."""
    texts = [text.strip() for text in dict.fromkeys(_sentences(job, pods, warning, now)) if text.strip()]
    return [text if text.endswith((".", "`")) else f"{text}." for text in texts]


def _sentences(
    job: ObservedJob, pods: Sequence[ObservedPod], warning: JobWarning | None, now: datetime
) -> Iterator[str]:
    status, name = job.status, job.name
    if job.deleting:
        yield f"{name} is being deleted; it is gone when its pods have ended"
        return
    if not status.conditions:
        yield f"No operator has looked at {name} in the {_ago(job.created, now)} since it was created"
        yield f"See whether one runs and watches namespace {job.namespace}: {OPERATORS}"
        return
    match status.phase:
        case "Succeeded":
            where = f"; what it made is {status.output.uri}" if status.output else ""
            yield f"{name} succeeded {_ago(parsed(status.completion_time), now)} ago{where}"
            yield f"`kubectl rlhf fetch {name} DIR` copies it"
        case "Failed":
            yield from _failed(job, now)
        case "Running":
            yield from _running(name, status, now)
        case _:
            yield from _waiting(name, status, pods, warning, now)
    if status.phase in ENDED_PHASES:
        yield from status.causes
    elif (status.observed_generation or 0) < job.generation:
        yield "The operator has not acted on the latest change of the spec yet"


def _failed(job: ObservedJob, now: datetime) -> Iterator[str]:
    name, status = job.name, job.status
    failed, when = found(status.conditions, "Failed"), _ago(parsed(status.completion_time), now)
    failure = final_failure(status)
    if failed:
        yield f"{name} failed {when} ago ({failed.reason})"
        yield "" if failure else failed.message
        yield CONDITIONS.get(("Failed", failed.reason), "")
    else:
        yield f"{name} failed {when} ago"
    if failure:
        yield from _failure(name, failure, now)
    attempts = [f"{each.attempt} {each.reason or each.outcome}" for each in status.attempts]
    if len(attempts) > 1:
        yield f"Its attempts: {', '.join(attempts)}"
    ready = found(status.conditions, "ClusterReady")
    if ready and ready.reason == "Kept":
        yield f"Its pods were kept. {CONDITIONS['ClusterReady', 'Kept']}"
    saved = f"; it goes on from step {status.checkpoint.step}" if status.checkpoint else ""
    yield f"When that is put right, delete the job and create it again with this name{saved}"


def final_failure(status: Status) -> Failure | None:
    """Return the failure of an attempt with which the job failed; None if it failed for another reason."""
    failed = found(status.conditions, "Failed")
    is_of_attempt = failed is None or failed.reason in (*FAILURES, "BackoffLimitExceeded", "FailureRule")
    return status.last_failure if is_of_attempt else None


def _failure(name: str, failure: Failure, now: datetime) -> Iterator[str]:
    attempt = f"Attempt {failure.attempt}" if failure.attempt else "An attempt"
    meanings = {int(each): f" ({each.name.lower().replace('_', ' ')})" for each in ExitCode}
    number = failure.exit_code
    code = f", exit code {number}{meanings.get(number, '')}" if number is not None else ""
    rule = f", by its rule {failure.rule}" if failure.rule else ""
    yield f"{attempt} failed {_ago(parsed(failure.time), now)} ago: {failure.reason}{code}{rule}"
    if failure.pod:
        yield f"To blame is pod {failure.pod}{f' on node {failure.node}' if failure.node else ''}"
    yield f"It said: {failure.message}"
    yield FAILURES.get(failure.reason, "")
    option = f" --attempt {failure.attempt}" if failure.attempt else ""
    yield f"Its log: `kubectl rlhf logs {name}{option}`"


def _running(name: str, status: Status, now: datetime) -> Iterator[str]:
    progress = status.progress
    if progress and progress.step:
        last = f", the last one {_ago(parsed(progress.last_step_time), now)} ago" if progress.last_step_time else ""
        left = f"; about {duration(progress.remaining_seconds)} are left" if progress.remaining_seconds else ""
        yield f"{name} trains and waits for nothing: step {progress.step} of {progress.total_steps}{last}{left}"
    else:
        yield f"{name} trains and has not made a step yet"
    if status.checkpoint:
        saved = status.checkpoint
        yield f"Step {saved.step} was saved {_ago(parsed(saved.time), now)} ago"
    for each in status.conditions:
        if TROUBLE.get(each.type) == each.status or each.reason in WORTH_SHOWING:
            yield each.message
            yield CONDITIONS.get((each.type, each.reason), "").format(job=name)


def _waiting(
    name: str, status: Status, pods: Sequence[ObservedPod], warning: JobWarning | None, now: datetime
) -> Iterator[str]:
    condition = explaining_condition(status)
    if condition is None:
        yield f"{name} is {status.phase}"
        return
    waited = _ago(_waits_since(condition, status, pods), now)
    yield f"{name} is {status.phase} and has been waiting for {waited} ({condition.type}: {condition.reason})"
    yield condition.message
    if status.phase == "Restarting" and status.last_failure:
        yield from _failure(name, status.last_failure, now)
    if (ahead := parsed(status.next_attempt_time)) and ahead > now:
        yield f"No attempt begins in the next {duration((ahead - now).total_seconds())}"
    # The condition's message has some of these sentences already.
    complaints = [each for pod in pods if (each := complaint(pod, now)) and each not in condition.message]
    yield from complaints[:MAX_PODS]
    if len(complaints) > MAX_PODS:
        yield f"{len(complaints) - MAX_PODS} more of its pods are not ready"
    if warning and warning.note not in condition.message:
        yield f"The latest warning, {_ago(parsed(warning.time), now)} ago, about {warning.about}: {warning.note}"
    start = f"after step {status.checkpoint.step}" if status.checkpoint else "from the start, as no checkpoint is there"
    yield CONDITIONS.get((condition.type, condition.reason), "").format(job=name, start=start)


def explaining_condition(status: Status) -> Condition | None:
    """Return the condition that explains the phase; see `phase_of`."""
    existing = explaining(status, status.phase)
    awaited = "True" if status.phase == "Suspended" else "False"
    return next((each for each in existing if each.status == awaited), existing[0] if existing else None)


def _waits_since(condition: Condition, status: Status, pods: Sequence[ObservedPod]) -> datetime | None:
    """Return the time since which a job waits: the latest change of its explaining condition or its suspension."""
    suspension = found(status.conditions, "Suspended")
    changes = [parsed(each.last_transition_time) for each in (condition, suspension) if each]
    if condition.reason == "Suspending":
        changes += [pod.deleting_since for pod in pods]
    return max((each for each in changes if each), default=None)


def complaint(pod: ObservedPod, now: datetime) -> str:
    """Return a sentence on why a pod does not run, has failed or does not end; empty otherwise."""
    which = {names.CONTROLLER: "Head pod", names.WORKER: "Worker pod"}.get(pod.role, "Pod")
    pod_is = f"{which} {pod.name}"
    if pod.deleting_since:
        return f"{pod_is} was told to end {_ago(pod.deleting_since, now)} ago and is still there"
    if pod.unschedulable:
        return f"{pod_is} has no node: {pod.unschedulable}"
    if stuck := next((each for each in pod.containers if each.waiting_reason not in STARTING), None):
        why = f"{stuck.waiting_reason}: {stuck.waiting_message}".rstrip(": ")
        return f"{pod_is}: its container {stuck.name} waits, {why}"
    if pod.phase == "Failed":
        return f"{pod_is} failed: {pod.message or pod.reason or 'nothing says why'}"
    if pod.node and pod.phase == "Pending":
        return f"{pod_is} starts on node {pod.node} since {_ago(pod.scheduled or pod.created, now)}"
    return ""


def _ago(moment: datetime | None, now: datetime) -> str:
    """Format the time since a moment in whole seconds, at least 1: the API server's times are no finer."""
    return duration(max(round(since(moment, now)), 1)) if moment else "some time"
